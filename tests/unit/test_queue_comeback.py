"""A destination that comes back gets its queue at once, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine, Sequence
from itertools import chain
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from tests.bench.simulate.store import IndexedStore
from tests.bench.simulate.timeline import VirtualClock, VirtualLoop
from tests.support.queueing import BOUNCED, DEFERRED, DELIVERED, LOCAL, NO_HOST, FlakyStore, Relay, delivery
from tests.unit.test_rates import fullest
from zonerelay.config.settings import BounceSettings, RetrySettings, ZoneSettings
from zonerelay.config.units import Rate, parse_rate
from zonerelay.model.delivery import Delivery, DeliveryKey, queue_of
from zonerelay.model.envelope import Priority
from zonerelay.model.reply import Outcome
from zonerelay.queue.destination.destinations import PUT_OFF_MOST, Destination, Rates, Work
from zonerelay.queue.zone.plan import ZonePlan
from zonerelay.routing.destinations.route import Batch, DestinationLimits, MxHost, Route, SiteKey

MANY = 2_000
PER_SECOND = 2000
"""What ten connections take when a message needs five milliseconds."""
LONG_RETRY = RetrySettings(jitter=0.0, suspend_min=60.0, suspend_max=600.0, schedule=(3600.0,))
HOUR = 3600.0
NEXT_HOP = ZoneSettings(next_hop="hop", max_connections=10, max_connections_per_destination=10)
MX = ZoneSettings(max_connections=20, max_connections_per_destination=10)


class Receiver:
    """The hosts of `away.example` (or the one next hop) talk from `back` on, others always."""

    def __init__(self, relay: Relay, back: float) -> None:
        self._relay = relay
        self._loop = asyncio.get_running_loop()
        self.back = self._loop.time() + back
        self.taken: Counter[int] = Counter()
        """Per second from the first on that they took after they came back."""
        self.waits: list[float] = []
        """Of mail for others."""
        self.first = 0.0
        relay.courier.seconds = 10 / PER_SECOND
        relay.courier.script = self._answer

    def _answer(self, batch: Batch) -> Sequence[Outcome]:
        now = self._loop.time()
        count = len(batch.deliveries)
        if batch.deliveries[0].domain == "other.example":
            self.waits += [self._relay.clock.now() - each.created for each in batch.deliveries]
        elif now < self.back:
            return [NO_HOST] * count
        else:
            self.first = self.first or now
            self.taken[int(now - self.first)] += count
        return [DELIVERED] * count


def run(work: Coroutine[Any, Any, None]) -> None:  # Any: what a coroutine sends is its own business
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work)


def make_relay(zone: ZoneSettings, *, warn_after: float = 4 * HOUR, store: FlakyStore | None = None) -> Relay:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    # It has the verbs of the other one, and does not look through the whole queue at each.
    store = store or cast("FlakyStore", IndexedStore())
    bounce = BounceSettings(delay_warning=warn_after)
    return Relay(zones=(zone,), retry=LONG_RETRY, bounce=bounce, clock=VirtualClock(loop), store=store)


async def inject(relay: Relay, count: int) -> None:
    for number in range(count):
        relay.accept(f"u{number}@away.example", sender="")
        if number % 100 == 0:
            await asyncio.sleep(0.05)


async def attempted(relay: Relay) -> int:
    """Deliveries that have had an attempt of their own, and wait as the schedule says."""
    return sum(each.attempts > 0 for each in await relay.stored())


@pytest.mark.parametrize(
    ("zone", "away", "warn_after"),
    [
        pytest.param(NEXT_HOP, 0.5 * HOUR, 4 * HOUR, id="next hop, long away", marks=pytest.mark.proof),
        pytest.param(NEXT_HOP, 0.2 * HOUR, 60.0, id="next hop, old mail", marks=pytest.mark.proof),
        pytest.param(MX, 100.0, 4 * HOUR, id="mx", marks=pytest.mark.proof),
        pytest.param(MX, 0.5 * HOUR, 4 * HOUR, id="mx, long away"),
    ],
)
def test_all_that_waits_leaves_as_fast_as_new_mail_from_the_first_second_on(
    zone: ZoneSettings, away: float, warn_after: float
) -> None:
    async def scene() -> None:
        relay = make_relay(zone, warn_after=warn_after)
        receiver = Receiver(relay, away)
        await relay.scheduler.start()
        await inject(relay, MANY)
        while not receiver.first:
            if not zone.next_hop:
                relay.accept("u@other.example")
            await asyncio.sleep(away / 100)
        left = MANY - await attempted(relay)
        # Seconds are counted from the probe, which may have been made a while ago.
        await asyncio.sleep(1.25 * MANY / PER_SECOND)
        await relay.close()
        assert receiver.taken[0] >= 0.8 * PER_SECOND, receiver.taken
        assert sum(receiver.taken[second] for second in range(4)) >= left, receiver.taken
        assert max(receiver.waits, default=0) < 1

    run(scene())


@pytest.mark.proof
def test_a_probe_costs_little_of_what_waits() -> None:
    """Each that is put off costs a write and a line in the log, at every probe."""

    async def scene() -> None:
        relay = make_relay(NEXT_HOP)
        Receiver(relay, 24 * HOUR)
        await relay.scheduler.start()
        await inject(relay, MANY)
        await asyncio.sleep(50.0)
        before = len(relay.sink.named("deferred"))
        await asyncio.sleep(HOUR)
        probes = len(relay.sink.named("suspended"))
        assert 5 <= probes <= 12
        assert len(relay.sink.named("deferred")) - before <= 1.1 * PUT_OFF_MOST * probes
        await relay.close()

    run(scene())


def test_after_a_crash_all_that_was_put_off_leaves_at_once() -> None:
    async def scene() -> None:
        relay = make_relay(NEXT_HOP)
        Receiver(relay, 24 * HOUR)
        await relay.scheduler.start()
        await inject(relay, 1000)
        await asyncio.sleep(20.0)
        await relay.close()
        relay.store.forget_claims()
        waiting = 1000 - await attempted(relay)
        assert waiting > 980
        again = make_relay(NEXT_HOP, store=relay.store)
        receiver = Receiver(again, 0.0)
        await again.scheduler.start()
        await asyncio.sleep(1.0)
        assert receiver.taken.total() == waiting
        await again.close()

    run(scene())


# One zone's plan and its rates in any order of events, with a store beside them that knows where all is.
# What a runner does is done here by hand, without a loop: claims, look-ups, batches with their turns,
# parking, operators' hands, reloads while batches are under way. Wherever the machine stops, all mail has
# to leave


NOW = 1_700_000_000.0
PRIORITIES = [Priority.NORMAL, Priority.NORMAL, Priority.HIGH, Priority.BULK]
RETRY = RetrySettings(suspend_min=30.0, suspend_max=120.0)
WINDOW = 16
DOMAINS = [f"d{n}.example" for n in range(6)]
PLAIN = DestinationLimits(max_connections=2, max_recipients_per_transaction=2, max_messages_per_connection=9)
LIMITS = [
    None,
    PLAIN,
    structs.replace(PLAIN, max_connections=1),
    structs.replace(PLAIN, max_connections=5, max_rate=parse_rate("3/1s")),
    structs.replace(PLAIN, max_rate=parse_rate("1/5s")),
    structs.replace(PLAIN, max_connections=3, max_rate=parse_rate("2/1h")),
]
ZONE_RATES = [None, parse_rate("5/1s"), parse_rate("1/2s"), parse_rate("1/1h")]
OUTCOMES: list[Outcome | None] = [DELIVERED, DEFERRED, BOUNCED, NO_HOST, LOCAL, None]


class Runner:
    """A queue and what its driver knows. Retired runners only end their works."""

    def __init__(self, zone: ZoneSettings, rates: Rates) -> None:
        self.zone = zone
        self.queue = ZonePlan(zone, RETRY, rates, window=WINDOW)
        self.looking_up: list[str] = []
        self.works: list[Work] = []
        self.resting: dict[Destination, float] = {}
        self.look()

    def look(self) -> None:
        for priority in Priority:
            self.queue.window.of(priority).look()


class Plans(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0
        self.rates = Rates()
        self.rates.changed = self._changed
        self.ready: dict[DeliveryKey, Delivery] = {}
        self.deferred: dict[DeliveryKey, tuple[float, Delivery]] = {}
        self.claimed: dict[DeliveryKey, Delivery] = {}
        self.withdrawn: set[DeliveryKey] = set()
        self.accepted = 0
        self.ended = 0
        self.turns: list[float] = []  # since the last reload
        self.site: dict[str, str] = {}
        self.limits: dict[str, DestinationLimits | None] = {}
        self.retired: list[Runner] = []
        self.runner = Runner(ZoneSettings(max_connections=3), self.rates)

    @property
    def now(self) -> float:
        return NOW + self.time

    # ---- events

    @initialize(
        sites=st.lists(st.sampled_from(["one", "two"]), min_size=6, max_size=6),
        limits=st.lists(st.sampled_from(LIMITS), min_size=6, max_size=6),
    )
    def begin(self, sites: list[str], limits: list[DestinationLimits | None]) -> None:
        self.site = dict(zip(DOMAINS, sites, strict=True))
        self.limits = dict(zip(DOMAINS, limits, strict=True))

    @rule(
        domain=st.sampled_from(DOMAINS),
        count=st.integers(1, 12),
        recipients=st.integers(1, 3),
        priority=st.sampled_from(PRIORITIES),
    )
    def accept(self, domain: str, count: int, recipients: int, priority: Priority) -> None:
        for _ in range(count):
            self.accepted += 1
            for n in range(recipients):
                one = delivery(
                    f"u{n}@{domain}", message_id=f"{self.accepted:016x}", queue=queue_of("default", priority)
                )
                self.ready[one.key] = one
        self.runner.look()
        self._pump()

    @rule(choice=st.integers(0, 99), found=st.integers(0, 9))
    def end_look_up(self, choice: int, found: int) -> None:
        runner = self.runner
        if runner.looking_up:
            domain = runner.looking_up.pop(choice % len(runner.looking_up))
            if found:
                runner.queue.found(domain, self._route(domain), self.now)
            else:
                self._defer(runner.queue.unroutable(domain), 5.0)
            self._pump()

    @rule(
        domain=st.sampled_from(DOMAINS),
        site=st.sampled_from(["one", "two", "three"]),
        limits=st.sampled_from(LIMITS),
    )
    def other_route(self, domain: str, site: str, limits: DestinationLimits | None) -> None:
        """For the next look-up."""
        self.site[domain], self.limits[domain] = site, limits

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.0, 10.0, 31.0, 130.0]))
    def wait(self, seconds: float) -> None:
        self._until(self.time + seconds)

    @rule(choice=st.integers(0, 99))
    def connected(self, choice: int) -> None:
        works = self._works()
        if works:
            _, work = works[choice % len(works)]
            self._take_turn(work)

    @rule(choice=st.integers(0, 99), outcome=st.sampled_from(OUTCOMES))
    def end(self, choice: int, outcome: Outcome | None) -> None:
        works = self._works()
        if works:
            self._end(*works[choice % len(works)], outcome)
            self._pump()

    @rule(choices=st.lists(st.integers(0, 99), min_size=1, max_size=5))
    def operator_takes(self, choices: list[int]) -> None:
        active = {key for _, work in self._works() for key in (each.key for each in work.deliveries)}
        free = [key for key in (*self.ready, *self.deferred, *self.claimed) if key not in active]
        if free and not self.withdrawn:
            keys = {free[choice % len(free)] for choice in choices}
            self.withdrawn = keys
            self.runner.queue.withdraw(keys)
            self._pump()

    @precondition(lambda self: self.withdrawn)
    @rule(dropped=st.booleans())
    def operator_gives_back(self, *, dropped: bool) -> None:
        keys, self.withdrawn = self.withdrawn, set()
        for key in keys:
            held = self.claimed.pop(key, None)
            if held is not None:
                self.ready[key] = held
            if dropped:
                self.ready.pop(key, None)
                self.deferred.pop(key, None)
                self.ended += 1
        self.runner.queue.give_back(keys)
        self.runner.look()
        self._pump()

    @rule()
    def resume(self) -> None:
        self.runner.queue.resume(None)
        self.runner.look()
        self._pump()

    @precondition(lambda self: not self.withdrawn)
    @rule(
        connections=st.integers(1, 6),
        rate=st.sampled_from(ZONE_RATES),
        per=st.sampled_from(ZONE_RATES),
        hop=st.booleans(),
    )
    def reload(self, connections: int, rate: Rate | None, per: Rate | None, *, hop: bool) -> None:
        old = self.runner
        parked = [each for _, some in old.queue.take_parked() for each in some]
        for each in (*chain.from_iterable(old.queue.drain()), *parked, *old.queue.take_returned()):
            self._release(each)
        self.retired.append(old)
        self.turns.clear()
        zone = ZoneSettings(
            max_connections=connections,
            max_rate=rate,
            max_rate_per_destination=per,
            max_connections_per_destination=2,
            next_hop="hop.example" if hop else "",
        )
        self.runner = Runner(zone, self.rates)
        self._pump()

    # ---- what must be

    @invariant()
    def everything_is_in_one_place(self) -> None:
        places = Counter((*self.ready, *self.deferred, *self.claimed))
        assert all(count == 1 for count in places.values())
        active = [each.key for _, work in self._works() for each in work.deliveries]
        assert len(active) == len(set(active))
        waiting = sum(destination.waiting for destination in self.runner.queue.shown_destinations(self.now))
        assert waiting <= self.runner.queue.waiting <= WINDOW * len(Priority)

    @invariant()
    def no_limit_is_exceeded(self) -> None:
        runner = self.runner
        assert len(runner.works) == runner.queue.active <= runner.zone.max_connections
        for works in _by_site(runner.works).values():
            limits = [work.route.limits_in(runner.zone) for work in works]
            assert len(works) <= max(5, *(each.max_connections for each in limits))
        rate = runner.zone.max_rate
        if rate is not None and self.turns:
            assert fullest(self.turns, rate.seconds) <= rate.count

    def teardown(self) -> None:
        """All that is left leaves, in a time that the rates allow."""
        if self.withdrawn:
            self.operator_gives_back(dropped=False)
        for _ in range(5000):
            while self.runner.looking_up:
                self.end_look_up(0, 1)
            for runner, work in self._works():
                if self._take_turn(work):
                    self._end(runner, work, DELIVERED)
            self._pump()
            if not (self.ready or self.deferred or self.claimed):
                break
            wanted = [work.ticket.due for _, work in self._works() if work.ticket is not None]
            wanted += [due for due, _ in self.deferred.values()]
            wanted += self.runner.resting.values()
            if self.runner.queue.round_robin.next_turn is not None:
                wanted.append(self.runner.queue.round_robin.next_turn)
            if self.runner.looking_up or any(work.ticket is None for _, work in self._works()):
                continue
            assert wanted, "it waits for nothing at all"
            self._until(max(self.time, min(wanted)))
        left = [*self.ready, *self.deferred, *self.claimed]
        assert left == []
        assert _left_in(self.runner.queue) == {}
        for pacer in [self.rates.zone, *self._pacers()]:
            assert pacer is None or pacer.pending == 0  # type: ignore[attr-defined]  # a Pacer

    # ---- the driver

    def _pump(self) -> None:
        runner, queue = self.runner, self.runner.queue
        for _ in range(1000):
            before = queue.waiting, len(runner.works), len(self.ready)
            for due in [key for key, (when, _) in self.deferred.items() if when <= self.now]:
                self.ready[due] = self.deferred.pop(due)[1]
                runner.look()
            self._claim()
            while (work := queue.next_work(self.now, self.time)) is not None:
                runner.works.append(work)
            runner.looking_up += queue.look_ups.take()
            for destination, deliveries in queue.take_parked():
                self._defer(deliveries, max(1.0, destination.suspension.until - self.now))
                runner.resting[destination] = self.time + 1.0
            for each in queue.take_returned():
                self._release(each)
                runner.look()
            after = queue.waiting, len(runner.works), len(self.ready)
            if before == after and not any(each.has_more for each in queue.window.windows.values()):
                return
            if not (queue.window.wants() or queue.has_requests):
                return
        raise AssertionError("it never comes to rest")

    def _claim(self) -> None:
        runner = self.runner
        while (plan := runner.queue.plan_claim(self.now)) is not None:
            due = [
                self.ready[key]
                for key in sorted(self.ready, key=lambda key: key.message_id)
                if key.queue.priority is plan.priority
            ]
            chosen = [
                each
                for each in due
                if each.domain not in plan.skip
                and plan.domain in (None, each.domain)
                and (plan.since is None or (each.message_id >= plan.since and each.next_attempt <= 0))
            ][: plan.limit]
            for each in chosen:
                self.claimed[each.key] = self.ready.pop(each.key)
            runner.queue.add(chosen, self.now, plan.priority)
            runner.queue.claimed(plan, len(chosen))

    def _until(self, when: float) -> None:
        """The alarm rings where the plan asked for it."""
        while (turn := self.runner.queue.round_robin.next_turn) is not None and self.time < turn <= when:
            self.time = turn
            self._pump()
            following = self.runner.queue.round_robin.next_turn
            assert following is None or following > turn, "it spins"
        self.time = max(self.time, when)
        for destination in [each for each, due in self.runner.resting.items() if due <= self.time]:
            del self.runner.resting[destination]
            self.runner.queue.rested(destination)
        self._pump()

    def _take_turn(self, work: Work) -> bool:
        if work.ticket is None:
            return True
        if work.ticket.due > self.time:
            return False
        work.ticket.take(self.time)
        self.turns.append(self.time)
        return True

    def _end(self, runner: Runner, work: Work, outcome: Outcome | None) -> None:
        runner.works.remove(work)
        outcomes = [] if outcome is None else [outcome] * len(work.deliveries)
        runner.queue.finished(work, outcomes, self.now)
        following = None if runner is not self.runner else runner.queue.following(work, self.now, self.time)
        if following is not None:
            runner.works.append(following)
        for each in work.deliveries:
            if outcome in (DELIVERED, BOUNCED):
                del self.claimed[each.key]
                self.ended += 1
            elif outcome is None:
                self._release(each)
            else:
                self._defer([each], 20.0)
        self.runner.look()

    def _defer(self, deliveries: list[Delivery], seconds: float) -> None:
        for each in deliveries:
            self.deferred[each.key] = (self.now + seconds, self.claimed.pop(each.key))

    def _release(self, each: Delivery) -> None:
        self.ready[each.key] = self.claimed.pop(each.key)

    def _changed(self, site: SiteKey, earlier: bool) -> None:
        self.runner.queue.round_robin.changed(site, self.now, earlier=earlier)

    def _route(self, domain: str) -> Route:
        limits = self.limits.get(domain)
        hosts = (MxHost(f"mx.{self.site.get(domain, 'hop')}", 25),)
        terms = "" if limits is None else f"destination[{LIMITS.index(limits)}]"
        return Route("default", domain, hosts, self.now + 40.0, limits=limits, terms=terms)

    def _works(self) -> list[tuple[Runner, Work]]:
        return [(runner, work) for runner in (*self.retired, self.runner) for work in runner.works]

    def _pacers(self) -> list[object]:
        sites = list(self.rates._sites.values())
        return [pacer for site in sites for pacer in site._pacers.values()]


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


def _by_site(works: list[Work]) -> dict[SiteKey, list[Work]]:
    sites: dict[SiteKey, list[Work]] = {}
    for work in works:
        sites.setdefault(work.route.site, []).append(work)
    return sites


TestPlans = Plans.TestCase
TestPlans.settings = settings(
    max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
