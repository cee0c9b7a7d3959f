"""The pure plan of one zone: turns, limits, shares, suspension, and that nothing is lost or stuck."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tests.support import queueing
from tests.support.queueing import DELIVERED, LOCAL, NO_HOST, Relay, delivery, plan_claim, route_to
from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message, MessageId, Priority
from zonerelay.model.reply import Outcome, Reply
from zonerelay.process.tasks import SLICE, in_slices
from zonerelay.queue.destination.destinations import PUT_OFF_RATE, Destination, Suspension, Transition, Work
from zonerelay.queue.settle.bounces import DsnMaker
from zonerelay.queue.settle.settler import AT_ONCE, UNREADABLE_DELAY
from zonerelay.queue.zone.plan import LOOKED_AT, MANY_PUT_OFF, ZonePlan
from zonerelay.queue.zone.window import ClaimRequest
from zonerelay.routing.destinations.route import MxHost, Route
from zonerelay.store.contract import OwnMessage

NOW = 1_700_000_000.0
RETRY = RetrySettings(suspend_min=30.0, suspend_max=600.0)


def number(n: int, recipient: str = "b@example.com") -> Delivery:
    return delivery(recipient, message_id=f"{n:016x}")


def make(window: int = 4000, **zone: object) -> ZonePlan:
    return ZonePlan(ZoneSettings(**zone), RETRY, window=window)  # type: ignore[arg-type]  # fields by name


def resolve(queue: ZonePlan, *hosts: str, now: float = NOW) -> None:
    while domains := queue.look_ups.take():
        for domain in domains:
            queue.found(domain, route_to("default", *(hosts or (f"mx.{domain}",))), now)


def start_all(queue: ZonePlan, now: float = NOW) -> list[Work]:
    works = []
    while (work := queue.next_work(now)) is not None:
        works.append(work)
    return works


# Routes


def test_an_old_route_is_looked_up_again() -> None:
    queue = make()
    queue.add([number(1), number(2)], NOW)
    assert queue.look_ups.take() == ["example.com"]
    queue.found("example.com", route_to("default", "old", expires=NOW + 60), NOW)
    first = queue.next_work(NOW + 59)
    assert first is not None
    queue.finished(first, [DELIVERED], NOW + 60)
    assert queue.next_work(NOW + 61) is None
    assert queue.look_ups.take() == ["example.com"]
    queue.found("example.com", route_to("default", "new"), NOW + 61)
    work = queue.next_work(NOW + 61)
    assert work is not None
    assert work.route.name == "new"
    assert queue.window.waiting == 0


def test_a_route_from_before_the_clock_was_set_back_is_looked_up_again() -> None:
    queue = make()
    queue.add([number(1)], NOW)
    resolve(queue, "old")
    assert queue.next_work(NOW - 3600) is None
    assert queue.look_ups.take() == ["example.com"]


def test_a_busy_line_does_not_prolong_the_routes_of_its_domains() -> None:
    queue = make()
    queue.add([number(1, "a@one.example")], NOW)
    queue.look_ups.take()
    queue.found("one.example", route_to("default", "mx", expires=NOW + 60), NOW)
    queueing.prove(queue)
    for at in range(5):
        queue.add([number(at + 10, f"b@d{at}.example")], NOW + 10 * at)
        queue.look_ups.take()
        queue.found(f"d{at}.example", route_to("default", "mx", expires=NOW + 1000), NOW + 10 * at)
    start_all(queue, NOW + 59)
    queue.add([number(99, "a@one.example")], NOW + 61)
    assert queue.next_work(NOW + 61) is None
    assert queue.look_ups.take() == ["one.example"]


def test_a_route_that_expires_at_once_is_still_used() -> None:
    queue = make()
    queue.add([number(1)], NOW)
    queue.look_ups.take()
    queue.found("example.com", route_to("default", "mx", expires=0.0), NOW)
    assert queue.next_work(NOW + 1) is not None


# Window and shares


def test_forgotten_domains_are_looked_up_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zonerelay.queue.zone.plan.MAX_DOMAINS", 10)
    queue = make()
    for n in range(50):
        queue.add([number(n, f"u@d{n}.example")], NOW)
        resolve(queue, "provider")
        for work in start_all(queue):
            queue.finished(work, [DELIVERED], NOW)
    assert len(queue._lines) <= 40
    queue.add([number(99, "u@d0.example")], NOW)
    resolve(queue, "provider")
    assert len(start_all(queue)) == 1


def test_idle_destinations_are_forgotten_and_suspended_ones_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zonerelay.queue.zone.plan.MAX_DESTINATIONS", 10)
    queue = make()
    for n in range(60):
        queue.add([number(n, f"u@d{n}.example")], NOW)
        resolve(queue)
        for work in start_all(queue):
            queue.finished(work, [NO_HOST if n == 0 else DELIVERED], NOW)
    assert len(queue._destinations) < 30
    found = queue.destination_of("d0.example")
    assert found is not None
    assert found.key == "default mx.d0.example:25"


def test_what_an_operator_changed_during_a_claim_goes_back_to_the_store() -> None:
    """The claim may have read it before the change."""
    queue = make(next_hop="hop")
    assert plan_claim(queue, {Priority.NORMAL}) is not None
    queue.withdraw([number(1).key])
    queue.give_back([number(1).key])
    queue.add([number(1), number(2)], NOW)
    assert queue.window.waiting == 1
    assert list(itertools.chain.from_iterable(queue.drain())) == [number(2), number(1)]


# Suspension


def failed(suspension: Suspension, now: float, *, others: int = 0) -> Transition:
    return suspension.failed(suspension.epoch, NO_HOST.reply, others, now)


def test_suspension_doubles_up_to_its_longest() -> None:
    suspension = Suspension(RETRY)
    now, lengths = NOW, []
    for _ in range(7):
        assert failed(suspension, now) is Transition.SUSPENDED
        lengths.append(suspension.until - now)
        assert suspension.limit(10, suspension.until - 1) == 0
        assert suspension.limit(10, suspension.until) == 1
        now = suspension.until
    assert lengths == [30, 60, 120, 240, 480, 600, 600]
    assert suspension.succeeded(suspension.epoch) is Transition.RESUMED
    assert suspension.limit(10, now) == 10
    failed(suspension, now)
    assert suspension.until - now == 30


def test_connections_that_fail_together_are_one_failure() -> None:
    suspension = Suspension(RETRY)
    epoch = suspension.epoch
    results = [suspension.failed(epoch, NO_HOST.reply, 9 - n, NOW + n) for n in range(10)]
    assert results == [Transition.NONE] * 9 + [Transition.SUSPENDED]
    assert suspension.until == NOW + 9 + 30
    # One that comes in later does not prolong it, and one that got through before does not end it.
    assert suspension.failed(epoch, NO_HOST.reply, 0, NOW + 10) is Transition.NONE
    assert suspension.succeeded(epoch) is Transition.NONE
    assert suspension.is_suspended(NOW + 38)


def test_a_refused_connection_beside_others_lowers_the_ceiling() -> None:
    suspension = Suspension(RETRY)
    assert failed(suspension, NOW + 2, others=4) is Transition.NONE
    assert suspension.limit(10, NOW + 2) == 4
    for _ in range(4):
        suspension.succeeded(suspension.epoch)
    assert suspension.limit(10, NOW + 3) == 5


def test_mail_refused_on_one_connection_too_many_lowers_the_ceiling_and_never_raises_it() -> None:
    suspension = Suspension(RETRY)
    for connections, most in ((4, 4), (6, 4), (2, 2)):
        suspension.take_at_most(connections)
        assert suspension.limit(10, NOW) == most
    for _ in range(2):
        suspension.succeeded(suspension.epoch)
    assert suspension.limit(10, NOW) == 3
    failed(suspension, NOW, others=0)
    suspension.take_at_most(1)
    assert suspension.limit(10, suspension.until + 1) == 1


def test_a_host_that_takes_two_connections_is_not_suspended_for_refusing_a_third() -> None:
    """4 connections at once; S: 220, S: 220, S: 421 too many connections, S: 421 too many connections."""
    queue = make(next_hop="hop", max_connections_per_destination=4)
    queue.add([number(n) for n in range(20)], NOW)
    resolve(queue)
    first, second, third, fourth = start_all(queue)
    assert queue.finished(third, [NO_HOST], NOW + 0.1) is Transition.NONE
    assert queue.finished(fourth, [NO_HOST], NOW + 0.1) is Transition.NONE
    assert start_all(queue, NOW + 0.1) == []
    assert queue.finished(first, [DELIVERED], NOW + 0.5) is Transition.NONE
    assert len(start_all(queue, NOW + 0.5)) == 1
    assert queue.finished(second, [DELIVERED], NOW + 0.5) is Transition.NONE
    assert len(start_all(queue, NOW + 0.5)) == 2  # two successes at a ceiling of two: a third one is tried
    assert queue.take_parked() == []


def test_a_ceiling_that_was_raised_in_vain_is_raised_ever_later() -> None:
    suspension = Suspension(RETRY)
    failed(suspension, NOW, others=2)
    needed = []
    for _ in range(8):
        successes = 0
        while suspension.limit(10, NOW) == 2:
            suspension.succeeded(suspension.epoch)
            successes += 1
        needed.append(successes)
        failed(suspension, NOW, others=2)
    assert needed == [2, 4, 8, 16, 32, 64, 128, 128]
    # One that holds ends the patience.
    while suspension.limit(10, NOW) < 4:
        suspension.succeeded(suspension.epoch)
    for _ in range(4):
        suspension.succeeded(suspension.epoch)
    assert suspension.limit(10, NOW) == 5


def test_nothing_waits_for_a_suspended_destination() -> None:
    queue = make(next_hop="hop", max_connections_per_destination=1)
    queue.add([number(n) for n in range(5)], NOW)
    resolve(queue)
    work = queue.next_work(NOW)
    assert work is not None
    assert queue.finished(work, [NO_HOST], NOW) is Transition.SUSPENDED
    ((destination, parked),) = queue.take_parked()
    assert (len(parked), queue.window.waiting, destination.suspension.until) == (4, 0, NOW + 30)
    queue.add([number(9)], NOW + 29)
    assert [len(parked) for _, parked in queue.take_parked()] == [1]
    queue.add([number(10), number(11)], NOW + 31)
    assert len(start_all(queue, NOW + 31)) == 1


def test_a_probe_that_waits_is_made_although_the_clock_is_set_back() -> None:
    queue = make(max_connections=1)
    queue.add([number(1)], NOW)
    resolve(queue)
    (work,) = start_all(queue)
    queue.finished(work, [NO_HOST], NOW)
    queue.take_parked()
    queue.add([number(2, "b@busy.example")], NOW)
    resolve(queue)
    (busy,) = start_all(queue)
    queue.add([number(3)], NOW + 31)
    assert not start_all(queue, NOW + 31)
    queue.finished(busy, [DELIVERED], NOW)
    (probe,) = start_all(queue, NOW)
    assert probe.message_id == number(3).message_id
    assert queue.finished(probe, [NO_HOST], NOW) is Transition.SUSPENDED
    queue.add([number(4)], NOW + 1)
    assert not start_all(queue, NOW + 1)


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([NO_HOST, NO_HOST], Transition.SUSPENDED),
        ([NO_HOST, queueing.DEFERRED], Transition.NONE),
        ([queueing.DEFERRED, NO_HOST], Transition.NONE),
        ([queueing.BOUNCED, queueing.BOUNCED], Transition.NONE),
        ([LOCAL, LOCAL], Transition.NONE),
        ([], Transition.NONE),
    ],
)
def test_only_a_batch_that_found_no_host_suspends(outcomes: Sequence[Outcome], expected: Transition) -> None:
    queue = make(next_hop="hop")
    queue.add([number(1, "a@example.com"), number(1, "b@example.com")], NOW)
    resolve(queue)
    (work,) = start_all(queue)
    assert queue.finished(work, outcomes, NOW) is expected


def test_our_own_trouble_does_not_end_a_probe() -> None:
    queue = make(next_hop="hop")
    for n, outcome in enumerate([NO_HOST, LOCAL, DELIVERED]):
        queue.add([number(n)], NOW + 60 * n)
        resolve(queue)
        (work,) = start_all(queue, NOW + 60 * n)
        transition = queue.finished(work, [outcome], NOW + 60 * n)
        assert transition is [Transition.SUSPENDED, Transition.NONE, Transition.RESUMED][n]


def test_a_status_keeps_the_reason() -> None:
    queue = make(next_hop="hop")
    queue.add([number(1)], NOW)
    resolve(queue)
    (work,) = start_all(queue)
    queue.finished(work, [NO_HOST], NOW)
    (destination,) = queue.shown_destinations(NOW)
    assert destination.suspended_until == NOW + 30
    assert destination.suspension.reply == Reply(451, "4.1", "connection refused")


# A suspended destination with any number of deliveries: what it may cost the others


DEAD = "dead.example"
BRIEF = RetrySettings(suspend_min=30.0, suspend_max=30.0)


def mail(count: int, *, first: int = 0) -> list[Delivery]:
    return [delivery(f"u@{DEAD}", message_id=f"{number:016x}") for number in range(first, first + count)]


def suspended(more: int = 0) -> tuple[ZonePlan, Destination]:
    """A queue whose one destination has just been found dead, with `more` deliveries waiting for it."""
    queue = ZonePlan(ZoneSettings(), BRIEF, window=4000)
    queue.add(mail(1 + more), NOW)
    (domain,) = queue.look_ups.take()
    queue.found(domain, Route("default", domain, (MxHost("mx.dead.example", 25),), NOW + 3600), NOW)
    work = queue.next_work(NOW)
    assert work is not None
    queue.finished(work, [NO_HOST], NOW)
    return queue, work.destination


def test_a_suspended_destination_with_much_mail_is_passed_over_until_it_has_rested() -> None:
    queue, destination = suspended(MANY_PUT_OFF)
    ((_, parked),) = queue.take_parked()
    assert len(parked) == MANY_PUT_OFF
    # Claims leave its mail where it is, and nothing is fetched by name.
    plan = plan_claim(queue, {Priority.NORMAL})
    assert isinstance(plan, ClaimRequest)
    assert plan.skip == {DEAD}
    assert plan_claim(queue) is None
    queue.rested(destination)
    refill = plan_claim(queue)
    assert refill is not None
    assert refill.domain is not None
    assert refill.limit <= 4000 // 8
    queue.add(mail(refill.limit, first=1000), NOW + 1)
    queue.claimed(refill, refill.limit)
    # A portion at a time: the next one after the next rest.
    assert [len(put_off) for _, put_off in queue.take_parked()] == [refill.limit]
    assert plan_claim(queue) is None
    assert queue.window.waiting == 0


def test_the_mail_of_a_few_messages_is_put_off_without_more_ado() -> None:
    queue, _ = suspended(3)
    assert [len(parked) for _, parked in queue.take_parked()] == [3]
    plan = plan_claim(queue, {Priority.NORMAL})
    assert isinstance(plan, ClaimRequest)
    assert not plan.skip


def test_what_is_put_off_comes_back_one_after_the_other() -> None:
    queue, destination = suspended()
    del queue
    suspension: Suspension = destination.suspension
    places = [suspension.place() for _ in range(1000)]
    assert places[0] > suspension.until
    gaps = {round(later - earlier, 4) for earlier, later in itertools.pairwise(places)}
    assert gaps == {1 / PUT_OFF_RATE}


def test_a_suspension_does_not_last_an_hour_longer_when_the_clock_is_set_back_by_an_hour() -> None:
    """The simulation, seed 324: mail for a host that answered again waited for as long as the step was."""
    _, destination = suspended()
    suspension: Suspension = destination.suspension
    suspension.place()
    earlier = NOW - 3600
    assert not suspension.is_suspended(earlier)
    assert suspension.limit(20, earlier) == 1
    suspension.failed(suspension.epoch, NO_HOST.reply, 0, earlier)
    assert suspension.is_suspended(earlier + 1)
    assert suspension.place() < suspension.until + 1
    assert suspension.until < NOW


def test_another_domain_of_the_same_hosts_does_not_end_the_rest() -> None:
    queue, destination = suspended(MANY_PUT_OFF)
    queue.take_parked()
    queue.add([delivery("u@other.example", message_id="f" * 16)], NOW)
    (domain,) = queue.look_ups.take()
    queue.found(domain, Route("default", domain, (MxHost("mx.dead.example", 25),), NOW + 3600), NOW)
    assert set(destination.domains) == {DEAD, "other.example"}
    assert plan_claim(queue) is None


# Work over thousands of destinations or deliveries is done a little at a time


def to_domains(start: int, stop: int) -> list[Delivery]:
    return [number(n, f"u@d{n}.example") for n in range(start, stop)]


def known(count: int, *hosts: str, suspended: bool = False) -> ZonePlan:
    """A plan that has sent to so many domains, each a destination unless they share `hosts`."""
    queue = make(max_connections=count)
    queue.add(to_domains(0, count), NOW)
    resolve(queue, *hosts)
    while works := start_all(queue):
        for work in works:
            queue.finished(work, [NO_HOST if suspended else DELIVERED], NOW)
    queue.take_parked()
    return queue


@pytest.mark.parametrize("suspended", [True, False])
def test_a_new_destination_looks_at_few_others(monkeypatch: pytest.MonkeyPatch, *, suspended: bool) -> None:
    monkeypatch.setattr("zonerelay.queue.zone.plan.MAX_DESTINATIONS", 100)
    queue = known(150, suspended=suspended)
    looked_at = 0
    real = Destination.is_forgettable

    def counted(destination: Destination, now: float) -> bool:
        nonlocal looked_at
        looked_at += 1
        return real(destination, now)

    monkeypatch.setattr(Destination, "is_forgettable", counted)
    queue.add(to_domains(5000, 5001), NOW)
    resolve(queue)
    assert looked_at <= LOOKED_AT


def test_idle_destinations_behind_many_suspended_ones_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zonerelay.queue.zone.plan.MAX_DESTINATIONS", 50)
    queue = known(100, suspended=True)
    for n in range(1000, 1200):
        queue.add(to_domains(n, n + 1), NOW)
        resolve(queue)
        for work in start_all(queue):
            queue.finished(work, [DELIVERED], NOW)
    assert 100 < len(queue._destinations) < 150


def test_idle_domains_of_many_destinations_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = known(90)
    monkeypatch.setattr(queue, "_max_domains", 10)
    queue.add((), NOW)
    assert not queue._lines


def test_mail_for_one_of_many_dead_domains_needs_no_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = known(90, suspended=True)
    monkeypatch.setattr(queue, "_max_domains", 10)
    queue.add((), NOW)
    queue.add([number(1, "u@d7.example")], NOW)
    assert queue.look_ups.take() == []
    [(destination, deliveries)] = queue.take_parked()
    assert (destination.domains, len(deliveries)) == ({"d7.example": None}, 1)


async def test_others_have_a_turn_between_two_slices() -> None:
    clock, turns = ManualClock(), 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        asyncio.get_running_loop().call_soon(turn)

    turn()
    found = []
    async for step in in_slices(range(20), clock.monotonic):
        clock.advance(0.6 * SLICE)  # so two make a slice
        found.append(step)
    assert found == list(range(20))
    assert turns == 10


# Outcomes without an attempt


async def test_many_that_expire_are_read_and_reported_few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that waited for a next hop that is down expired in one turn of the loop, with its reports."""
    relay = Relay(clock=ManualClock())
    for n in range(100):
        relay.accept(f"u{n}@example.com", age=6 * 86400.0, tell=False)
    busy = Counter[str]()
    read, report = relay.store.read_message, DsnMaker.report

    async def reading(message_id: MessageId) -> Message:
        busy["now"] += 1
        busy["most"] = max(busy["most"], busy["now"])
        await asyncio.sleep(0)
        busy["now"] -= 1
        return await read(message_id)

    async def reporting(*given: Any, **more: Any) -> OwnMessage:  # Any: passed on as it comes
        busy["reports"] += 1
        busy["in one turn"] += 1
        busy["most in one turn"] = max(busy["most in one turn"], busy["in one turn"])
        asyncio.get_running_loop().call_soon(busy.__setitem__, "in one turn", 0)
        assert isinstance(relay.clock, ManualClock)
        relay.clock.advance(0.6 * SLICE)
        return await report(*given, **more)

    monkeypatch.setattr(relay.store, "read_message", reading)
    monkeypatch.setattr(DsnMaker, "report", reporting)
    relay.settler.post_unattempted(await relay.stored(), NO_HOST, destination="mx", until=relay.clock.now)
    assert len(relay.settler.unsettled_keys()) == 100
    await relay.settler.drain()
    assert not relay.settler.unsettled_keys()
    assert busy["most"] <= AT_ONCE
    assert busy["most in one turn"] == 2
    assert busy["reports"] == len(relay.sink.named("dsn")) == len(relay.sink.named("expired")) == 100


async def test_an_error_half_way_puts_the_rest_off() -> None:
    relay = Relay(clock=ManualClock())
    for n in range(200):
        relay.accept(f"u{n}@example.com", tell=False)
    times = iter([relay.clock.now() + 30] * 100)
    relay.settler.post_unattempted(await relay.stored(), NO_HOST, destination="mx", until=times.__next__)
    await relay.settler.drain()
    later = Counter(round(each.next_attempt - relay.clock.now()) for each in await relay.stored())
    assert later == {30: 100, round(UNREADABLE_DELAY): 100}
    assert [event["where"] for event in relay.sink.named("trouble")] == ["queue.settle"]
    assert not relay.settler.unsettled_keys()


# Other settings


async def test_what_waits_gets_new_settings_beside_a_hung_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zonerelay.process.tasks.SLICE", 0.0)
    relay = Relay(zones=[ZoneSettings(max_connections=1)])
    relay.courier.gate = asyncio.Event()
    await relay.scheduler.start()
    for n in range(12):
        relay.accept(f"u@d{n}.example")
    async with asyncio.timeout(10):
        while not relay.courier.in_flight:
            await asyncio.sleep(0)
        relay.scheduler.configure([ZoneSettings(max_connections=24)], RetrySettings())
        while len(relay.courier.in_flight) < 12:
            await asyncio.sleep(0)
    relay.courier.gate.set()
    await relay.scheduler.stop(5.0)
