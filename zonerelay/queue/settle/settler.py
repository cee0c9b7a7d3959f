"""Converts outcomes to changes of the store, and creates the bounces for senders.

It owns a delivery from the moment its outcome is known until the outcome is durable. Promises:

- One atomic write holds the outcomes of an attempt and the report about them (DESIGN rule 2).
- `post` never waits and cannot be cancelled half-way. The outcome is recorded even if the caller's task ends.
- A report that cannot be made keeps its deliveries in the queue. An error here never removes mail.
- A `delivered` event is emitted at once, because delivery is a fact whether or not the relay records it.
  Every other event describes a decision of the relay and follows the write that holds it.

`OutcomeLog` collects outcomes and writes them to the store in batches. A write is retried until it succeeds.
Changes of one iteration of the event loop are written with one `settle`. Lazy changes (outcomes of delivered
mail) may wait in the store for others. Promises:

- The changes of an `AtomicWrite` are written together (an outcome and the bounce that reports it).
- Its `then` is called once, after its changes are durable.
- While the store fails, writes are kept in order and retried with back-off. A write that fails although the
  store works is retried alone and does not delay the others.
- A due time is corrected before a retry if the clock was set back meanwhile.
- At most `MAX_UNSETTLED` deliveries should be on their way. While there are more, a caller waits in `room`
  before it starts another attempt. Callers also wait while the store fails, or has not responded for `SILENT`
  seconds, because mail whose outcome cannot be recorded would be sent again by the other workers that share
  the store.

A *disposition* is the new durable state of a delivery after an outcome, and the report that it owes
(`DispositionPolicy`, without I/O). Policy, in this order:

- delivered: the delivery leaves. A report is owed if the sender requested one (NOTIFY=SUCCESS) and the peer
  cannot send it because it does not support DSN.
- in doubt (the connection was lost after the final dot): the setting of the zone applies. `retry` treats it
  as a deferral, `hold` keeps it until an operator releases it, and `bounce` treats it as a refusal.
- bounced: the delivery leaves with a failure report.
- deferred: the retry policy determines the next attempt. If there is none (too old, too many attempts), the
  delivery expires, which is a failure. An error of the relay itself (`Scope.LOCAL`) does not count as an
  attempt; the delivery is tried again after a quarter of its age, but at least `LOCAL_FIRST` (if the store
  recovers quickly, new mail should not wait a minute) and at most `LOCAL_DELAY`. An outcome that does not
  count because no peer was contacted is handled in the same way, between `LOCAL_DELAY` and
  `UNCOUNTED_LONGEST`. Mail of a suspended destination is tried again when the suspension ends.
- a delivery that is deferred for the first time after `bounce.delay_warning` owes one delay report.

A failure report is owed if the sender is not null (RFC 5321 4.5.5), `[bounce]` is enabled, and NOTIFY is
FAILURE or missing (RFC 3461 4.1). The same holds for a delay report with DELAY. A success report is owed only
if NOTIFY is SUCCESS (RFC 3461 5.2.2 b). No report is made for a row of the outbox, which records its own
result, nor for mail accepted from an unauthenticated client, whose sender address may be forged. The age of a
delivery is counted from its `created`, which for mail that its sender delays (RFC 4865) is the release time.

If a message cannot be read, its sender is unknown and cannot be notified. So its deliveries never leave; they
are deferred by `UNREADABLE_DELAY`, however old they are.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter

import msgspec
from msgspec import structs

from zonerelay.config.settings import BounceSettings, InDoubtAction, ZoneSettings
from zonerelay.message.dsn import DsnKind, RecipientReport
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery, DeliveryKey, QueueName
from zonerelay.model.envelope import NULL_SENDER, OUTBOX, Envelope, Mailbox, Message, MessageId, Notify
from zonerelay.model.reply import Outcome, Reply, Scope, Verdict
from zonerelay.process.tasks import NextIteration, Slices, Tasks
from zonerelay.queue.settle.bounces import DsnMaker, ReportError
from zonerelay.queue.settle.retry import RetryPolicy
from zonerelay.routing.zones.zones import DEFAULT_ZONE
from zonerelay.store.contract import Change, Finish, OwnMessage, Postpone, QueueStore, StoreError
from zonerelay.telemetry.events.events import Events, Result

LOCAL_FIRST = 5.0
LOCAL_DELAY = 60.0
UNCOUNTED_LONGEST = 30 * 60.0
UNREADABLE_DELAY = 15 * 60.0

_TOO_CLOSE = 1.0

STRANGER = "stranger"
"""The reason why no report is made about mail of a client that is not allowed to relay."""


def _local_deferral(text: str) -> Outcome:
    return Outcome(Verdict.DEFERRED, Reply(451, "3.0", text), Scope.LOCAL, local=True, counts=False)


LOCAL_ERROR = _local_deferral("temporary internal error")
UNREADABLE = _local_deferral("the message cannot be read from the spool now")


class Disposition(msgspec.Struct, frozen=True):
    """The decision about one delivery after an outcome. `delivery` is its state before, and `outcome` the
    recorded outcome (an expiry instead of a deferral, for example).

    `report` is the report that is owed to the sender. `silence` is the reason why a failure, or a success
    that the sender asked to be reported, is not reported.
    """

    delivery: Delivery
    outcome: Outcome
    change: Finish | Postpone
    next_attempt: float | None = None
    report: DsnKind | None = None
    silence: str = ""


class DispositionPolicy:
    """Decides what happens to a delivery after an outcome, by the settings of retries, bounces and outcomes
    in doubt.
    """

    def __init__(self, retry: RetryPolicy, bounce: BounceSettings, zones: Sequence[ZoneSettings]) -> None:
        self._in_doubt = {zone.name: zone.in_doubt for zone in zones}
        self.retry = retry
        self._bounce = bounce

    async def decide(
        self,
        message: Message | None,
        delivery: Delivery,
        outcome: Outcome,
        *,
        now: float,
        until: float | None = None,
        paused: float = 0.0,
    ) -> Disposition:
        """Decide what happens to a delivery after `outcome`. `until` is the time of the next check of a
        delivery that was deferred without an attempt. `paused` is the number of seconds that do not count
        towards its age.
        """
        if message is None:
            return put_off(delivery, outcome, now)
        if outcome.verdict is Verdict.DELIVERED:
            return self._delivered(message.envelope, delivery, outcome)
        if outcome.in_doubt and outcome.verdict is Verdict.DEFERRED:
            in_doubt = self._in_doubt.get(delivery.zone) or self._in_doubt.get(DEFAULT_ZONE)
            if in_doubt is InDoubtAction.HOLD:
                return _held(delivery, outcome, now)
            if in_doubt is InDoubtAction.BOUNCE:
                outcome = structs.replace(outcome, verdict=Verdict.BOUNCED)
        if outcome.verdict is not Verdict.DEFERRED:
            return self._failed(message.envelope, delivery, outcome)
        aged = structs.replace(delivery, created=delivery.created + paused) if paused else delivery
        next_attempt = await self._next_attempt(message.envelope, aged, outcome, until, now)
        if next_attempt is None:
            return self._failed(message.envelope, delivery, _expired(delivery, outcome))
        counts = outcome.counts and outcome.scope is not Scope.LOCAL
        later = delivery.deferred(next_attempt, outcome.attempt(now), counts=counts)
        warns = self._owes_warning(message.envelope, aged, now)
        change = Postpone(structs.replace(later, warned=True) if warns else later)
        return Disposition(delivery, outcome, change, next_attempt, DsnKind.DELAYED if warns else None)

    def is_old(self, delivery: Delivery, now: float) -> bool:
        """Return whether the delivery may have to expire, or a delay warning be sent, without another
        attempt. This depends on the sender. Such a delivery must be checked from time to time wherever it
        waits.
        """
        # Which maximum age applies is known only when the sender is known.
        expires = delivery.created + self.retry.of(delivery.zone).shortest_lifetime
        return expires - now <= _TOO_CLOSE or (not delivery.warned and self._is_late(delivery, now))

    def expiry(self, envelope: Envelope, delivery: Delivery) -> float:
        """Return the Unix time at which a delivery expires."""
        return delivery.created + self.retry.of(delivery.zone).lifetime(envelope)

    async def _next_attempt(
        self, envelope: Envelope, delivery: Delivery, outcome: Outcome, until: float | None, now: float
    ) -> float | None:
        if until is None and outcome.counts and outcome.scope is not Scope.LOCAL:
            counted = structs.replace(delivery, attempts=delivery.attempts + 1)
            return await self.retry.next_attempt(envelope, counted, now)
        expires = self.expiry(envelope, delivery)
        if expires - now < _TOO_CLOSE:
            return None
        if until is None:
            until = now + _uncounted_delay(outcome, now - delivery.created)
        return min(until, expires)

    def _owes_warning(self, envelope: Envelope, delivery: Delivery, now: float) -> bool:
        return (
            not delivery.warned
            and self._is_late(delivery, now)
            and not self._silence(envelope, delivery, Notify.DELAY)
        )

    def _is_late(self, delivery: Delivery, now: float) -> bool:
        bounce = self._bounce
        return bounce.enabled and 0 < bounce.delay_warning < now - delivery.created

    def _delivered(self, envelope: Envelope, delivery: Delivery, outcome: Outcome) -> Disposition:
        if not asks_for_success(delivery, outcome):
            return Disposition(delivery, outcome, Finish(delivery))
        silence = self._silence(envelope, delivery, Notify.SUCCESS)
        report = None if silence else DsnKind.RELAYED
        return Disposition(delivery, outcome, Finish(delivery), report=report, silence=silence)

    def _failed(self, envelope: Envelope, delivery: Delivery, outcome: Outcome) -> Disposition:
        silence = self._silence(envelope, delivery, Notify.FAILURE)
        report = None if silence else DsnKind.FAILED
        return Disposition(delivery, outcome, Finish(delivery, outcome), report=report, silence=silence)

    def _silence(self, envelope: Envelope, delivery: Delivery, about: Notify) -> str:
        if envelope.origin.stranger:
            return STRANGER
        if envelope.sender == NULL_SENDER:
            return "null sender"
        if envelope.origin.protocol == OUTBOX:
            return "outbox"  # its row is the report
        if delivery.notify and not delivery.notify & about:
            return "notify"
        return "" if self._bounce.enabled else "switched off"


def asks_for_success(delivery: Delivery, outcome: Outcome) -> bool:
    """Return whether the sender requested a success report that the peer will not send."""
    return not outcome.dsn_passed and bool(delivery.notify & Notify.SUCCESS)


def deferred(delivery: Delivery, outcome: Outcome, until: float, now: float) -> Disposition:
    """Return the decision to defer a delivery until a given time without an attempt. The caller has checked
    that neither expiry nor a warning is due.
    """
    change = Postpone(delivery.deferred(until, outcome.attempt(now), counts=False))
    return Disposition(delivery, outcome, change, until)


def put_off(delivery: Delivery, outcome: Outcome, now: float) -> Disposition:
    """Return the decision to defer a delivery for a fixed time, because the relay or its spool must be
    repaired.
    """
    if outcome.verdict is Verdict.DELIVERED:
        return Disposition(delivery, outcome, Finish(delivery))
    outcome = structs.replace(outcome, verdict=Verdict.DEFERRED)
    return deferred(delivery, outcome, now + UNREADABLE_DELAY, now)


def unreported(disposition: Disposition, now: float) -> Disposition:
    """Return the decision that replaces this one because its report to the sender could not be created. A
    failed delivery stays in the queue, and a warning is owed next time.

    A success leaves without its report: keeping the delivery would send the message again.
    """
    change = disposition.change
    if isinstance(change, Finish):
        return put_off(disposition.delivery, disposition.outcome, now)
    change = Postpone(structs.replace(change.delivery, warned=False))
    return structs.replace(disposition, change=change, report=None)


def _held(delivery: Delivery, outcome: Outcome, now: float) -> Disposition:
    held = structs.replace(delivery.deferred(0.0, outcome.attempt(now), counts=outcome.counts), held=True)
    return Disposition(delivery, outcome, Postpone(held))


def _expired(delivery: Delivery, outcome: Outcome) -> Outcome:
    """Return the outcome "expired" for a delivery, with the last reply of a peer if none was contacted this
    time.
    """
    expired, last = structs.replace(outcome, verdict=Verdict.EXPIRED), delivery.last
    if outcome.counts or last is None:
        return expired
    return structs.replace(
        expired, reply=last.reply, host=last.host, peer=last.peer, local=last.local, in_doubt=last.in_doubt
    )


def local_delay(age: float) -> float:
    """Return the retry delay in seconds after an error in the relay itself."""
    return min(max(age / 4, LOCAL_FIRST), LOCAL_DELAY)


def _uncounted_delay(outcome: Outcome, age: float) -> float:
    if outcome.scope is Scope.LOCAL:
        return local_delay(age)
    return min(max(age / 4, LOCAL_DELAY), UNCOUNTED_LONGEST)


MAX_UNSETTLED = 1000
MAX_CHANGES = 250
"""The limit of changes in one write of several entries. Preparing the write takes some milliseconds of the
event loop.
"""
HURRY = 250
"""The number of deliveries without a durable outcome from which lazy changes no longer wait for others.
Otherwise `room` would be used up.
"""
SILENT = 1.0
"""Seconds without a response of the store after which no new mail is sent."""
RETRY_FIRST = 0.5
RETRY_LONGEST = 30.0


class AtomicWrite(msgspec.Struct, eq=False):
    """Changes that are written atomically; `count` of them concern deliveries. A `lazy` write may be delayed
    to join others, because no caller waits for it.
    """

    changes: Sequence[Change]
    count: int
    then: Callable[[], None] | None = None
    lazy: bool = False

    def delivery_keys(self) -> list[DeliveryKey]:
        return [change.delivery.key for change in self.changes if not isinstance(change, OwnMessage)]


class OutcomeLog:
    """Collects outcomes until they are written to the store."""

    def __init__(self, store: QueueStore, events: Events, slices: Slices, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._events = events
        self._slices = slices
        self._tasks = Tasks(partial(events.error, "queue.journal"))
        self._flush_once = NextIteration(self._flush)
        self._gathered: list[AtomicWrite] = []
        self._entries: set[AtomicWrite] = set()
        self._failed: list[AtomicWrite] = []
        self._unsettled = 0
        self._refusing = False
        self._late: set[int] = set()
        self._room = asyncio.Event()
        self._room.set()
        self.room = self._room.wait
        """Waits until another outcome may be produced: few are being written, and the store accepts them."""

    def reserve(self, count: int) -> None:
        """Count deliveries whose outcomes are still being prepared. A negative number counts settled ones."""
        self._unsettled += count
        self._update_room()

    def keys(self) -> set[DeliveryKey]:
        """Return the deliveries with an outcome that is not durable yet."""
        return {key for entry in self._entries for key in entry.delivery_keys()}

    def put(self, entry: AtomicWrite) -> None:
        """Queue a write, which is carried out with the other writes of this loop iteration."""
        self._entries.add(entry)
        self._gathered.append(entry)
        self._flush_once.ask()

    async def drain(self, timeout: float | None) -> bool:
        """Wait until all outcomes are durable. Return false if the timeout expires first."""
        self._flush()
        return await self._tasks.wait(timeout)

    async def close(self) -> None:
        """Cancel unfinished writes. Their deliveries will be attempted again."""
        self._gathered.clear()
        await self._tasks.cancel()

    def _flush(self) -> None:
        entries, self._gathered = self._gathered, []
        if self._refusing:
            # The task that retries failed writes takes these too.
            self._failed += entries
        elif entries:
            self._tasks.start(self._write(entries))

    async def _write(self, entries: list[AtomicWrite]) -> None:
        for part in _parts(entries):
            if not await self._settle(part):
                self._keep(part)

    async def _settle(self, entries: list[AtomicWrite], *, again: bool = False) -> bool:
        changes = [change for entry in entries for change in entry.changes]
        lazy = not again and self._unsettled < HURRY and all(entry.lazy for entry in entries)
        silence = asyncio.get_running_loop().call_later(SILENT, self._is_late, id(entries))
        try:
            await self._store.settle(changes, lazy=lazy)
        except Exception as error:  # noqa: BLE001 - not even a bug in a store may lose an outcome
            self._events.error("store.settle", error)
            return False
        finally:
            silence.cancel()
            if self._late:
                self._late.discard(id(entries))
                self._update_room()
        await self._announce(deque(entries))
        return True

    async def _announce(self, written: deque[AtomicWrite]) -> None:
        """Call `then` of the writes that have become durable. Hundreds of log lines take time, so this is
        done in slices.
        """
        try:
            while written:
                if written[0].then is not None:
                    await self._slices.next()
                self._settled(written.popleft())
        finally:
            while written:  # cancelled, but durable outcomes are still reported
                self._settled(written.popleft())

    def _is_late(self, write: int) -> None:
        self._late.add(write)
        self._update_room()

    def _settled(self, entry: AtomicWrite) -> None:
        self._entries.discard(entry)
        self.reserve(-entry.count)
        if entry.then is None:
            return
        try:
            entry.then()
        except Exception as error:  # noqa: BLE001 - the write is done; its announcement must not stop others
            self._events.error("queue.settled", error)

    # Retrying

    def _keep(self, entries: list[AtomicWrite]) -> None:
        trying = bool(self._failed)
        self._failed += entries
        self._refusing = True
        self._update_room()
        if not trying:
            self._tasks.start(self._try_again())

    async def _try_again(self) -> None:
        delay = 0.0
        while self._failed:
            await asyncio.sleep(delay)
            works = await self._store_works()
            progress = works and await self._try_each()
            delay = 0.0 if progress else min(max(delay * 2, RETRY_FIRST), RETRY_LONGEST)
            self._refusing = bool(self._failed) and not (works and await self._probed())
            self._update_room()
        self._refusing = False
        self._update_room()

    async def _store_works(self) -> bool:
        """Return whether a test write to the store succeeds, after waiting for a repair. The store may detect
        an earlier failure only when it is used. It may also fail again soon after a repair: LevelDB works for
        fractions of a second when it lacks the space to compact its tables.
        """
        await self._store.usable()
        if await self._probed():
            return True
        return await self._store.usable() and await self._probed()

    async def _probed(self) -> bool:
        try:
            await self._store.probe()
        except Exception as error:  # noqa: BLE001 - whatever it is, the answer is no
            if not isinstance(error, StoreError):
                self._events.error("store.probe", error)
            return False
        return True

    async def _try_each(self) -> bool:
        """Retry the failed writes and return whether any succeeded. If a part fails, its entries are written
        one by one.

        A store that was just repaired may work for only some milliseconds, so nothing waits for other writes
        here.
        """
        progress, now = False, self._clock.now()
        for entry in self._failed:
            entry.changes = [
                structs.replace(change, delivery=change.delivery.corrected_at(now))
                if isinstance(change, Postpone)
                else change
                for change in entry.changes
            ]
        for part in _parts(list(self._failed)):
            tries = [part]
            while tries:
                entries = tries.pop(0)
                if await self._settle(entries, again=True):
                    written = set(entries)
                    self._failed = [entry for entry in self._failed if entry not in written]
                    progress = True
                elif not await self._probed():
                    return progress
                elif len(entries) > 1:
                    tries = [[entry] for entry in entries]
        return progress

    def _update_room(self) -> None:
        if self._unsettled < MAX_UNSETTLED and not self._refusing and not self._late:
            self._room.set()
        else:
            self._room.clear()


def _parts(entries: list[AtomicWrite]) -> list[list[AtomicWrite]]:
    """Split the writes into groups of at most about `MAX_CHANGES` changes."""
    if sum(len(entry.changes) for entry in entries) <= MAX_CHANGES:
        return [entries]
    parts: list[list[AtomicWrite]] = [[]]
    size = 0
    for entry in entries:
        if size and size + len(entry.changes) > MAX_CHANGES:
            parts.append([])
            size = 0
        parts[-1].append(entry)
        size += len(entry.changes)
    return parts


ReportOutcomes = Callable[[Message | None, Sequence[Result], str, float | None], list[OwnMessage]]
"""`report(message, results, destination, seconds)` returns the relay's own messages about outcomes, such as
webhook events, which are stored in the same write.
"""


class SettlerCallbacks(msgspec.Struct, frozen=True, kw_only=True):
    """Callbacks with which the settler queries and notifies other components."""

    postponed: Callable[[QueueName, float], None] = lambda queue, when: None
    """Note that a deferral is durable. The earliest of its deliveries is due at `when`."""
    report: Callable[[], ReportOutcomes | None] = lambda: None
    """Return the function that reports outcomes to others."""
    paused: Callable[[Delivery, Message | None, str], float] = lambda delivery, message, destination: 0.0
    """Return the seconds that do not count towards a delivery's age because mail was suspended."""
    keep: Callable[[Message, Sequence[Delivery], str], Sequence[Delivery]] = lambda message, some, where: some
    """Hold the deliveries that are suspended, and return the others."""
    refused_stranger: Callable[[Mailbox, Reply, float], None] = lambda recipient, reply, now: None
    """Note a permanent refusal by a next hop of mail whose sender gets no report. `now` is monotonic."""


AT_ONCE = 20
"""Messages that are read, and perhaps reported, concurrently for deliveries without an attempt."""


class _PendingOutcomes(msgspec.Struct, eq=False):
    """Deliveries of one message whose outcomes are waiting to be written."""

    message: Message | None
    deliveries: Sequence[Delivery]
    outcomes: Sequence[Outcome]
    destination: str
    seconds: float | None = None
    until: float | None = None
    durable: asyncio.Future[None] | None = None


_Dsn = tuple[DsnKind, OwnMessage]


class UnattemptedDeliveries(msgspec.Struct, eq=False):
    """Deliveries that receive an outcome without an attempt, because their destination is suspended or
    unroutable. There may be thousands. They are processed a few at a time, and leave this list when they are
    passed on. `until` returns when the next one is to be checked again.
    """

    deliveries: list[Delivery]
    outcome: Outcome
    destination: str
    until: Callable[[], float] | None


class Settler:
    """Writes the outcomes of deliveries to the store."""

    def __init__(
        self,
        *,
        store: QueueStore,
        dsn_maker: DsnMaker,
        retry: RetryPolicy,
        zones: Sequence[ZoneSettings],
        bounce: BounceSettings,
        events: Events,
        clock: Clock,
        callbacks: SettlerCallbacks,
    ) -> None:
        self._callbacks = callbacks
        self._store = store
        self._events = events
        self._clock = clock
        self._dsn_maker = dsn_maker
        self.configure(zones=zones, retry=retry, bounce=bounce)
        self._slices = Slices(clock.monotonic)
        self.outcome_log = OutcomeLog(store, events, self._slices, clock)
        self._tasks = Tasks(partial(events.error, "queue.settle"))
        self._at_once = asyncio.Semaphore(AT_ONCE)
        self._in_work: set[_PendingOutcomes | UnattemptedDeliveries] = set()

    def configure(self, *, zones: Sequence[ZoneSettings], retry: RetryPolicy, bounce: BounceSettings) -> None:
        """Apply new settings."""
        self._policy = DispositionPolicy(retry, bounce, zones)
        self._dsn_maker.configure(bounce, zones)

    # For the scheduler and for operators

    def first_expiry(self, created: float, zone: str, message: Message | None = None) -> float:
        """Return the earliest Unix time at which a delivery created at `created` or later in a zone can
        expire.
        """
        retry = self._policy.retry.of(zone)
        return created + (retry.shortest_lifetime if message is None else retry.lifetime(message.envelope))

    def is_old(self, delivery: Delivery) -> bool:
        """Return `DispositionPolicy.is_old` for a delivery at the current time."""
        return self._policy.is_old(delivery, self._clock.now())

    def unsettled_keys(self) -> set[DeliveryKey]:
        """Return the deliveries with an outcome that is not durable yet."""
        working = {delivery.key for parcel in self._in_work for delivery in parcel.deliveries}
        return working | self.outcome_log.keys()

    async def drain(self, timeout: float | None = None) -> bool:
        """Wait until every outcome is durable. Return false if the timeout expires first."""
        loop = asyncio.get_running_loop()
        deadline = None if timeout is None else loop.time() + timeout
        done = await self._tasks.wait(timeout)
        left = None if deadline is None else max(0.0, deadline - loop.time())
        return await self.outcome_log.drain(left) and done

    async def close(self) -> None:
        """Cancel unfinished work. Those deliveries are attempted again after a restart."""
        await self._tasks.cancel()
        await self.outcome_log.close()

    # Outcomes

    def post(
        self,
        message: Message | None,
        deliveries: Sequence[Delivery],
        outcomes: Sequence[Outcome],
        *,
        destination: str,
        seconds: float | None = None,
    ) -> None:
        """Record the outcomes of one delivery attempt without waiting until they are durable. `message` is
        None if it cannot be read.
        """
        delivered: list[Result] = [
            (delivery, outcome, None)
            for delivery, outcome in zip(deliveries, outcomes, strict=True)
            if outcome.verdict is Verdict.DELIVERED
        ]
        self._events.attempted(delivered, destination=destination, seconds=seconds)
        simple = len(delivered) == len(deliveries) and not any(
            delivery.notify and asks_for_success(delivery, outcome) for delivery, outcome, _ in delivered
        )
        self.outcome_log.reserve(len(deliveries))
        if simple:
            # No event and no report is left to make, and no caller waits.
            changes: list[Change] = [Finish(delivery) for delivery in deliveries]
            changes += self._companions(message, delivered, destination, seconds)
            self.outcome_log.put(AtomicWrite(changes, len(deliveries), lazy=True))
            return
        parcel = _PendingOutcomes(message, deliveries, outcomes, destination, seconds)
        self._start(parcel, self._settle(parcel))

    def post_unattempted(
        self,
        deliveries: Iterable[Delivery],
        outcome: Outcome,
        *,
        destination: str,
        until: Callable[[], float] | None = None,
    ) -> None:
        """Record the same outcome for deliveries that were not attempted, without waiting until it is
        durable.

        For a suspended destination, `until` returns when each delivery is to be checked again.
        """
        work = UnattemptedDeliveries(list(deliveries), outcome, destination, until)
        self.outcome_log.reserve(len(work.deliveries))
        self._start(work, self._settle_unattempted(work))

    def write(self, changes: Sequence[Change], then: Callable[[], None] | None) -> None:
        """Queue changes without outcomes for one atomic write, which is retried until it succeeds."""
        count = sum(not isinstance(change, OwnMessage) for change in changes)
        self.outcome_log.reserve(count)
        self.outcome_log.put(AtomicWrite(changes, count, then, lazy=True))

    async def settle(
        self, message: Message, deliveries: Sequence[Delivery], outcomes: Sequence[Outcome]
    ) -> None:
        """Record outcomes like `post`, and wait until they are durable."""
        self.outcome_log.reserve(len(deliveries))
        durable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        parcel = _PendingOutcomes(message, deliveries, outcomes, "", durable=durable)
        self._start(parcel, self._settle(parcel))
        await durable

    def hold(self, deliveries: Sequence[Delivery], order: str, then: Callable[[], None]) -> None:
        """Hold deliveries because of the suspension or hold rule with the id `order`, and then call
        `then`.
        """
        changes = [Postpone(structs.replace(delivery, held=True, act=order)) for delivery in deliveries]

        def durable() -> None:
            for change in changes:
                self._events.held(change.delivery.message_id, change.delivery.recipient, order)
            then()

        self.outcome_log.reserve(len(changes))
        self.outcome_log.put(AtomicWrite(changes, len(changes), durable))

    def _start(
        self, parcel: _PendingOutcomes | UnattemptedDeliveries, work: Coroutine[object, object, None]
    ) -> None:
        self._in_work.add(parcel)
        self._tasks.start(work).add_done_callback(lambda _: self._in_work.discard(parcel))

    async def _settle_unattempted(self, work: UnattemptedDeliveries) -> None:
        try:
            await self._divide(work)
        except Exception as error:  # noqa: BLE001 - a bug of ours must not cost the outcome
            self._events.error("queue.settle", error)
            now = self._clock.now()
            rest = [put_off(delivery, work.outcome, now) for delivery in work.deliveries]
            if rest:
                self._put(rest, _PendingOutcomes(None, work.deliveries, (), work.destination))

    async def _divide(self, work: UnattemptedDeliveries) -> None:
        for message_id, group in groupby(list(work.deliveries), key=attrgetter("message_id")):
            some = list(group)
            await self._slices.next()
            if work.until is not None and not any(map(self.is_old, some)):
                now = self._clock.now()
                later = [deferred(delivery, work.outcome, work.until(), now) for delivery in some]
                self._put(later, _PendingOutcomes(None, some, (), work.destination))
            else:
                await self._at_once.acquire()
                outcomes = [work.outcome] * len(some)
                until = None if work.until is None else work.until()
                parcel = _PendingOutcomes(None, some, outcomes, work.destination, until=until)
                self._start(parcel, self._read_and_settle(message_id, parcel))
            del work.deliveries[: len(some)]

    async def _read_and_settle(self, message_id: MessageId, parcel: _PendingOutcomes) -> None:
        try:
            parcel.message = await self._read(message_id)
            if parcel.message is not None:
                # Mail that an operator has suspended must not expire or bounce because of its destination.
                left = self._callbacks.keep(parcel.message, parcel.deliveries, parcel.destination)
                self.outcome_log.reserve(len(left) - len(parcel.deliveries))
                parcel.outcomes, parcel.deliveries = parcel.outcomes[: len(left)], left
            if parcel.deliveries:
                await self._settle(parcel)
        finally:
            self._at_once.release()

    async def _read(self, message_id: MessageId) -> Message | None:
        try:
            return await self._store.read_message(message_id)
        except Exception as error:  # noqa: BLE001 - whatever it is, its deliveries are put off
            self._events.error("queue.read_message", error, message_id=message_id)
            return None

    async def _settle(self, parcel: _PendingOutcomes) -> None:
        try:
            dispositions = await self._decided(parcel)
            dispositions, reports = await self._reported(parcel.message, dispositions)
        except Exception as error:  # noqa: BLE001 - a bug of ours must not cost the outcome
            self._events.error("queue.settle", error, message_id=parcel.deliveries[0].message_id)
            now = self._clock.now()
            pairs = zip(parcel.deliveries, parcel.outcomes, strict=True)
            dispositions, reports = [put_off(delivery, outcome, now) for delivery, outcome in pairs], []
        self._put(dispositions, parcel, reports)

    async def _decided(self, parcel: _PendingOutcomes) -> list[Disposition]:
        now = self._clock.now()
        return [
            await self._policy.decide(
                parcel.message,
                delivery,
                outcome,
                now=now,
                until=parcel.until,
                paused=self._callbacks.paused(delivery, parcel.message, parcel.destination),
            )
            for delivery, outcome in zip(parcel.deliveries, parcel.outcomes, strict=True)
        ]

    async def _reported(
        self, message: Message | None, dispositions: list[Disposition]
    ) -> tuple[list[Disposition], list[_Dsn]]:
        """Create the DSNs that the decisions require, at most one of each kind. If a report cannot be
        created, its dispositions are changed.
        """
        reports: list[_Dsn] = []
        for kind in DsnKind:
            owed = [c for c in dispositions if c.report is kind]
            if not owed or message is None:
                continue
            try:
                reports.append(await self._report(kind, message, owed))
            except ReportError as error:
                self._events.error("queue.report", error, message_id=message.id)
                now = self._clock.now()
                dispositions = [unreported(c, now) if c.report is kind else c for c in dispositions]
        return dispositions, reports

    async def _report(self, kind: DsnKind, message: Message, owed: Sequence[Disposition]) -> _Dsn:
        lines = [RecipientReport(c.delivery, c.outcome) for c in owed]
        until = max(self._policy.expiry(message.envelope, c.delivery) for c in owed)
        retry_until = until if kind is DsnKind.DELAYED else None
        await self._slices.next()
        return kind, await self._dsn_maker.report(kind, message, lines, retry_until=retry_until)

    # Writing and reporting

    def _companions(
        self, message: Message | None, reported: Sequence[Result], destination: str, seconds: float | None
    ) -> list[OwnMessage]:
        """Return the messages that report outcomes to other systems. An error in this must not lose the
        outcome.
        """
        report = self._callbacks.report() if reported else None
        if report is None:
            return []
        try:
            return report(message, reported, destination, seconds)
        except Exception as error:  # noqa: BLE001 - see above
            self._events.error("webhook", error, message_id=reported[0][0].message_id)
            return []

    def _put(
        self, dispositions: Sequence[Disposition], parcel: _PendingOutcomes, reports: Sequence[_Dsn] = ()
    ) -> None:
        destination, seconds, durable = parcel.destination, parcel.seconds, parcel.durable
        changes: list[Change] = [c.change for c in dispositions]
        changes += [submit for _, submit in reports]
        news = [(c.delivery, c.outcome, c.next_attempt) for c in dispositions if _is_news(c)]
        changes += self._companions(parcel.message, news, destination, seconds)

        def then() -> None:
            if durable is not None and not durable.done():
                durable.set_result(None)
            for kind, submit in reports:
                keys = submit.about
                self._events.dsn(kind, submit.message.id, keys[0].message_id, len(keys))
            failed = (each for each in news if each[1].verdict is not Verdict.DELIVERED)
            self._events.attempted(failed, destination=destination, seconds=seconds)
            self._tell(dispositions)

        self.outcome_log.put(AtomicWrite(changes, len(dispositions), then))

    def _tell(self, dispositions: Sequence[Disposition]) -> None:
        first = dispositions[0].delivery
        for silence in {c.silence for c in dispositions if c.silence}:
            self._events.no_dsn(first.message_id, silence)
            if silence == STRANGER:
                self._tell_refused(dispositions)
        due = [c.next_attempt for c in dispositions if c.next_attempt is not None]
        if due:
            self._callbacks.postponed(first.queue, min(due))

    def _tell_refused(self, dispositions: Sequence[Disposition]) -> None:
        now = self._clock.monotonic()
        for c in dispositions:
            outcome = c.outcome
            about_it = outcome.verdict is Verdict.BOUNCED and outcome.scope is Scope.RECIPIENT
            if about_it and not outcome.local:
                self._callbacks.refused_stranger(c.delivery.recipient, outcome.reply, now)


def _is_news(c: Disposition) -> bool:
    """Return whether an outcome should be reported. A deferral without an attempt is not news if its hosts
    are suspended, or if the reason is the same as before.
    """
    outcome, last = c.outcome, c.delivery.last
    if outcome.verdict is not Verdict.DEFERRED or outcome.counts or outcome.scope is Scope.LOCAL:
        return True
    return bool(outcome.host) and (last is None or last.reply != outcome.reply)
