"""Implements operators' commands on the queue: list, show, trace, retry, hold, release, reroute, bounce,
drop, undo.

Policy: deliveries that are being attempted are left alone and counted as `busy`. Every change is durable when
its method returns. Changes are made in batches of `BATCH`, so a change of a huge queue neither blocks the
event loop nor holds the queue in memory. If a change fails or is cancelled, the finished batches remain.

- retry: deferred deliveries become due now, including those that their senders delay (RFC 4865), and the
  suspension of their destinations is lifted. Held deliveries stay held.
- hold: nothing is attempted until release. A hold survives restarts, and held deliveries do not expire.
- release: held deliveries become due now, or at their release time if their senders delay them.
- reroute: deliveries move to another zone's queue and are due there as after a release. Held ones stay held.
- bounce: deliveries leave with a failure report to the sender, as if the peer had refused them.
- drop: deliveries leave without a report.
- undo: restore what a command changed, unless something has changed it since (`journal`).

With an `act`, the journal stores each delivery before the store changes it.

`RerouteRun` chooses the queue to which `queue reroute` moves each delivery. Pure. Targets are zones of the
configuration, so a next hop is used with its own TLS settings, login and sources, and no login is offered to
another next hop. TLS is not weakened: mail stays if its zone requires more TLS than the target, unless the
routes themselves choose the target. A row of the outbox stays in its zone.

`SummaryCount` counts deliveries by one of their properties and by age, like Postfix's qshape. Pure. Memory is
bounded: at most `MAX_KEYS` keys are counted, and deliveries with any other key are counted as `other`.

The `Bin` keeps dropped mail for a day, for an undo of the drop. It is held in separate queues (`bin_of`),
which lists, counts and claims of mail skip. `next_attempt` is the time at which it is destroyed. The bin is
checked every `INTERVAL` seconds, and when mail is moved into it. Expired mail is destroyed. The oldest mail
is destroyed early if the messages together exceed `MAX_BIN_SIZE`, or if the disk has too little free space
for new mail. If the store fails, the check is repeated after `INTERVAL`.
"""

import asyncio
import contextlib
import functools
import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass, field
from itertools import groupby
from operator import add
from typing import Protocol, TypedDict, Unpack

import msgspec
from msgspec import structs

from zonerelay.config.endpoints import parse_next_hop, split_next_hops
from zonerelay.config.settings import TlsMode
from zonerelay.model import delivery as queue_names
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery, DeliveryKey, DeliveryState, QueueKind, QueueName
from zonerelay.model.envelope import Message, MessageId, is_row
from zonerelay.model.reply import NO_NAMES, Outcome, Reply, Scope, Verdict, same_reply
from zonerelay.queue.destination.destinations import suspended
from zonerelay.queue.operator.filters import ALL, QueueFilter
from zonerelay.queue.operator.journal import KEPT, Act, DeliverySnapshot, Journal, JournalEntry
from zonerelay.queue.orders.order import Order
from zonerelay.queue.scheduler import Scheduler
from zonerelay.queue.settle.settler import Settler
from zonerelay.routing.zones.zones import DEFAULT_ZONE, Zones
from zonerelay.store import contract
from zonerelay.store.contract import EveryNth, MessageNotFoundError, Store, StoreError, Unhealthy
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.events.records import TraceStep
from zonerelay.telemetry.logs.redact import Redactor

# The trace of a message in order of time. Pure.
#
# A spool stores the state of a delivery, not its history. Only the acceptance, the last attempt and the next
# one are known here. Everything else is in the log under the same message id.


class MessageView(msgspec.Struct, frozen=True):
    """A message and its open deliveries with their states."""

    message: Message
    deliveries: tuple[tuple[Delivery, DeliveryState], ...]


def steps(shown: MessageView) -> tuple[TraceStep, ...]:
    """Return the events of a message in chronological order. The next step comes last."""
    envelope = shown.message.envelope
    trace = list(shown.message.trace) or [f"protocol={envelope.origin.protocol}"]
    found = [TraceStep(envelope.created, "accepted", text=note) for note in trace]
    gone = len(envelope.recipients) - len(shown.deliveries)
    if gone:
        text = (
            f"{gone} of {len(envelope.recipients)} recipients have left the queue; see the log for their "
            "outcomes"
        )
        found.append(TraceStep(envelope.created, "settled", text=text))
    for delivery, state in shown.deliveries:
        found += _of(delivery, state, envelope.created)
    return tuple(sorted(found, key=lambda step: step.at))


def _of(delivery: Delivery, state: DeliveryState, accepted: float) -> Iterable[TraceStep]:
    recipient = delivery.recipient
    last = delivery.last
    at = accepted if last is None else last.at
    if last is not None:
        peer = f" [{last.peer}]" if last.peer else ""
        host = f"{last.host}{peer}: " if last.host else ""
        doubt = " (in doubt)" if last.in_doubt else ""
        event = "attempt" if delivery.attempts or last.host else "no attempt"
        yield TraceStep(last.at, event, recipient, f"{host}{last.reply}{doubt}")
    if delivery.warned:
        yield TraceStep(at, "warned", recipient, "the sender was notified of the delay")
    if delivery.created > accepted:
        yield TraceStep(delivery.created, "release", recipient, "the sender has requested this time")
    after = f"after {delivery.attempts} attempt{'s' if delivery.attempts != 1 else ''}"
    if state is DeliveryState.DEFERRED:
        yield TraceStep(delivery.next_attempt, "next attempt", recipient, after)
    else:
        yield TraceStep(at, state.value, recipient, after)


MAX_KEYS = 10_000
BOUNDS = (5, 10, 20, 40, 80, 160, 320, 640, 1280)
"""Minutes. The last column counts deliveries that are older than all bounds."""
UNKNOWN = "(not known)"
NO_ATTEMPT = "(no attempt yet)"

Key = Callable[[Delivery, Message | None], str]


_SAME = Redactor(b"same", enabled=True)
"""Makes of a reply what the history has, whose report groups replies as a summary does."""


def reply_key(delivery: Delivery, _message: Message | None = None) -> str:
    if delivery.last is None:
        return NO_ATTEMPT
    return same_reply(_SAME.about(str(delivery.last.reply), delivery.recipient))


KEYS: Mapping[str, Key] = {
    "domain": lambda delivery, _: delivery.domain,
    "zone": lambda delivery, _: delivery.zone,
    "priority": lambda delivery, _: delivery.priority.value,
    "sender": lambda _, message: UNKNOWN if message is None else message.envelope.sender or "<>",
    "user": lambda _, message: UNKNOWN if message is None else message.envelope.origin.user or "(no log-in)",
}
NEED_MESSAGE = frozenset({"sender", "user"})


def _no_ages() -> list[int]:
    return [0] * (len(BOUNDS) + 1)


class SummaryCount(msgspec.Struct, frozen=True):
    """The result of `summary`: numbers of deliveries by a property and by age. `counts[key][n]` counts
    deliveries of at most `BOUNDS[n]` minutes that are older than the previous bound.
    """

    every: int
    """One delivery in `every` was counted, and stands for that many."""
    now: float
    counts: dict[str, list[int]] = msgspec.field(default_factory=dict)
    other: list[int] = msgspec.field(default_factory=_no_ages)

    def count(self, key: str, created: float) -> None:
        ages = self.counts.get(key)
        if ages is None:
            ages = self.counts.setdefault(key, _no_ages()) if len(self.counts) < MAX_KEYS else self.other
        ages[bisect_left(BOUNDS, (self.now - created) / 60)] += self.every


_DEMAND = {TlsMode.NONE: 0, TlsMode.OPPORTUNISTIC: 1, TlsMode.REQUIRED: 2, TlsMode.VERIFY: 3, TlsMode.DANE: 3}


class RerouteError(Exception):
    """The target of a reroute does not exist. The message is for an operator."""


class RerouteRun:
    """Moves deliveries to other zones for one `reroute` command. `left` counts the deliveries that are not
    moved, by reason.
    """

    def __init__(
        self, zones: Zones, *, to_zone: str = "", next_hop: str = "", ask_again: bool = False
    ) -> None:
        """Check the target of a reroute. Raise RerouteError unless exactly one target is given and the zone
        exists.
        """
        if sum(map(bool, (to_zone, next_hop, ask_again))) != 1:
            raise RerouteError("no target selected: specify a zone, a next hop, or that the routes choose")
        self._zones = zones
        self.needs_messages = ask_again
        self.left: Counter[str] = Counter()
        self.to_zone = _zone_of(zones, next_hop) if next_hop else to_zone
        if not ask_again and self.to_zone not in (*zones.names, DEFAULT_ZONE):
            named = ", ".join(zones.names) or DEFAULT_ZONE
            raise RerouteError(f"zone {to_zone} is not configured; configured are {named}")

    @property
    def aim(self) -> str:
        return f"zone {self.to_zone}" if self.to_zone else "the zones that the routes choose"

    @property
    def note(self) -> str:
        """A description of the target zone, and of the deliveries that are not moved."""
        left = [f"{count:,} are not moved: {why}" for why, count in self.left.most_common()]
        return "; ".join((f"to {self.aim}", *left))

    def target(self, delivery: Delivery, message: Message | None) -> QueueName:
        if is_row(delivery.message_id):
            return self._stays(delivery, "rows of the outbox")
        if not self.needs_messages:
            target, own = self._zones.get(self.to_zone), self._zones.get(delivery.zone)
            if delivery.zone in self._zones.names and _DEMAND[own.tls] > _DEMAND[target.tls]:
                why = (
                    f"zone {own.name} has tls = {own.tls.value}, but {self.to_zone} has "
                    f"only {target.tls.value}"
                )
                return self._stays(delivery, why)
            return queue_names.queue_of(self.to_zone, delivery.priority)
        if message is None:
            return self._stays(delivery, "their messages cannot be read")
        zone_of = self._zones.choose(message.envelope, headers=message.headers, size=message.size)
        choice = zone_of(delivery.recipient)
        return queue_names.queue_of(choice.zone, choice.priority or message.envelope.priority)

    def _stays(self, delivery: Delivery, why: str) -> QueueName:
        self.left[why] += 1
        return delivery.queue


def _zone_of(zones: Zones, next_hop: str) -> str:
    """Return the only zone with this next hop. Raise RerouteError if none or several have it."""
    try:
        wanted = parse_next_hop(next_hop)
    except ValueError as error:
        raise RerouteError(str(error)) from error
    found = []
    for name in zones.names:
        hops = split_next_hops(zones.get(name).next_hop)
        # Hosts in a list are alternatives: mail would go to another host when the first does not answer.
        if len(hops) == 1 and parse_next_hop(hops[0]) == wanted:
            found.append(name)
    if len(found) > 1:
        raise RerouteError(
            f"the zones {', '.join(found)} have the next hop {next_hop}; choose one with --zone"
        )
    if not found:
        raise RerouteError(
            f'no zone has next_hop = "{next_hop}"; add a [[zone]] with it and its TLS and login, reload, '
            "and try again"
        )
    return found[0]


BATCH = 1000
SHOWN = 100
SOON = 0.25
"""Limits of a batch that is shown, in deliveries and in seconds, so that the first lines appear soon."""
NEVER = float("inf")
SUMMED = 250
"""Deliveries that a summary counts, or a release changes, without yielding to the event loop."""
SAMPLE = 10_000
"""Deliveries from which a summary is estimated."""
AGAIN = 0.5
"""Seconds after which deliveries are released that another change had withdrawn."""
NAMED = 3
"""Message ids in the description of a filter."""
TOGETHER = 100
"""Messages that are bounced concurrently, so that one write holds many of them."""

Selected = tuple[Delivery, Message | None, DeliveryState]
_WAITING = (DeliveryState.READY, DeliveryState.DEFERRED)
_Change = Callable[[Delivery], Delivery]
_Work = Callable[[Sequence[Delivery], Act | None], Awaitable[int]]
_Step = tuple[Delivery, Delivery]
RACES = 5
"""How often deliveries are retried that change while a change is being noted."""


class ChangeCounts(msgspec.Struct, frozen=True):
    """The numbers of deliveries that an operator's change has matched and changed. `changed` can be less than
    `matched - busy`, because some deliveries already were in the requested state, or left the queue.

    For an undo, `gone` deliveries have left the queue, and `altered` ones were changed by something else
    since.
    """

    matched: int = 0
    changed: int = 0
    busy: int = 0
    gone: int = 0
    altered: int = 0

    def __add__(self, other: "ChangeCounts") -> "ChangeCounts":
        return ChangeCounts(*map(add, structs.astuple(self), structs.astuple(other)))


class VerbProgress(Protocol):
    """The progress of a command: deliveries checked so far, and the total at the start."""

    done: int
    total: int


class ChangeRun(TypedDict, total=False):
    """The optional arguments of a command that changes deliveries: a progress counter, and its journal
    record.
    """

    progress: VerbProgress | None
    act: Act | None


LEFT_OUT = "unreadable records, because the spool is damaged (see zonerelay status)"


@dataclass(eq=False, repr=False)
class Operations:
    """The operators' commands on the queue of one worker. Methods raise StoreError when the store fails.
    `orders_in_force` returns the ids of active suspensions and hold rules. `order_at` is `Orders.order_of`.
    `binned` is set when mail was moved into the bin.
    """

    _: KW_ONLY
    store: Store
    scheduler: Scheduler
    settler: Settler
    events: Events
    clock: Clock
    journal: Journal
    orders_in_force: Callable[[], Collection[str]] = tuple
    order_at: Callable[[Delivery, Message | None, str], str] = lambda delivery, message, hosts: ""
    binned: asyncio.Event = field(default_factory=asyncio.Event)

    # Reading commands

    def left_out(self) -> tuple[str, ...]:
        """Return a warning that unreadable records are missing from replies, or () if the store is not
        damaged.
        """
        return (LEFT_OUT,) if self.store.unhealthy() is Unhealthy.DAMAGED else ()

    async def select(
        self,
        wanted: QueueFilter,
        limit: int | None = None,
        progress: VerbProgress | None = None,
        *,
        after: DeliveryKey | None = None,
    ) -> AsyncGenerator[Selected, None]:
        """Yield matching deliveries zone by zone, oldest message first. The message is None if it is
        unreadable. With `after`, the last key of the previous page, only later keys are yielded; its delivery
        may have left the queue.
        """
        left = sys.maxsize if limit is None else limit
        async with aclosing(self.matching(wanted, progress, most=SHOWN, within=SOON, after=after)) as batches:
            async for batch in batches:
                messages = await self.messages_of(each for each, _ in batch[:left])
                for delivery, state in batch[:left]:
                    message = messages.get(delivery.message_id)
                    yield delivery, message, self._suspended(delivery, message, state)
                left -= len(batch)
                if left <= 0:
                    return

    async def count(self, wanted: QueueFilter, progress: VerbProgress | None = None) -> int:
        async with aclosing(self.matching(wanted, progress)) as batches:
            return sum([len(batch) async for batch in batches])

    async def show(self, message_id: MessageId) -> MessageView:
        """Return a message with its open deliveries. Raise MessageNotFoundError."""
        # Read the deliveries first: reading a message from a shared store may wait for its server.
        deliveries = await self.open_deliveries(message_id)
        message = await self.store.read_message(message_id)
        now = self.clock.now()
        active = self.scheduler.active_keys()
        return MessageView(
            message, tuple((delivery, self._state(delivery, message, active, now)) for delivery in deliveries)
        )

    async def open_deliveries(self, message_id: MessageId) -> list[Delivery]:
        """Return the open deliveries of a message. Raise MessageNotFoundError if all are in the bin."""
        found = await self.store.deliveries_of(message_id)
        deliveries = [each for each in found if each.queue.kind is not QueueKind.BIN]
        if found and not deliveries:
            raise MessageNotFoundError(f"message {message_id} was dropped; `zonerelay undo` restores it")
        return deliveries

    async def trace(self, message_id: MessageId) -> tuple[TraceStep, ...]:
        """Return the known history of a message and its next attempts. Raise MessageNotFoundError."""
        shown = await self.show(message_id)
        details = [(self._until_probe(each), state) for each, state in shown.deliveries]
        return steps(structs.replace(shown, deliveries=tuple(details)))

    async def summary(
        self, wanted: QueueFilter, by: str, *, exact: bool, progress: VerbProgress | None = None
    ) -> SummaryCount:
        """Count the matching deliveries by one property, such as their destination hosts or their last reply.
        Without `exact` the counts for a large queue are estimated from a sample, so that the reply comes
        within about a second.
        """
        every = 1 if exact or wanted.reaches_bin else max(1, self._total(wanted.zone) // SAMPLE)
        tally = SummaryCount(every, self.clock.now())
        own: dict[str, Key] = {"site": self._site, "reply": self._reply}
        key_of = own.get(by) or KEYS[by]
        needs_message = by in NEED_MESSAGE or (by == "reply" and bool(self.orders_in_force()))
        async with aclosing(self.matching(wanted, progress, most=SUMMED, every=every)) as batches:
            async for batch in batches:
                needed = batch if needs_message else []
                messages = await self.messages_of(each for each, _ in needed)
                for delivery, _ in batch:
                    tally.count(key_of(delivery, messages.get(delivery.message_id)), delivery.created)
                await asyncio.sleep(0)
        return tally

    def _site(self, delivery: Delivery, _message: Message | None) -> str:
        """Return the hosts of a delivery's destination, or `UNKNOWN` if its domain was not looked up."""
        found = self.scheduler.destination_of(delivery.zone, delivery.domain)
        return UNKNOWN if found is None else found.label

    def _reply(self, delivery: Delivery, message: Message | None) -> str:
        """Return the last reply to a delivery, or the reason why it has not been attempted."""
        if delivery.attempts:
            return reply_key(delivery)
        if order := self.order_of(delivery, message):
            return f"(suspended by {order})"
        found = self.suspension_of(delivery)
        return reply_key(delivery) if found is None else same_reply(str(suspended(found[1])))

    # Changing commands

    async def retry(self, wanted: QueueFilter, *, at: float = 0.0, **run: Unpack[ChangeRun]) -> ChangeCounts:
        """Make deliveries due at `at` (Unix seconds; 0 is now)."""
        due = at or self.clock.now()

        async def retry(deliveries: Sequence[Delivery], act: Act | None) -> int:
            changed = await self._update(deliveries, lambda each: _retried(each, due), act)
            for zone, domain in {(each.zone, each.domain) for each in deliveries if not at}:
                self.scheduler.resume_domain(zone, domain)
            return len(changed)

        return await self._over("retry", wanted, retry, **run)

    async def hold(self, wanted: QueueFilter, **run: Unpack[ChangeRun]) -> ChangeCounts:
        orders = self.orders_in_force()

        def held(delivery: Delivery) -> Delivery:
            # What an order holds now belongs to the operator; otherwise the end of the order would release
            # it.
            by_order = delivery.act in orders
            return structs.replace(delivery, held=True, act="" if by_order else delivery.act)

        return await self._change("hold", wanted, held, **run)

    async def release(self, wanted: QueueFilter, **run: Unpack[ChangeRun]) -> ChangeCounts:
        now = self.clock.now()
        return await self._change("release", wanted, lambda each: _released(each, now), **run)

    async def reroute(
        self, wanted: QueueFilter, rerouting: RerouteRun, **run: Unpack[ChangeRun]
    ) -> ChangeCounts:
        async def reroute(deliveries: Sequence[Delivery], act: Act | None) -> int:
            messages = await self.messages_of(deliveries if rerouting.needs_messages else ())
            now = self.clock.now()
            queues = {each.key: rerouting.target(each, messages.get(each.message_id)) for each in deliveries}
            changed = await self._update(deliveries, lambda each: _moved(each, queues[each.key], now), act)
            self._wake(queues.values())
            return len(changed)

        return await self._over("reroute", wanted, reroute, **run)

    async def drop(
        self, wanted: QueueFilter, *, purge: bool = False, **run: Unpack[ChangeRun]
    ) -> ChangeCounts:
        """Move deliveries to the bin, from which an undo can restore them. Without an act, with `purge` (also
        for mail in the bin), and for rows of the outbox, the mail is deleted at once.
        """
        until = self.clock.now() + KEPT

        def binned(each: Delivery) -> Delivery:
            return structs.replace(each, queue=queue_names.bin_of(each.queue), held=True, next_attempt=until)

        async def drop(deliveries: Sequence[Delivery], act: Act | None) -> int:
            final = purge or act is None
            kept = [each for each in deliveries if not final and not is_row(each.message_id)]
            changed = await self._update(kept, binned, act)
            self.binned.set()
            gone = [each for each in deliveries if final or is_row(each.message_id)]
            await self._note_final(gone, act)
            removed = await self.store.update(_keys(gone), lambda _: None)
            self.events.dropped([*changed, *(key for key in removed if key.queue.is_mail)])
            return len(changed) + len(removed)

        return await self._over("drop", structs.replace(wanted, in_bin=purge), drop, **run)

    async def bounce(self, wanted: QueueFilter, reason: str, **run: Unpack[ChangeRun]) -> ChangeCounts:
        # A single line, because the text becomes a status field of the report.
        reply = Reply(554, "7.0", " ".join(reason.split()) or "bounced by the operator")
        outcome = Outcome(Verdict.BOUNCED, reply, Scope.LOCAL, local=True, counts=False)

        async def bounce(deliveries: Sequence[Delivery], act: Act | None) -> int:
            await self._note_final(deliveries, act)
            return await self._bounce(_keys(deliveries), outcome)

        return await self._over("bounce", wanted, bounce, **run)

    async def undo(self, undone: Act, act: Act, progress: VerbProgress | None = None) -> ChangeCounts:
        """Restore the deliveries that `undone` changed. It can be repeated after a crash, because nothing is
        restored twice.
        """
        result = ChangeCounts()
        try:
            async with aclosing(self.journal.entries(undone.id)) as pieces:
                async for entries in pieces:
                    result += await self._restore(entries, act)
                    if progress is not None:
                        progress.done += len(entries)
        finally:
            self._tell("undo", result, act.what, act)
        return result

    async def release_orders(self, over: Sequence[Order]) -> int:
        """Release exactly the deliveries that these suspensions and hold rules have held. Return the number
        of deliveries.
        """
        ids = {order.id for order in over}
        counts = self.store.counts().values()
        if self.store.is_counted() and not any(each.held for each in counts):
            return 0
        now = self.clock.now()

        def released(delivery: Delivery) -> Delivery:
            is_theirs = delivery.held and delivery.act in ids
            if not is_theirs:
                return delivery
            return _due(structs.replace(delivery, held=False, act=""), now).corrected_at(now)

        count = 0
        while True:
            result = await self._correct(QueueFilter(state=DeliveryState.HELD), released)
            count += result.changed
            if not result.busy:
                return count
            await asyncio.sleep(AGAIN)  # another change has withdrawn some of them

    async def correct(self, change: Callable[[Delivery], Delivery]) -> ChangeCounts:
        """Apply a correction function to all deliveries except held ones."""
        return await self._correct(ALL, lambda each: each if each.held else change(each))

    async def ask_names_again(self, after: float) -> None:
        """Reschedule deliveries that were deferred because of a DNS outage, so that they are due in `after`
        seconds.
        """
        due = self.clock.now() + after

        def sooner(delivery: Delivery) -> Delivery:
            last = delivery.last
            is_later = delivery.next_attempt > due and not delivery.act
            is_meant = is_later and last is not None and last.local and last.reply.detail == NO_NAMES
            return structs.replace(delivery, next_attempt=due) if is_meant else delivery

        await self.correct(sooner)
        self._wake(self.store.counts())

    def suspension_of(self, delivery: Delivery) -> tuple[float, Reply] | None:
        """Return the time until which a delivery's destination is suspended, and the reply that caused it."""
        found = self.scheduler.destination_of(delivery.zone, delivery.domain)
        if found is None or found.suspended_until is None or found.suspension.reply is None:
            return None
        return found.suspended_until, found.suspension.reply

    def _until_probe(self, delivery: Delivery) -> Delivery:
        found = self.suspension_of(delivery)
        until = 0.0 if found is None else found[0]
        return structs.replace(delivery, next_attempt=max(delivery.next_attempt, until))

    async def _correct(self, wanted: QueueFilter, change: Callable[[Delivery], Delivery]) -> ChangeCounts:
        corrected = ChangeCounts()

        async def update(deliveries: Sequence[Delivery], _: Act | None) -> int:
            return len(await self.store.update(_keys(deliveries), change))

        async with aclosing(self.matching(wanted, most=SUMMED)) as batches:
            async for batch in batches:
                some = [delivery for delivery, _ in batch if change(delivery) != delivery]
                if some:
                    corrected += await self._one_batch(some, update)
        return corrected

    async def _change(
        self, verb: str, wanted: QueueFilter, change: _Change, **run: Unpack[ChangeRun]
    ) -> ChangeCounts:
        async def update(deliveries: Sequence[Delivery], act: Act | None) -> int:
            return len(await self._update(deliveries, change, act))

        return await self._over(verb, wanted, update, **run)

    async def _update(
        self, deliveries: Sequence[Delivery], change: _Change, act: Act | None
    ) -> set[DeliveryKey]:
        """Record a change in the journal, and then apply it to the store. If a delivery was modified in
        between, this is repeated for it. Return the keys of the changed deliveries.
        """
        changed: set[DeliveryKey] = set()
        left = {each.key: each for each in deliveries}
        for _ in range(RACES):
            steps: dict[DeliveryKey, _Step] = {}
            for key, old in left.items():
                new = change(old)
                if new is not old and new != old:
                    steps[key] = (old, new if act is None else structs.replace(new, act=act.id))
            if not steps:
                break
            if act is not None:
                noted = [
                    JournalEntry(key, DeliverySnapshot.of(old), DeliverySnapshot.of(new))
                    for key, (old, new) in steps.items()
                ]
                await self.journal.note(act.id, noted)
            met = await self.store.update(list(steps), functools.partial(_stepped, steps))
            left = {key: each for key, each in met.items() if each != steps[key][0]}
            changed |= met.keys() - left.keys()
        return changed

    async def _note_final(self, deliveries: Sequence[Delivery], act: Act | None) -> None:
        """Record in the journal which deliveries are about to leave the queue, in case the change is
        interrupted.
        """
        if act is not None:
            states = ((each.key, DeliverySnapshot.of(each)) for each in deliveries)
            await self.journal.note(act.id, [JournalEntry(key, state, state) for key, state in states])

    async def _restore(self, entries: Sequence[JournalEntry], act: Act) -> ChangeCounts:
        wanted = {entry.key._replace(queue=entry.after.queue): entry for entry in entries}
        free = await self.scheduler.withdraw_settled(wanted)
        states: dict[DeliveryKey, DeliverySnapshot] = {}
        restored: dict[DeliveryKey, DeliverySnapshot] = {}
        now = self.clock.now()

        def step(current: Delivery) -> Delivery:
            entry = wanted[current.key]
            is_after = DeliverySnapshot.of(current) == entry.after
            return _due(entry.before.restored(current), now).corrected_at(now) if is_after else current

        try:
            found = await self.store.update([key for key in wanted if key in free], step)
        finally:
            self.scheduler.give_back(free)
        for key, current in found.items():
            entry = wanted[key]
            states[entry.key] = DeliverySnapshot.of(current)
            if states[entry.key] == entry.after:
                restored[entry.key] = DeliverySnapshot.of(step(current))
        missing = [entry for key, entry in wanted.items() if key in free and entry.key not in states]
        await self._look_elsewhere(missing, states)
        undone = [entry for entry in entries if entry.key in restored]
        self._wake(entry.before.queue for entry in undone if entry.before.queue != entry.after.queue)
        # Noted after the change: a crash in between leaves less of this undo to be undone, never more.
        await self.journal.note(
            act.id,
            [JournalEntry(e.key._replace(queue=e.before.queue), e.after, restored[e.key]) for e in undone],
        )
        busy = sum(e.key._replace(queue=e.after.queue) not in free for e in entries if e.key not in states)
        known = [(entry, states[entry.key]) for entry in entries if entry.key in states]
        left_alone = sum(state == entry.after for entry, state in known) - len(undone)
        return ChangeCounts(
            len(entries),
            len(undone),
            busy + left_alone,
            gone=len(entries) - len(known) - busy,
            altered=sum(state not in (entry.before, entry.after) for entry, state in known),
        )

    async def _look_elsewhere(
        self, missing: Sequence[JournalEntry], states: dict[DeliveryKey, DeliverySnapshot]
    ) -> None:
        """Look in the other queues for deliveries that an undo has not found in their recorded queue.
        Deliveries found there have not left the queue.
        """
        origins = {entry.key[1:]: entry.key for entry in missing}
        queues = [queue for queue, counts in self.store.counts().items() if counts.total] if missing else []
        for queue in queues:
            keys = [entry.key._replace(queue=queue) for entry in missing]
            found = await self.store.update(keys, lambda current: current)
            states.update((origins[key[1:]], DeliverySnapshot.of(current)) for key, current in found.items())

    def _wake(self, queues: Iterable[QueueName]) -> None:
        for queue in set(queues):
            self.scheduler.wake(queue)

    async def _over(
        self, verb: str, wanted: QueueFilter, work: _Work, **run: Unpack[ChangeRun]
    ) -> ChangeCounts:
        """Apply `work` to the matching deliveries batch by batch. Each batch is withdrawn from scheduling
        before and returned afterwards.
        """
        result, act = ChangeCounts(), run.get("act")
        try:
            async with aclosing(self.matching(wanted, run.get("progress"))) as batches:
                async for batch in batches:
                    result += await self._one_batch([delivery for delivery, _ in batch], work, act)
        finally:
            self._tell(verb, result, described(wanted), act)
        return result

    def _tell(self, verb: str, result: ChangeCounts, detail: str, act: Act | None) -> None:
        if act is not None:
            details = {"detail": act.what, "act": act.id, "who": act.who, "reason": act.reason}
            self.events.operated(verb, result.changed, **details)
        elif result.matched:
            self.events.operated(verb, result.changed, detail=detail)

    async def _one_batch(
        self, deliveries: Sequence[Delivery], work: _Work, act: Act | None = None
    ) -> ChangeCounts:
        free = await self.scheduler.withdraw_settled(_keys(deliveries))
        try:
            changed = await work([each for each in deliveries if each.key in free], act) if free else 0
        finally:
            self.scheduler.give_back(free)
        return ChangeCounts(len(deliveries), changed, len(deliveries) - len(free))

    async def _bounce(self, keys: Sequence[DeliveryKey], outcome: Outcome) -> int:
        bounced = 0
        groups = [list(group) for _, group in groupby(keys, key=lambda key: key.message_id)]
        for start in range(0, len(groups), TOGETHER):
            some = groups[start : start + TOGETHER]
            # The settler keeps an outcome until it can be stored. An operator gets an error now instead.
            await self.store.probe()
            work = (self._bounce_message(group, outcome) for group in some)
            # If one fails, the others end first: what was given back would be attempted while it bounces.
            for result in await asyncio.gather(*work, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
                bounced += result
        return bounced

    async def _bounce_message(self, keys: Sequence[DeliveryKey], outcome: Outcome) -> int:
        message_id = keys[0].message_id
        message = await self._message(message_id)
        if message is None:
            return 0
        chosen = set(keys)
        # Read the current state, because the list may be older than the last attempt. Mail of other nodes is
        # excluded: the report would be stored here, and the outcome nowhere.
        deliveries = [d for d in await self.store.deliveries_of(message_id, own=True) if d.key in chosen]
        if deliveries:
            await self.settler.settle(message, deliveries, [outcome] * len(deliveries))
        return len(deliveries)

    # Reading the store

    def _state(
        self, delivery: Delivery, message: Message | None, active: set[DeliveryKey], now: float
    ) -> DeliveryState:
        if delivery.key in active:
            return DeliveryState.ACTIVE
        return self._suspended(delivery, message, delivery.state(now))

    def _suspended(self, delivery: Delivery, message: Message | None, state: DeliveryState) -> DeliveryState:
        """Return the state of a delivery, corrected for suspensions, hold rules and unreachable hosts."""
        if state in (DeliveryState.HELD, *_WAITING) and self.order_of(delivery, message):
            return DeliveryState.SUSPENDED
        is_unreachable = state is DeliveryState.READY and self.suspension_of(delivery) is not None
        return DeliveryState.DEFERRED if is_unreachable else state

    def order_of(self, delivery: Delivery, message: Message | None) -> str:
        """Return the id of the suspension or hold rule that applies to a delivery, or "" if there is none."""
        if not self.orders_in_force():
            return ""
        found = self.scheduler.destination_of(delivery.zone, delivery.domain)
        return self.order_at(delivery, message, "" if found is None else found.label)

    async def matching(
        self,
        wanted: QueueFilter,
        progress: VerbProgress | None = None,
        *,
        most: int = BATCH,
        within: float = NEVER,
        every: int = 1,
        after: DeliveryKey | None = None,
    ) -> AsyncGenerator[list[tuple[Delivery, DeliveryState]], None]:
        """Yield matching deliveries in batches of at most `most`, each collected within `within` seconds. A
        batch is complete before anything is done to it. Only one of `every` deliveries is checked.
        """
        batch: list[tuple[Delivery, DeliveryState]] = []
        now, began = self.clock.now(), self.clock.monotonic()
        seen = 0
        active = self.scheduler.active_keys()
        async with aclosing(self._candidates(wanted, progress, every, after)) as candidates:
            async for delivery in candidates:
                seen += 1
                if seen % BATCH == 0:
                    await asyncio.sleep(0)
                    active = self.scheduler.active_keys()
                if not wanted.matches(delivery, now):
                    continue
                state = self._state(delivery, None, active, self.clock.now())
                by_order = wanted.state is not None and state in _WAITING and bool(self.orders_in_force())
                if wanted.needs_message or by_order:
                    message = await self._message(delivery.message_id)
                    if not wanted.matches_sender(message):
                        continue
                    state = self._suspended(delivery, message, state)
                if not wanted.matches_state(state):
                    continue
                batch.append((delivery, state))
                if len(batch) >= most or self.clock.monotonic() - began >= within:
                    yield batch
                    batch = []
                    began = self.clock.monotonic()
        if batch:
            yield batch

    async def _candidates(
        self, wanted: QueueFilter, progress: VerbProgress | None, every: int, after: DeliveryKey | None
    ) -> AsyncGenerator[Delivery, None]:
        if wanted.message_ids is not None:
            for message_id in sorted(wanted.message_ids):
                found = await self.store.deliveries_of(message_id)
                for delivery in sorted(found, key=lambda each: each.key):
                    is_dropped = delivery.queue.kind is QueueKind.BIN
                    is_meant = delivery.queue.is_mail or (is_dropped and wanted.reaches_bin)
                    if (after is None or delivery.key > after) and is_meant:
                        yield delivery
            return
        may_match = wanted.may_match
        if every > 1:
            may_match = EveryNth(every)
        elif progress is not None:
            progress.total = self._total(wanted.zone)
            may_match = _counting(may_match, progress)
        queues: list[QueueName | None] = (
            [None] if wanted.zone is None else [*queue_names.queues_of(wanted.zone)]
        )
        if wanted.state is DeliveryState.DROPPED:
            queues = []
        if wanted.reaches_bin:
            bins = (each for each in await self.store.queues() if each.kind is QueueKind.BIN)
            meant = [each for each in bins if wanted.zone in (None, each.zone)]
            queues += sorted(each for each in meant if after is None or each >= after.queue)
        if after is not None and after.queue in queues:
            queues = queues[queues.index(after.queue) :]
        for queue in queues:
            start = after if after is not None and queue in (None, after.queue) else None
            async with aclosing(self.store.scan(queue, wanted=may_match, after=start)) as deliveries:
                async for delivery in deliveries:
                    yield delivery

    def _total(self, zone: str | None) -> int:
        return sum(
            counts.total for queue, counts in self.store.counts().items() if zone in (None, queue.zone)
        )

    async def messages_of(self, deliveries: Iterable[Delivery]) -> dict[MessageId, Message]:
        """Read the messages of these deliveries, each only once."""
        ids = list(dict.fromkeys(each.message_id for each in deliveries))
        return await self.store.read_messages(ids) if ids else {}

    async def _message(self, message_id: MessageId) -> Message | None:
        try:
            return await self.store.read_message(message_id)
        except (MessageNotFoundError, contract.StoreCorruptError):
            return None


def _counting(wanted: Callable[[str], bool], progress: VerbProgress) -> Callable[[str], bool]:
    """Return a filter that counts in `progress` the recipients that it checks. It is also called in the
    store's thread, one delivery at a time.
    """

    def counted(recipient: str) -> bool:
        progress.done += 1
        return wanted(recipient)

    return counted


def _stepped(steps: Mapping[DeliveryKey, _Step], current: Delivery) -> Delivery:
    """Return the delivery after its planned change, or unchanged if it was modified since the change was
    planned.
    """
    old, new = steps[current.key]
    return new if current == old else current


def _keys(deliveries: Sequence[Delivery]) -> list[DeliveryKey]:
    return [each.key for each in deliveries]


def _due(delivery: Delivery, now: float) -> Delivery:
    """Return the delivery, made due at `now` if it was never attempted."""
    is_new = not delivery.held and not delivery.next_attempt
    return structs.replace(delivery, next_attempt=now) if is_new else delivery


def _retried(delivery: Delivery, at: float) -> Delivery:
    return delivery if delivery.held else structs.replace(delivery, next_attempt=at)


def _released(delivery: Delivery, now: float) -> Delivery:
    if not delivery.held:
        return delivery
    return structs.replace(delivery, held=False, next_attempt=delivery.released_at(now))


def _moved(delivery: Delivery, queue: QueueName, now: float) -> Delivery:
    if queue == delivery.queue:
        return delivery
    due = delivery.next_attempt if delivery.held else delivery.released_at(now)
    return structs.replace(delivery, queue=queue, next_attempt=due)


def described(wanted: QueueFilter) -> str:
    """Describe the filter in one line for the log."""
    given = {field.name: getattr(wanted, field.name) for field in structs.fields(wanted)}
    ids = sorted(given.pop("message_ids") or ())
    more = f" and {len(ids) - NAMED:,} more" if len(ids) > NAMED else ""
    words = [f"{name}={value}" for name, value in given.items() if value is not None and value is not False]
    return " ".join([*words, *([f"message_id={','.join(ids[:NAMED])}{more}"] if ids else [])])


INTERVAL = 600.0
PAUSE = 5.0
"""Seconds between two checks at least. A check that takes long is followed by a pause ten times as long."""
MAX_BIN_SIZE = 1024**3
SPAN = 60.0
"""Seconds of due time that are counted, and destroyed to save space, together."""


@dataclass(eq=False, repr=False)
class Bin:
    """The bin, which keeps dropped mail so that it can be restored. `skipped` is `ClockWatch.skipped`. `run`
    is to end before the store is closed.
    """

    operations: Operations
    skipped: Callable[[float], float] = lambda _: 0.0

    async def sweep(self) -> None:
        """Delete expired mail, and the oldest mail if the bin is too large. Raise StoreError."""
        store, now = self.operations.store, self.operations.clock.now()
        await self._destroy(now - self.skipped(now - 1.0))
        sizes: Counter[float] = Counter()
        last = ""  # deliveries of one message follow each other
        async for batch in self._batches():
            messages = await self.operations.messages_of(batch)
            for each in batch:
                message = messages.get(each.message_id)
                is_counted, last = each.message_id == last, each.message_id
                sizes[each.next_attempt // SPAN] += 0 if message is None or is_counted else message.size
        room = 0 if store.unhealthy() is Unhealthy.NO_SPACE else MAX_BIN_SIZE
        over = None
        for span in sorted(sizes):
            if sizes.total() <= room:
                break
            over = span
            del sizes[span]
        if over is not None:
            await self._destroy((over + 1) * SPAN)

    async def _destroy(self, until: float) -> None:
        async for batch in self._batches():
            if over := [each.key for each in batch if each.next_attempt <= until]:
                await self.operations.store.update(over, lambda _: None)

    async def _batches(self) -> AsyncGenerator[list[Delivery], None]:
        async for batch in self.operations.matching(QueueFilter(state=DeliveryState.DROPPED)):
            yield [each for each, _ in batch]

    async def run(self) -> None:
        clock = self.operations.clock
        while True:
            began = clock.monotonic()
            try:
                await self.sweep()
            except StoreError as error:
                self.operations.events.error("queue.bin", error)
            await asyncio.sleep(max(PAUSE, 10 * (clock.monotonic() - began)))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(INTERVAL):
                    await self.operations.binned.wait()
            self.operations.binned.clear()
