"""A queue without a network: real store, settler and scheduler, scripted couriers and routers."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Unpack

from msgspec import structs

from tests.support.event_log import EventLog, events_into
from tests.support.memory_store import MemoryStore
from tests.support.waiting import until
from zonerelay.config.settings import BounceSettings, RetrySettings, ZoneSettings
from zonerelay.model import envelope as envelopes
from zonerelay.model.clock import Clock, ManualClock, SystemClock
from zonerelay.model.delivery import Delivery, DeliveryKey, QueueName, queue_of
from zonerelay.model.envelope import Envelope, Mailbox, Message, MessageIdSource, Notify, Priority, Recipient
from zonerelay.model.reply import Outcome, Reply, Scope, Verdict
from zonerelay.queue.operator.journal import Journal
from zonerelay.queue.operator.operations import Operations
from zonerelay.queue.scheduler import Scheduler
from zonerelay.queue.settle import retry as retries
from zonerelay.queue.settle.bounces import DsnMaker
from zonerelay.queue.settle.settler import Settler, SettlerCallbacks
from zonerelay.queue.zone.plan import ZonePlan
from zonerelay.queue.zone.window import ClaimRequest
from zonerelay.queue.zone.zone import ZoneParts
from zonerelay.routing.destinations.mx import ExaminedRoute
from zonerelay.routing.destinations.route import Batch, MxHost, Route, Unroutable
from zonerelay.routing.zones.zones import ZoneChoice, ZoneOf
from zonerelay.store.contract import Change, ClaimFilter, StoreError

HEADER = b"From: a@example.org\r\nSubject: hello\r\n"
TEXT = HEADER + b"\r\nThe body.\r\n"

DELIVERED = Outcome(Verdict.DELIVERED, Reply(250, "0.0", "ok"), host="mx.example.com", peer="192.0.2.1:25")
DEFERRED = Outcome(Verdict.DEFERRED, Reply(451, "2.0", "later"), host="mx.example.com", peer="192.0.2.1:25")
BOUNCED = Outcome(Verdict.BOUNCED, Reply(550, "1.1", "no such user"), host="mx.example.com")
NO_HOST = Outcome(Verdict.DEFERRED, Reply(451, "4.1", "connection refused"), Scope.HOST, local=True)
LOCAL = Outcome(Verdict.DEFERRED, Reply(451, "3.0", "trouble"), Scope.LOCAL, local=True, counts=False)
IN_DOUBT = structs.replace(DEFERRED, in_doubt=True)


def make_message(
    ids: MessageIdSource, recipients: Sequence[str], *, created: float, sender: str = "a@example.org"
) -> Message:
    envelope = Envelope(
        id=ids.next(),
        sender=Mailbox(sender),
        recipients=tuple(Recipient(address=Mailbox(each)) for each in recipients),
        created=created,
    )
    return Message(envelope=envelope, size=len(TEXT), chunks=1, headers=(("Subject", "hello"),))


def deliveries_of(
    message: Message, *, zone: str = "default", notify: Notify = Notify.UNSET
) -> list[Delivery]:
    return [
        Delivery(
            queue=queue_of(zone),
            message_id=message.id,
            recipient=each.address,
            created=message.envelope.created,
            notify=notify,
        )
        for each in message.envelope.recipients
    ]


def route_to(zone: str, *hosts: str, expires: float = 1e12) -> Route:
    mx = tuple(MxHost(name=host, port=25) for host in hosts)
    return Route(zone=zone, name=hosts[0], hosts=mx, expires=expires)


class FlakyStore(MemoryStore):
    """A memory store that refuses or is silent when told to, and counts what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.refuses = False
        self.repaired: asyncio.Event | None = None
        self.silence: asyncio.Event | None = None
        self.sick: set[DeliveryKey] = set()
        self.settled: list[list[Change]] = []
        self.settled_lazily: list[bool] = []
        self.asked: Counter[str] = Counter()

    def _refuse(self, what: str) -> None:
        self.asked[what] += 1
        if self.refuses:
            raise StoreError("refused by the test")

    def add(self, message: Message, chunks: list[bytes], deliveries: Iterable[Delivery]) -> None:
        on_stored = self.on_stored
        if self.refuses:  # a store that fails gives nothing away
            self.on_stored = lambda some, is_next: on_stored(some, False)
        super().add(message, chunks, deliveries)
        self.on_stored = on_stored

    async def claim(
        self, queue: QueueName, limit: int, *, now: float, **only: Unpack[ClaimFilter]
    ) -> list[Delivery]:
        self._refuse("claim" if only.get("since") is None else "claim_new")
        await asyncio.sleep(0)
        return await super().claim(queue, limit, now=now, **only)

    async def next_due(self, queue: QueueName) -> float | None:
        self._refuse("next_due")
        return await super().next_due(queue)

    async def settle(self, changes: Sequence[Change], *, lazy: bool = False) -> None:
        self._refuse("settle")
        await asyncio.sleep(0)
        if self.silence is not None:
            await self.silence.wait()
        if any(getattr(change, "delivery", None) and change.delivery.key in self.sick for change in changes):  # type: ignore[union-attr]  # a Submit has none
            raise StoreError("a sick record")
        await super().settle(changes, lazy=lazy)
        self.settled.append(list(changes))
        self.settled_lazily.append(lazy)

    async def usable(self) -> bool:
        if self.repaired is None:
            return False
        await self.repaired.wait()
        return True

    async def probe(self) -> None:
        self._refuse("probe")


Script = Callable[[Batch], Sequence[Outcome]]


def prove(queue: ZonePlan) -> None:
    """All destinations that are known by now have answered before: none is on probation."""
    for destination in queue._destinations.values():
        destination.suspension.succeeded(destination.suspension.epoch)


def wants_claim(queue: ZonePlan, more: Collection[Priority] = (), new: Collection[Priority] = ()) -> bool:
    """Whether mail is to be claimed if the store may hold due and new mail of these priorities."""
    for priority in {*more, *new, *queue.window.windows}:
        window = queue.window.of(priority)
        window.has_more, window.has_new = priority in more, priority in new
    return queue.window.wants()


def plan_claim(
    queue: ZonePlan, more: Collection[Priority] = (), new: Collection[Priority] = ()
) -> ClaimRequest | None:
    """The next claim if the store may hold due and new mail of these priorities."""
    wants_claim(queue, more, new)
    return queue.plan_claim(0.0)


@dataclass
class ScriptedCourier:
    """Answers from a function of the batch, after `seconds`; watches what runs at the same time."""

    script: Script = lambda batch: [DELIVERED] * len(batch.deliveries)
    seconds: float = 0.0
    batches: list[Batch] = field(default_factory=list)
    running: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    in_flight: set[DeliveryKey] = field(default_factory=set)
    gate: asyncio.Event | None = None

    async def deliver(self, batch: Batch) -> Sequence[Outcome]:
        keys = {delivery.key for delivery in batch.deliveries}
        assert not keys & self.in_flight, "attempted twice at once"
        self.batches.append(batch)
        self.in_flight |= keys
        names = ("zone " + batch.zone.name, str(batch.route.destination))
        for name in names:
            self.running[name] += 1
            self.most[name] = max(self.most[name], self.running[name])
        try:
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(self.seconds)
            return self.script(batch)
        finally:
            self.in_flight -= keys
            for name in names:
                self.running[name] -= 1

    def recipients(self) -> list[str]:
        return [delivery.recipient for batch in self.batches for delivery in batch.deliveries]


class ScriptedRouter:
    """`mx.{domain}` unless told otherwise."""

    def __init__(self) -> None:
        self.answers: dict[str, Route | Unroutable | Exception] = {}
        self.asked: Counter[str] = Counter()
        self.gates: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.gated: set[str] = set()

    async def route(self, zone: ZoneSettings, domain: str) -> Route | Unroutable:
        self.asked[domain] += 1
        if domain in self.gated:
            await self.gates[domain].wait()
        await asyncio.sleep(0)
        answer = self.answers.get(domain) or route_to(zone.name, f"mx.{domain or zone.next_hop}")
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def examine(self, zone: ZoneSettings, domain: str) -> ExaminedRoute:
        return ExaminedRoute(await self.route(zone, domain))


class Relay:
    """Store, settler and scheduler wired as the worker wires them."""

    def __init__(
        self,
        *,
        zones: Sequence[ZoneSettings] = (ZoneSettings(next_hop="hop"),),
        retry: RetrySettings | None = None,
        bounce: BounceSettings | None = None,
        clock: Clock | None = None,
        store: FlakyStore | None = None,
        window: int = 4000,
        busy: Callable[[], float] | None = None,
    ) -> None:
        self.clock = clock or SystemClock()
        self.sink = EventLog()
        self.events = events_into(self.sink, self.clock)
        self.store = store or FlakyStore()
        self.ids = MessageIdSource(self.clock)
        self.courier = ScriptedCourier()
        self.router = ScriptedRouter()
        self.zone_of: dict[str, str] = {}
        self._default_zone = zones[0].name
        random = Random(1)
        retry = retry or RetrySettings(jitter=0.0)
        self.retry = retry
        bounce = bounce or BounceSettings()
        self.settler = Settler(
            store=self.store,
            dsn_maker=DsnMaker(
                store=self.store,
                ids=self.ids,
                choose_zone=self._choose_zone,
                hostname="relay.example.org",
                events=self.events,
                clock=self.clock,
            ),
            retry=retries.build(retry, bounce, zones, random=random, events=self.events),
            zones=zones,
            bounce=bounce,
            events=self.events,
            clock=self.clock,
            callbacks=SettlerCallbacks(postponed=lambda queue, when: self.scheduler.postponed(queue, when)),
        )
        self.scheduler = Scheduler(
            zones,
            ZoneParts(
                store=self.store,
                route=lambda zone, domain: self.router.route(zone, domain),
                deliver=lambda batch: self.courier.deliver(batch),
                settler=self.settler,
                retry=retry,
                events=self.events,
                clock=self.clock,
                random=random,
            ),
            window=window,
            busy=busy,
        )
        self.store.on_stored = self.scheduler.stored

    def _choose_zone(self, envelope: Envelope, /, *, headers: object, size: int, named: str = "") -> ZoneOf:
        return lambda recipient: ZoneChoice(self.zone_of.get(recipient, self._default_zone), "")

    def operations(self, directory: Path = Path("no-home")) -> Operations:
        """What operators do to this queue, with a journal in `directory`."""
        return Operations(
            store=self.store,
            scheduler=self.scheduler,
            settler=self.settler,
            events=self.events,
            clock=self.clock,
            journal=Journal(directory / "acts", self.clock),
        )

    def accept(
        self,
        *recipients: str,
        sender: str = "a@example.org",
        age: float = 0.0,
        zone: str = "default",
        notify: Notify = Notify.UNSET,
        text: bytes = TEXT,
        tell: bool = True,
        release: float = 0.0,
    ) -> Message:
        """`release`: the Unix time until which the sender holds it back, as FUTURERELEASE does."""
        message = make_message(self.ids, recipients, created=self.clock.now() - age, sender=sender)
        deliveries = deliveries_of(message, zone=zone, notify=notify)
        if release:
            deliveries = [structs.replace(each, created=release, next_attempt=release) for each in deliveries]
        self.store.on_stored = self.scheduler.stored if tell else lambda *_: 0
        self.store.add(message, [text], deliveries)
        self.store.on_stored = self.scheduler.stored
        return message

    async def stored(self) -> list[Delivery]:
        return [delivery async for delivery in self.store.scan()]

    async def until(self, true: Callable[[], bool], *, timeout: float = 5.0) -> None:
        await until(true, seconds=timeout, every=0.001)

    async def until_put_off(self, name: str, *, timeout: float = 5.0) -> None:
        """Wait until each waiting delivery to a recipient with this name has a reason."""
        async with asyncio.timeout(timeout):
            while any(each.last is None for each in await self.stored() if each.recipient.startswith(name)):
                await asyncio.sleep(0.001)

    async def until_empty(self, *, timeout: float = 5.0) -> None:
        async with asyncio.timeout(timeout):
            while await self.stored():
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        await self.scheduler.stop(0.5)
        await self.settler.close()


def delivery(
    recipient: str = "b@example.com",
    *,
    message_id: str = "00000000000000aa",
    clock: ManualClock | None = None,
    **more: object,
) -> Delivery:
    """One delivery for tests of pure parts."""
    created = (clock or ManualClock()).now()
    values = {"queue": queue_of("default"), "created": created, **more}
    return Delivery(message_id=envelopes.MessageId(message_id), recipient=Mailbox(recipient), **values)  # type: ignore[arg-type]  # fields by name
