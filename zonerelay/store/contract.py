"""The interface and the guarantees of every store, and the errors that a store may raise.

Promises (DESIGN rules 1 and 2):
- When `MessageWriter.commit` returns, the message survives a power cut. Before, it does not exist.
- When `settle` returns, every change in it survives, all or none. An outcome, the removal of
  its delivery and the bounce that reports it are one `settle`.
- The last delivery to leave removes the message and its body in the same atomic write.
- A claimed delivery is returned to no other caller until it is settled or released. Private
  stores forget claims in a crash; shared ones let them expire.
- On a shared store claims depend on a lease. If it ends before it is renewed, others may claim the
  deliveries. Then `settle` and `release` of this relay no longer change them, this relay claims nothing
  more, and `check_claim` and reading their messages raise ClaimLostError, so that this relay sends nothing
  that another one sends.

Failure: every method raises only `StoreError` or a subclass. After an error nothing of that call is visible,
except that a `settle` whose result was lost may or may not have happened. The delivery is then attempted
again (at least once).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import NamedTuple, Protocol, Self, TypedDict, Unpack

import msgspec

from zonerelay.model.delivery import Delivery, DeliveryKey, QueueName
from zonerelay.model.envelope import Envelope, Message, MessageId
from zonerelay.model.reply import Outcome

CHUNK_SIZE = 64 * 1024
SHARED = "the queue is shared: other relays may have mail in it"
"""The result of `left_over` on a shared store."""


class Unhealthy(StrEnum):
    """The reasons why a store accepts no new mail. Clients and `/readyz` show the texts."""

    NO_SPACE = "insufficient disk space"
    DAMAGED = "the spool is damaged"
    WRITE_FAILED = "the spool cannot be written"
    CLOSED = "the spool is closed"
    SERVER_DOWN = "the spool's server is unreachable"
    SERVER_DENIES = "the user of the spool's server lacks privileges"
    SERVER_UNSAFE = "the spool's server may lose acknowledged writes"
    NO_LEASE = "the lease on the queue has expired"


class StoreError(Exception):
    """The store failed, and a later attempt may succeed. Clients see 451 4.3.0."""


class StoreLostError(StoreError):
    """The connection to the store's server was lost, or the server does not respond. A read may be
    repeated.
    """


class StoreFullError(StoreError):
    """There is no space left, or less than `min_free_space`. Clients see 452 4.3.1."""


class StoreCorruptError(StoreError):
    """A record could not be read. It stays in the store for the operator, who repairs the spool."""


class StoreOpenError(StoreError):
    """The store cannot be opened. The text advises the operator."""


class MessageNotFoundError(StoreError):
    """The message does not exist: it was settled, dropped, or never committed."""


class ClaimLostError(StoreError):
    """This relay's lease on the queue has ended, so another relay may be sending the message."""


class MessageSettledError(MessageNotFoundError):
    """The store has found that the message can never be sent, and has reported it. Nothing is left to
    settle.
    """


@dataclass(frozen=True, slots=True)
class Finish:
    """A change that stores the final outcome of a delivery and removes the delivery. `failure` is set if it
    was not delivered.
    """

    delivery: Delivery
    failure: Outcome | None = field(default=None, compare=False)


class Postpone(msgspec.Struct, frozen=True):
    """A change that keeps a delivery in the store with a new state. `delivery` is its new durable state
    (deferred, held, warned, or due now).
    """

    delivery: Delivery


class OwnMessage(msgspec.Struct, frozen=True):
    """A message of the relay itself (a DSN) that must be stored in the same write as the outcome it reports.

    `about` are the reported deliveries. A shared store omits the message if the claims on all of them were
    lost, because the relay that claims them next sends its own report.
    """

    message: Message
    body: bytes
    deliveries: tuple[Delivery, ...]
    about: tuple[DeliveryKey, ...] = ()


Change = Finish | Postpone | OwnMessage


Stored = Callable[[Sequence[Delivery], bool], int]
"""`on_stored(deliveries, is_next)` is called with new deliveries of one queue when they are durable, and
returns how many of them it takes, from the first on. Those are claimed then, so no claim returns them. It may
take some only if `is_next`: otherwise older mail of the queue must be claimed first. The others are found by
a claim, now or at their `next_attempt`. It must not raise.
"""


News = Callable[[QueueName], None]
"""`on_news(queue)` is called if the queue may have deliveries to claim that this relay does not know of:
another relay has left them on a shared store, or a repair has found them. It must not raise.
"""

Lost = Callable[[Collection[DeliveryKey]], None]
"""`on_lost(keys)` is called if a shared store has lost the claims on these deliveries. Those not yet begun
must be dropped and their claims released. Active attempts end without an effect on the store. `node` may
return another number afterwards. It must not raise.
"""


class IdempotencyKey(msgspec.Struct, frozen=True):
    """The idempotency key of a submission; a repeated submission with the same key stores no second message.
    `identity` is a hexadecimal digest of the submitter, the key and the envelope, and `digest` one of the
    content. The store remembers them, and the caller's `answer` to the submission, until the Unix time
    `until`. With `asks_only` nothing is stored: NotStoredBeforeError is raised instead.
    """

    identity: str
    digest: str
    until: float
    answer: str = ""
    asks_only: bool = False

    def kept(self, message_id: MessageId) -> StoredKey:
        """Return the entry that is stored with the message `message_id` for this key."""
        return StoredKey(message_id, self.digest, self.until, self.answer)


class StoredKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """The stored entry of an idempotency key, which names the message of that key. It is stored as JSON, and
    without an answer as in 0.1.0.
    """

    message_id: MessageId
    digest: str
    until: float
    answer: str = ""


KeptKeys = Sequence[tuple[str, StoredKey]]
"""Idempotency keys by their identities."""


KeyPages = Callable[[str], Awaitable[KeptKeys]]
"""Returns the idempotency keys after an identity, and nothing at the end. Raises StoreError."""
SettleKey = Callable[[str, MessageId], Awaitable[None]]
"""Settles a pending reservation."""
KeepKeys = Callable[[KeptKeys], Awaitable[None]]
"""Stores idempotency keys in the spool. Raises StoreError."""


class KeyReservation(NamedTuple):
    """The entry of an idempotency key in the register of all workers or nodes. `is_pending` is true while its
    message may still be stored.
    """

    kept: StoredKey
    worker: int
    is_pending: bool


class KeyRegister(Protocol):
    """A register of the idempotency keys of all workers or nodes (a Protocol that `Reservations` uses).
    `worker` is the number of the calling worker.
    """

    @property
    def worker(self) -> int: ...

    problem: str
    """A description of the register's problem for the operator, or ""."""

    def start(self, page: KeyPages, settle: SettleKey, keep: KeepKeys) -> None:
        """Publish the idempotency keys of this worker's spool in the register, if the register requires that.
        Keys of removed spools are added to this spool first.
        """

    async def reserve(self, once: IdempotencyKey, message_id: MessageId, now: float) -> KeyReservation | None:
        """Return the register's entry for the key. If there is none, create a pending one for this
        message.
        """

    async def settle(self, identity: str, message_id: MessageId, is_kept: bool) -> None:
        """Make a pending entry final after its message was stored (`is_kept`), or remove it if it never will
        be.
        """

    async def forget(self, now: float, most: int) -> None:
        """Remove expired keys from the register. Pending entries are left to their worker."""

    async def close(self) -> None: ...


class StoredBeforeError(StoreError):
    """A message with the same `IdempotencyKey` and content was committed before. Nothing was stored now.
    `answer` is that of the first submission.
    """

    def __init__(self, message_id: MessageId, answer: str = "") -> None:
        super().__init__(message_id)
        self.message_id, self.answer = message_id, answer


class NotStoredBeforeError(StoreError):
    """The submission only asked for the message of an `IdempotencyKey`, and no such message was committed."""


class OtherContentError(StoreError):
    """A message with the same idempotency key but different content was committed before. Nothing was stored
    now.
    """


class InProgressError(StoreError):
    """It is not yet known whether a message with the same `IdempotencyKey` was committed. Try again soon."""


def check_kept(once: IdempotencyKey, kept: StoredKey) -> None:
    """Raise StoredBeforeError if the stored key belongs to the same content, or OtherContentError if it does
    not.
    """
    if kept.digest != once.digest:
        raise OtherContentError(f"another message, {kept.message_id}, was stored with the same key")
    raise StoredBeforeError(kept.message_id, kept.answer)


class BodyFacts(TypedDict, total=False):
    """The properties of a message body that were determined while it was received. They have the names of
    members of `Message`.
    """

    headers: tuple[tuple[str, str], ...]
    eight_bit: bool
    plain_lines: bool
    long_lines: bool
    body_hash: str
    trace: tuple[str, ...]


Companions = Callable[[Message], Sequence[OwnMessage]]
"""`companions(message)` returns the relay's own messages that belong to a message being committed."""


class MessageWriter(Protocol):
    """Writes the body of one message and then commits the message (a Protocol). Leaving the `async with`
    block without a commit aborts.

    Abort removes the chunks in the background, at the latest at the next start.
    """

    async def write(self, chunk: bytes) -> None:
        """Append any number of bytes to the body (CRLF line ends, no dot-stuffing). Waits if the store is
        behind.
        """

    async def commit(
        self,
        deliveries: Sequence[Delivery],
        *,
        companions: Companions | None = None,
        once: IdempotencyKey | None = None,
        **facts: Unpack[BodyFacts],
    ) -> Message:
        """Store the message and its deliveries durably. The relay may reply 250 when this returns.

        The messages that `companions` returns are stored in the same write. `once` becomes durable in
        the same write. Raises StoredBeforeError, OtherContentError or InProgressError if another message has
        the key, or may have it, and NotStoredBeforeError if `once` only asks.
        """

    async def abort(self) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *failure: object) -> None: ...


class ClaimFilter(TypedDict, total=False):
    """The optional arguments of `claim` that restrict it to some deliveries of a queue."""

    skip_domains: Collection[str]
    """Deliveries to these domains are skipped and remembered, so that a claim of the domain finds them
    without another scan of the queue.
    """
    since: MessageId | None
    """Only fresh deliveries of messages from this one on are claimed. Older messages are not read, however
    many there are.
    """
    domain: str | None
    """Only deliveries of this domain that earlier claims have skipped are claimed. They were due then. If the
    clock was set back since, they are returned anyway, or `next_due` includes them from now on.
    """


class QueueReader(Protocol):
    """Reads stored messages and lists their queues (a Protocol)."""

    async def read_message(self, message_id: MessageId) -> Message:
        """Return a message's envelope and metadata. Raises MessageNotFoundError or StoreCorruptError."""

    def read_body(self, message_id: MessageId) -> AsyncGenerator[bytes, None]:
        """Yield the body in order, in chunks of at most `CHUNK_SIZE`.

        Raises MessageNotFoundError, or StoreCorruptError if a chunk is missing.
        """

    async def queues(self) -> set[QueueName]:
        """Return the queues that hold deliveries, including those of webhooks. So no queue is orphaned when
        it is removed from the configuration.
        """


class QueueStore(QueueReader, Protocol):
    """The operations of a store that the running relay uses (a Protocol)."""

    def begin(self, envelope: Envelope) -> MessageWriter:
        """Start to store a message, and return the writer of its body. Raises nothing. `envelope.recipients`
        must be complete.
        """

    async def claim(
        self, queue: QueueName, limit: int, *, now: float, **only: Unpack[ClaimFilter]
    ) -> list[Delivery]:
        """Claim up to `limit` deliveries of the queue that are due at `now`, oldest message first.

        Due deferred deliveries (earliest first) and fresh ones (oldest message first) alternate, so that
        neither starves the other. The result is in message order. Fewer than `limit` deliveries mean that
        there are no more.
        """

    def release(self, keys: Collection[DeliveryKey]) -> None:
        """Release the claims on deliveries that were not attempted. The deliveries are due as before."""

    async def settle(self, changes: Sequence[Change], *, lazy: bool = False) -> None:
        """Apply changes in one atomic durable write and release the claims on their deliveries.

        With `lazy` the write may be delayed by up to 50 ms to join others. A `Finish` or `Postpone` of a
        delivery that no longer exists, because an operator has dropped it, is ignored.
        """

    def check_claim(self, message_id: MessageId) -> None:
        """Raise ClaimLostError if another relay may be sending the message that this relay had claimed.

        The check is immediate and uses the known state of the lease. A courier calls it immediately before
        each write of a body, because the lease may have ended during the wait for a reply, or while the
        process was stopped.
        """

    async def next_due(self, queue: QueueName) -> float | None:
        """Return the Unix time of the earliest unclaimed deferred delivery of the queue, or `None`.

        Deliveries that `claim` has skipped are excluded, because they wait for a claim of their domain.
        """

    def unhealthy(self) -> Unhealthy | None:
        """Return the reason why no new mail should be accepted at present, or `None`. Cheap, because it is
        called for each message.
        """

    def problems(self) -> Sequence[str]:
        """Return all problems for the operator in full, including the reason of `unhealthy`."""

    async def usable(self) -> bool:
        """Wait while the failed store is being repaired. Return whether it had failed.

        It may fail again at the next write. On a full disk a write succeeds most likely right after a repair.
        """

    async def probe(self) -> None:
        """Write and sync a small test record. Raises StoreError if outcomes cannot be stored either.

        Too little space for new mail is not an error here: the caller waits for a success before it stores
        outcomes, which free space.
        """

    def counts(self) -> dict[QueueName, QueueCounts]:
        """Return the number of deliveries of each mail queue, as counted in memory. Claimed ones are counted
        by their durable state.
        """

    def waiting(self, queue: QueueName) -> int:
        """Return the number of deliveries of one queue of any kind, counted as in `counts`."""

    def is_counted(self) -> bool:
        """Return whether the deliveries in the spool have been counted completely since the spool was opened.
        Until then `counts` are too low.
        """

    async def oldest(self, queue: QueueName, *, now: float) -> float | None:
        """Return the creation time (Unix seconds) of the queue's oldest delivery, or `None` if there is none.

        Deliveries whose `created` is after `now` are skipped, because their senders hold them back. If
        thousands of them come first, a store may give up and return `None`.
        """

    async def left_over(self) -> str:
        """Describe the data that remains in the spool when no zone has a delivery. Return "" if nothing is
        stored and the spool may be removed.

        The result is based on all stored data: unreadable records count, and so do files that do not belong
        to the spool. No relay may remove a shared store; for it the result is `SHARED`.
        """

    @property
    def node(self) -> int:
        """The number of this relay among those that share the store, for message ids, or 0 for a private
        store.
        """

    def last_message_id(self) -> MessageId | None:
        """Return the highest message id ever committed to this spool, so that ids stay monotonic over
        restarts.
        """

    async def close(self) -> None:
        """Write all submitted changes, then release all resources."""


class QueueCounts(msgspec.Struct):
    """The number of deliveries by durable state.

    A delivery counts as deferred from its first postponement, or its return by an operator's command
    (`next_attempt` > 0), until it leaves, also while it is due or being attempted, because the durable state
    does not change with the clock.
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
        """Add `step` to the number of deliveries in this state."""
        if held:
            self.held += step
        elif next_attempt > 0:
            self.deferred += step
        else:
            self.ready += step


Wanted = Callable[[str], bool]
"""Returns whether the caller wants deliveries to a recipient. Called in other threads."""


def everybody(_recipient: str) -> bool:
    return True


class EveryNth:
    """Selects one of `every` deliveries on average, at random, for estimates.

    The gaps vary. With constant gaps the second recipient might never be selected if every message has two.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._random = Random()
        self._left = self._random.randrange(1, 2 * every)

    def __call__(self, _recipient: str) -> bool:
        self._left -= 1
        if self._left:
            return False
        self._left = self._random.randrange(1, 2 * self._every)
        return True


ChangeOne = Callable[[Delivery], Delivery | None]
"""An operator's change: the delivery's new state, or `None` to remove it."""


class QueueView(QueueReader, Protocol):
    """The operations of `Store` with which a backup or an export reads a queue."""

    def scan(
        self, queue: QueueName | None = None, *, wanted: Wanted = everybody, after: DeliveryKey | None = None
    ) -> AsyncGenerator[Delivery, None]:
        """Yield every mail delivery, queue by queue in the order of message ids, including claimed ones. With
        `queue`, yield only its deliveries. Those whose recipients are not `wanted` may be omitted; where the
        key contains the recipient, this avoids reading most of a queue. The scan starts after the delivery
        key `after`, which belongs to `queue` if both are given and need not exist.

        Private stores show one snapshot. Shared ones are read page by page, each page in its current state,
        and omit deliveries that are added after the last one at the start.
        """

    async def deliveries_of(self, message_id: MessageId, *, own: bool = False) -> list[Delivery]:
        """Return the open deliveries of one message in recipient order. With `own`, return only those that
        belong to this node, which it can settle.
        """

    async def read_messages(self, ids: Sequence[MessageId]) -> dict[MessageId, Message]:
        """Return the messages with these ids, without those that do not exist or cannot be read."""

    async def kept_keys(self, cursor: str = "") -> tuple[KeptKeys, str]:
        """Return a page of the idempotency keys and the cursor of the next page. The cursor is "" at the
        beginning and at the end.
        """


class Store(QueueStore, QueueView, Protocol):
    """The complete interface that an engine implements."""

    async def update(self, keys: Collection[DeliveryKey], change: ChangeOne) -> dict[DeliveryKey, Delivery]:
        """Change, move or remove deliveries for an operator's command, in durable writes. The caller
        withdraws them from the scheduler first. `change` returns the new state, or `None` to remove the
        delivery. A state with another `queue` moves the delivery in one atomic write, so it is always in
        exactly one queue.

        On a shared store, deliveries that another relay has claimed are left alone. `change` must have no
        side effects: it may be called again, or without effect, if a delivery changes concurrently.

        Returns the changed deliveries in their former state. Hold, release, reschedule and remove are
        implemented with this method.
        """

    async def keep_keys(self, keys: KeptKeys) -> None:
        """Add idempotency keys from another store, whose messages may already have been removed."""
