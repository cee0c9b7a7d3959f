"""The contract of every store: its promises, as Protocols, and the errors that it may raise.

Promises (DESIGN rules 1 and 2):

- When `MessageWriter.commit` returns, the message survives a power cut. Before, it does not exist.
- When `settle` returns, every change in it survives, all or none. An outcome, the removal of
  its delivery and the bounce that reports it are one `settle`.
- The last delivery to leave takes the message and its body with it, in the same atomic write.
- A claimed delivery is handed out to no other caller until it is settled or released. Private
  stores forget claims in a crash; shared ones let them expire.
- On a shared store claims hang on a lease. When it ends before it was renewed, others may claim the
  deliveries; what this relay still does with them (`settle`, `release`) changes nothing any more, nothing
  more is handed out, and `check_claim` and reading their messages raise ClaimLostError, so that this relay
  sends nothing that another one sends.

Failure: every method raises `StoreError` or a subclass and nothing else. After an error nothing of
that call is visible, except that a `settle` whose result was lost may or may not have happened
(the delivery is then attempted again: at least once).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import NamedTuple, Protocol, Self, TypedDict, Unpack

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Envelope, Message
from zonerelay.model.message_id import MessageId
from zonerelay.model.outcome import Outcome
from zonerelay.model.queue_name import QueueName

CHUNK_SIZE = 64 * 1024
SHARED = "the queue is shared: others may have mail in it"
"""The answer of `left_over` on a shared store."""


class Unhealthy(StrEnum):
    """The reasons why a store accepts no new mail. Clients and `/readyz` see the texts."""

    NO_SPACE = "insufficient disk space"
    DAMAGED = "the spool is damaged"
    WRITE_FAILED = "the spool cannot be written"
    CLOSED = "the spool is closed"
    SERVER_DOWN = "the spool's server cannot be reached"
    SERVER_DENIES = "the spool's server denies what the queue needs"
    SERVER_UNSAFE = "the spool's server may lose what it has acknowledged"
    DATABASE_DOWN = "the database cannot be used"
    NO_LEASE = "the lease on the queue has run out"


class StoreError(Exception):
    """The store could not do it now; asking again later may work. Clients see 451 4.3.0."""


class StoreLostError(StoreError):
    """The connection was lost, or the server does not answer. A read may be asked again."""


class StoreFullError(StoreError):
    """No space left, or less than `min_free_space`. Clients see 452 4.3.1."""


class StoreCorruptError(StoreError):
    """A record could not be read back. It stays where it is, for the operator who repairs the spool."""


class StoreOpenError(StoreError):
    """The store cannot be opened at all; the text says what the operator should do."""


class MessageNotFoundError(StoreError):
    """No such message: it was settled, dropped, or never committed."""


class ClaimLostError(StoreError):
    """The lease has ended: another relay may be sending what this relay had claimed of the message."""


class MessageSettledError(MessageNotFoundError):
    """The store has found out that it can never be sent, and has said so: nothing is left to settle."""


@dataclass(frozen=True, slots=True)
class Finish:
    """The delivery has its final outcome and leaves the store. `failure`: it was not delivered."""

    delivery: Delivery
    failure: Outcome | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Postpone:
    """The delivery stays. `delivery` is its new durable state (deferred, held, warned, or due now)."""

    delivery: Delivery


@dataclass(frozen=True, slots=True)
class Submit:
    """A message of our own making (a DSN) that must appear in the same write as what it reports.

    `about` are the deliveries that it reports. A shared store leaves it out when the claims on all of them
    were lost: the relay that has them now reports for itself.
    """

    message: Message
    body: bytes
    deliveries: tuple[Delivery, ...]
    about: tuple[DeliveryKey, ...] = ()


Change = Finish | Postpone | Submit


News = Callable[[QueueName], None]
"""`on_news(queue)`: the queue may hold something to claim that this relay was not told of: others share the
store and have left it, or a repair has found it. Must not raise."""

Lost = Callable[[Collection[DeliveryKey]], None]
"""`on_lost(keys)` of a shared store: the claims on these are gone. What has not been begun must be dropped
and its claim released; what is being attempted ends without an effect on the store. `node` may be another
number from here on. Must not raise."""


@dataclass(frozen=True, slots=True)
class Once:
    """What a message is stored only once by. `identity` and `digest` are hexadecimal digests: of who submits
    which key for which envelope, and of the content that is compared. `until` is the Unix time up to which
    the store remembers them.
    """

    identity: str
    digest: str
    until: float


@dataclass(frozen=True, slots=True)
class Kept:
    """What a store remembers of a `Once`: the message that was stored by it."""

    message_id: MessageId
    digest: str
    until: float


class Reserved(NamedTuple):
    """What a register knows of an idempotency key; `is_pending`: its message may be stored yet."""

    kept: Kept
    worker: int
    is_pending: bool


class KeyRegister(Protocol):
    """What a `Reservations` needs of a register; `worker` is the number of the worker that asks."""

    @property
    def worker(self) -> int: ...

    publishes: bool
    """Each worker tells it the keys of its own spool."""
    problem: str
    """What is wrong with it, as a message to the operator."""

    async def is_published(self) -> bool: ...

    async def mark_published(self) -> None: ...

    async def reserve(self, once: Once, message_id: MessageId, now: float) -> Reserved | None: ...

    async def settle(self, identity: str, message_id: MessageId, is_kept: bool) -> None: ...

    async def pending(self) -> list[tuple[str, MessageId]]: ...

    async def publish(self, page: Collection[tuple[str, Kept]]) -> None: ...

    async def forget(self, now: float, most: int) -> None: ...

    def close(self) -> None: ...


class StoredBeforeError(StoreError):
    """The same `Once` was committed before, with the same content; nothing was stored now."""

    def __init__(self, message_id: MessageId) -> None:
        super().__init__(message_id)
        self.message_id = message_id


class OtherContentError(StoreError):
    """A message with other content was committed with the same identity; nothing was stored now."""


class BeingStoredError(StoreError):
    """It cannot be said yet whether the same `Once` was committed: asking again soon will tell."""


def check_kept(once: Once, kept: Kept) -> None:
    """Raises StoredBeforeError or OtherContentError."""
    if kept.digest != once.digest:
        raise OtherContentError(f"another message, {kept.message_id}, was stored by the same key")
    raise StoredBeforeError(kept.message_id)


class BodyFacts(TypedDict, total=False):
    """What the receiver of a body has learned about it: members of `Message` of the same names."""

    headers: tuple[tuple[str, str], ...]
    eight_bit: bool
    plain_lines: bool
    long_lines: bool
    body_hash: str
    trace: tuple[str, ...]


Beside = Callable[[Message], Sequence[Submit]]
"""`beside(message)`: messages of our own that belong to a message which is being committed."""


class MessageWriter(Protocol):
    """Takes one message's body. Leaving the `async with` block without commit aborts.

    Abort removes what was written, in the background and at the latest at the next start.
    """

    async def write(self, chunk: bytes) -> None:
        """Append body bytes (CRLF line ends, no dot-stuffing), any length; waits when the store is behind."""

    async def commit(
        self,
        deliveries: Sequence[Delivery],
        *,
        beside: Beside | None = None,
        once: Once | None = None,
        **facts: Unpack[BodyFacts],
    ) -> Message:
        """Make the message and its deliveries exist, durably. 250 may be sent when this returns.

        So do the messages of our own that `beside` makes, in the same write.

        `once` becomes durable in the same write. Raises StoredBeforeError, OtherContentError or
        BeingStoredError when a message has it already, or may have it.
        """

    async def abort(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *failure: object) -> None: ...


class QueueStore(Protocol):
    """The verbs that the running relay needs."""

    def begin(self, envelope: Envelope) -> MessageWriter:
        """Start a message; raises nothing. `envelope.recipients` must be complete."""

    async def claim(
        self,
        queue: QueueName,
        limit: int,
        *,
        now: float,
        skip_domains: Collection[str] = (),
    ) -> list[Delivery]:
        """Up to `limit` unclaimed deliveries of the queue that are due at `now`, oldest message first.

        Deliveries to a domain in `skip_domains` are passed over and remembered: `claim_domain`
        finds them again without another scan of the queue. Deferred deliveries that have come due
        (earliest first) and fresh ones (oldest message first) take turns, so that neither starves
        the other; the result is in message order. Fewer than `limit` means that no more is due.
        """

    async def claim_new(
        self, queue: QueueName, limit: int, *, since: MessageId, skip_domains: Collection[str] = ()
    ) -> list[Delivery]:
        """Up to `limit` unclaimed fresh deliveries of messages from `since` on, oldest message first.

        What is older, however much, is not looked at. Passes over as `claim` does; what was passed over
        before is left where it is. Fewer than `limit` means that there are no more.
        """

    async def claim_domain(self, queue: QueueName, domain: str, limit: int, *, now: float) -> list[Delivery]:
        """Like `claim`, from the deliveries of one domain that `claim` passed over.

        They were due then. When the clock was set back meanwhile they are handed out all the same, or
        `next_due` knows of them from here on.
        """

    def release(self, keys: Collection[DeliveryKey]) -> None:
        """Give claims back unattempted; the deliveries are due again as they were."""

    async def settle(self, changes: Sequence[Change], *, lazy: bool = False) -> None:
        """Apply changes in one atomic durable write and drop the claims on their deliveries.

        `lazy` may wait up to 50 ms for company. A `Finish` or `Postpone` of a delivery that no
        longer exists is ignored (an operator dropped it meanwhile).
        """

    async def read_message(self, message_id: MessageId) -> Message:
        """Envelope and metadata. Raises MessageNotFoundError or StoreCorruptError."""

    def read_body(self, message_id: MessageId) -> AsyncIterator[bytes]:
        """Yield the body in order, in pieces of at most `CHUNK_SIZE`.

        Raises MessageNotFoundError, or StoreCorruptError when a chunk is missing.
        """

    def check_claim(self, message_id: MessageId) -> None:
        """Raise ClaimLostError when another relay may be sending what this relay has claimed of the message.

        Answered at once from what is known of the lease. A courier asks immediately before each write of a
        body: the wait for a peer's reply, or a standstill, may have outlasted the lease.
        """

    async def next_due(self, queue: QueueName) -> float | None:
        """Unix time of the earliest unclaimed deferred delivery of the queue, `None` if there is none.

        Deliveries that `claim` passed over do not count: they wait for `claim_domain`.
        """

    def has_ready(self, queue: QueueName) -> bool:
        """Return whether `claim` could return a delivery that is not deferred. Cheap, may be wrongly true.

        Deliveries that `claim` passed over do not count: they wait for `claim_domain`.
        """

    def unhealthy(self) -> Unhealthy | None:
        """Return the reason why no new mail should be taken now, or `None`. Cheap: asked before each mail."""

    def problems(self) -> Sequence[str]:
        """Return everything that an operator should know of, in full; the reason of `unhealthy` is
        among it.
        """

    async def usable(self) -> bool:
        """Wait while the store has failed and is being repaired; true when it had.

        It may fail again at the next write: on a full disk the best time for one is right after a repair.
        """

    async def probe(self) -> None:
        """Write and sync a mark now. Raises StoreError when outcomes cannot be stored either.

        Too little room for new mail is no reason: what waits for this to succeed is what makes room.
        """

    def counts(self) -> dict[QueueName, QueueCounts]:
        """Per queue of mail, from memory; claimed ones are counted where their durable state puts them."""

    def is_counted(self) -> bool:
        """False while what the spool held at the start is still being counted: `counts` are too low then."""

    async def oldest(self, queue: QueueName, *, now: float) -> float | None:
        """`created` (Unix seconds) of the queue's first delivery, `None` when there is none.

        Deliveries whose `created` is after `now` are passed over: their senders hold them back. When there
        are thousands of them in front, a store may give up and answer `None`.
        """

    async def queues(self) -> set[QueueName]:
        """Queues that hold deliveries, those of webhooks too: none is orphaned when the configuration drops
        it.
        """

    async def left_over(self) -> str:
        """Return what is stored, in words, when no zone has a delivery; empty when that is nothing at all,
        and the spool may be removed.

        It is proved from what is stored, not from what could be read of it: records that cannot be read
        count, and so do files that are not the spool's. A shared store is no relay's to remove: `SHARED`.
        """

    @property
    def node(self) -> int:
        """This relay's number among those that share the store, for its message ids; 0 when none does."""

    def last_message_id(self) -> MessageId | None:
        """Return the highest id this spool has ever committed, so that ids stay monotonic over restarts."""

    async def close(self) -> None:
        """Finish what was submitted, then release every resource."""


@dataclass(slots=True)
class QueueCounts:
    """Deliveries by durable state.

    A delivery counts as deferred from its first postponement (`next_attempt` > 0) until it leaves,
    also while it is due or being attempted: the durable state does not change with the clock.
    """

    ready: int = 0
    deferred: int = 0
    held: int = 0

    @property
    def total(self) -> int:
        return self.ready + self.deferred + self.held

    def add(self, other: QueueCounts) -> None:
        self.ready += other.ready
        self.deferred += other.deferred
        self.held += other.held

    def count(self, next_attempt: float, *, held: bool, step: int = 1) -> None:
        """Adds `step` deliveries in this state."""
        if held:
            self.held += step
        elif next_attempt > 0:
            self.deferred += step
        else:
            self.ready += step


Wanted = Callable[[str], bool]
"""Whether deliveries to a recipient are looked for. Called in other threads."""


def everybody(_recipient: str) -> bool:
    return True


class EveryNth:
    """Wants one of `every` deliveries on average, whatever their recipients: for estimates. An engine may
    step over the others without reading them.

    The gaps vary: with even ones each second recipient of messages that all have two would never be met.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._random = Random()
        self._left = self.gap()

    def gap(self) -> int:
        """Return how far it is to the next one."""
        return self._random.randrange(1, 2 * self.every)

    def __call__(self, _recipient: str) -> bool:
        self._left -= 1
        if self._left:
            return False
        self._left = self.gap()
        return True


class QueueOperations(Protocol):
    """The verbs that operators need on top. Callers withdraw the deliveries from the scheduler first."""

    def scan(
        self, queue: QueueName | None = None, *, wanted: Wanted = everybody, after: DeliveryKey | None = None
    ) -> AsyncIterator[Delivery]:
        """Yield every delivery of mail, queue by queue in MSGID order, claimed ones included, or those of
        `queue`. Those whose recipients are not `wanted` may be left out: where recipients are in the keys
        that saves reading most of a queue. `after` is the key of a delivery, of `queue` if that is given:
        those up to it are left out, and it may be gone.

        Private stores show one moment; shared ones a page at a time, each as it is then, and nothing that
        comes in behind the last delivery that was there at the start.
        """

    async def deliveries_of(self, message_id: MessageId) -> list[Delivery]:
        """Return the deliveries of one message that are still open, in recipient order."""

    async def own_deliveries_of(self, message_id: MessageId) -> list[Delivery]:
        """Return those of `deliveries_of` that this node can settle: not those of other nodes."""

    async def read_messages(self, ids: Sequence[MessageId]) -> dict[MessageId, Message]:
        """Return those messages that exist and can be read, for a list."""

    async def update(
        self, keys: Collection[DeliveryKey], change: Callable[[Delivery], Delivery | None]
    ) -> dict[DeliveryKey, Delivery]:
        """Rewrite deliveries in durable writes; `change` returns the new state, or `None` to remove it. A
        state with another `queue` moves the delivery there, in one atomic write: it is never in both or in
        neither.

        What another relay has claimed on a shared store is left alone. `change` has no effect of its own: it
        is asked again, or in vain, about a delivery that changed meanwhile.

        Returns those that still existed and were not left alone, as they were before. Hold, release,
        reschedule and remove are made of this.
        """


KeptKeys = Sequence[tuple[str, Kept]]
"""Idempotency keys by their identities."""


class QueueView(Protocol):
    """The verbs with which a backup or an export reads a queue: those of `Store`."""

    def scan(
        self, queue: QueueName | None = None, *, wanted: Wanted = everybody, after: DeliveryKey | None = None
    ) -> AsyncIterator[Delivery]: ...

    async def queues(self) -> set[QueueName]: ...

    async def deliveries_of(self, message_id: MessageId) -> list[Delivery]: ...

    async def read_message(self, message_id: MessageId) -> Message: ...

    async def read_messages(self, ids: Sequence[MessageId]) -> dict[MessageId, Message]: ...

    def read_body(self, message_id: MessageId) -> AsyncIterator[bytes]: ...

    async def kept_keys(self, cursor: str = "") -> tuple[KeptKeys, str]:
        """Return a page of the idempotency keys, and the cursor of the next; "" at the beginning and at the
        end.
        """


class Store(QueueStore, QueueOperations, Protocol):
    """The whole of what an engine implements."""

    async def kept_keys(self, cursor: str = "") -> tuple[KeptKeys, str]: ...

    async def keep_keys(self, keys: KeptKeys) -> None:
        """Remember keys of another store, whose messages may have left."""
