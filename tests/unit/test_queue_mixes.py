"""A scheduler in virtual time among hosts that die, look-ups that fail and hang, operators of whom two may be
at it at once, reloads, a store that refuses, and a wall clock that is set forward and back.

When all that is over everything leaves, each delivery once, and nothing is left behind in memory.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from random import Random

import pytest

from tests.bench.simulate.timeline import START, VirtualLoop
from tests.support.queueing import DEFERRED, DELIVERED, LOCAL, NO_HOST, Relay, deliveries_of, route_to
from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.config.units import parse_rate
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.outcome import Outcome
from zonerelay.model.queue_name import Priority, queue_of
from zonerelay.queue.operator.filters import QueueFilter
from zonerelay.queue.operator.journal import Journal
from zonerelay.queue.operator.operations import Operations
from zonerelay.queue.zone.plan import ZonePlan
from zonerelay.routing.destinations.route import Batch, Route, Unroutable
from zonerelay.store.contract import StoreError

DOMAINS = [f"d{n}.example" for n in range(30)]
HOSTS = [f"mx{n}.example" for n in range(12)]
PRIORITIES = [Priority.NORMAL, Priority.NORMAL, Priority.HIGH, Priority.BULK]
STEPS = 50
WINDOW = 64
PAUSES = [0.0, 0.0, 0.001, 0.01, 0.1, 1.0, 10.0, 40.0]


class SteppedClock:
    """The loop's, and a wall clock that somebody sets."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.ahead = 0.0

    def now(self) -> float:
        return START + self._loop.now + self.ahead

    def monotonic(self) -> float:
        return self._loop.now

    boottime = monotonic


class Mix:
    """One run. The relay's router and courier are this world's."""

    def __init__(self, loop: VirtualLoop, seed: int) -> None:
        self.random = Random(seed)
        self.clock = SteppedClock(loop)
        self.retry = RetrySettings(jitter=0.0, suspend_min=5.0, suspend_max=60.0)
        busy = (lambda: self.random.choice([0.1, 0.9])) if seed % 2 else None
        self.relay = Relay(zones=[self._zone()], retry=self.retry, clock=self.clock, window=WINDOW, busy=busy)
        self.relay.router.route = self._route  # type: ignore[method-assign]  # of this world
        self.relay.courier.deliver = self._deliver  # type: ignore[method-assign]  # of this world
        self._update = self.relay.store.update
        self.relay.store.update = self._slow_update  # type: ignore[method-assign]  # it takes time
        self.operations = Operations(
            store=self.relay.store,
            scheduler=self.relay.scheduler,
            settler=self.relay.settler,
            events=self.relay.events,
            clock=self.clock,
            journal=Journal(Path("no-act"), self.clock),
        )
        self.host = {domain: self.random.choice(HOSTS) for domain in DOMAINS}
        self.dead: set[str] = set()
        self.lame: set[str] = set()
        """Domains whose look-ups fail or hang."""
        self.is_over = False
        self.accepted: set[DeliveryKey] = set()
        self.sent: Counter[DeliveryKey] = Counter()
        self.in_flight: set[DeliveryKey] = set()
        self.verbs: list[asyncio.Task[None]] = []

    def _zone(self) -> ZoneSettings:
        choice = self.random.choice
        return ZoneSettings(
            max_connections=choice([1, 3, 8, 40]),
            max_connections_per_destination=choice([1, 2, 5]),
            max_rate=choice([None, None, parse_rate("20/1s")]),
            max_rate_per_destination=choice([None, None, parse_rate("2/1s")]),
        )

    async def _route(self, zone: ZoneSettings, domain: str) -> Route | Unroutable:
        if domain in self.lame:
            await asyncio.sleep(self.random.random() * 20)
            return Unroutable(zone.name, domain, LOCAL, self.clock.now())
        await asyncio.sleep(self.random.choice([0.0, 0.02]))
        expires = self.clock.now() + self.random.choice([0.0, 60.0, 3600.0])
        return route_to(zone.name, self.host.get(domain, HOSTS[0]), expires=expires)

    async def _deliver(self, batch: Batch) -> Sequence[Outcome]:
        keys = {delivery.key for delivery in batch.deliveries}
        assert not keys & self.in_flight, "attempted twice at once"
        self.in_flight |= keys
        if batch.take_turn is not None:
            assert await batch.take_turn()
        await asyncio.sleep(self.random.random())
        self.in_flight -= keys
        if batch.route.name in self.dead:
            return [NO_HOST] * len(batch.deliveries)
        if not self.is_over and self.random.random() < 0.15:
            return [DEFERRED] * len(batch.deliveries)
        self.sent.update(keys)
        return [DELIVERED] * len(batch.deliveries)

    async def _slow_update(
        self, keys: Collection[DeliveryKey], change: Callable[[Delivery], Delivery | None]
    ) -> dict[DeliveryKey, Delivery]:
        await asyncio.sleep(self.random.choice([0.0, 0.01, 0.3]))
        return await self._update(keys, change)

    # ---- events

    def accept(self) -> None:
        queue = queue_of("default", self.random.choice(PRIORITIES))
        some = self.random.sample(DOMAINS, self.random.choice([1, 2, len(DOMAINS)]))
        for _ in range(self.random.choice([1, 5, 40])):
            domain = self.random.choice(some)
            recipients = [f"u{n}@{domain}" for n in range(self.random.choice([1, 1, 1, 6]))]
            message = self.relay.accept(*recipients, sender="", zone=queue.text)  # no reports
            self.accepted |= {each.key for each in deliveries_of(message, zone=queue.text)}

    def change_hosts(self) -> None:
        self.dead ^= {self.random.choice(HOSTS)}
        self.lame ^= {self.random.choice(DOMAINS)}
        self.host[self.random.choice(DOMAINS)] = self.random.choice(HOSTS)

    def set_clock(self) -> None:
        self.clock.ahead += self.random.choice([-5000.0, -30.0, -1.0, 1.0, 30.0, 5000.0])

    def reload(self) -> None:
        self.relay.scheduler.configure([self._zone()], self.retry, other_routes=self.random.random() < 0.5)

    def resume(self) -> None:
        self.relay.scheduler.resume("default")

    def operate(self) -> None:
        verb = self.random.choice(["retry", "hold", "release"])
        pattern = self.random.choice([f"*@{self.random.choice(DOMAINS)}", "u0@*", "*"])
        for _ in range(self.random.choice([1, 2])):
            self.verbs.append(asyncio.create_task(self._operate(verb, QueueFilter(recipient=pattern))))

    async def _operate(self, verb: str, wanted: QueueFilter) -> None:
        try:
            await getattr(self.operations, verb)(wanted)
        except StoreError:
            assert self.relay.store.refuses

    def refuse(self) -> None:
        self.relay.store.refuses = not self.relay.store.refuses

    # ---- the run

    async def run(self) -> None:
        await self.relay.scheduler.start()
        events = [self.accept, self.accept, self.change_hosts, self.change_hosts, self.set_clock]
        events += [self.reload, self.resume, self.operate, self.operate, self.refuse]
        for _ in range(STEPS):
            self.random.choice(events)()
            await asyncio.sleep(self.random.choice(PAUSES))
        await asyncio.gather(*self.verbs)
        self.dead.clear()
        self.lame.clear()
        self.is_over, self.relay.store.refuses = True, False
        await asyncio.sleep(60.0)
        await self.operations.release(QueueFilter())
        for _ in range(1000):
            if not await self.relay.stored():
                break
            await asyncio.sleep(1000.0)
        assert self.sent == Counter(self.accepted)
        await asyncio.sleep(100.0)
        (zone,) = self.relay.scheduler._all_zones()
        assert _left_in(zone.plan) == {}
        await self.relay.close()


def _left_in(queue: ZonePlan) -> dict[str, object]:
    """What a queue that has nothing to do holds all the same."""
    ring, slow_start = queue.round_robin, queue.round_robin._slow_start
    held: dict[str, object] = {
        "waiting": queue.waiting,
        "active": queue.active,
        "works": queue._works,
        "requests": queue.has_requests,
        "withdrawn": queue._withdrawn,
        "given back": queue._given_back,
        "aside": ring._aside,
        "blocked": [site.key for site in ring._sites.values() if site.blocked],
        "slow start": bool(slow_start) or any(slow_start._active.values()),
    }
    for priority, shares in queue.window.windows.items():
        held[f"new {priority}"] = shares.new_waiting
        held[f"shares {priority}"] = [*shares._hungry, *shares._hungry_new, *shares._resting, *shares._skip]
    return {name: value for name, value in held.items() if value}


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 8 else pytest.mark.proof) for seed in range(24)]
)
def test_everything_leaves_once_whatever_has_happened(seed: int) -> None:
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(Mix(loop, seed).run())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
