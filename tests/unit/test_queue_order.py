"""Urgent mail first, fresh and put-off mail by turns, and nothing waits for ever: also in look-ups."""

import math
from collections import Counter
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import NOW, PlanBed
from tests.support.queueing import NO_HOST, delivery, plan_claim, wants_claim
from zonerelay.model.delivery import parse_queue, queue_of, queues_of
from zonerelay.model.envelope import Priority
from zonerelay.queue.destination.backlog import FRESH_WEIGHT, STRIDE, Backlog, MessageQueue, Precedence
from zonerelay.queue.destination.destinations import AT_ONCE, SHARE, RouteLookups, UnroutedMail
from zonerelay.queue.selection import BUSY, FRESH_STARTS, LEAST, LOOK, PATIENCE, BacklogThrottle
from zonerelay.queue.zone.plan import MEASURED, UNASKED
from zonerelay.telemetry.metrics.instruments import CpuDemand
from zonerelay.telemetry.metrics.metrics import Metrics

HIGH, NORMAL, BULK = Priority


class Plan(PlanBed):
    """One connection, and mail for example.com."""

    def __init__(self, *claims: tuple[Priority, int]) -> None:
        super().__init__(max_connections=1)
        for priority, count in claims:
            self.add("example.com", count, priority=priority)

    def priorities(self, count: int) -> list[Priority]:
        """Of the next messages."""
        return [each.priority for each in islice(self.sent(), count)]


def test_names_of_queues_hold_the_zone_and_the_priority() -> None:
    for priority in Priority:
        queue = queue_of("a.b-c_d", priority)
        assert (queue.zone, queue.priority) == ("a.b-c_d", priority)
    assert [queue.text for queue in queues_of("z")] == ["z;high", "z", "z;bulk"]
    assert parse_queue("z;unheard-of").priority is NORMAL


@given(st.lists(st.sets(st.sampled_from(Priority), min_size=1), min_size=40, max_size=200))
def test_nobody_waits_longer_than_its_share(turns: list[set[Priority]]) -> None:
    precedence = Precedence()
    waited: Counter[Priority] = Counter()
    for waiting in turns:
        chosen = precedence.pick(waiting)
        assert chosen in waiting
        for each in Priority:
            waited[each] = waited[each] + 1 if each in waiting and each is not chosen else 0
            # All turns of the more urgent ones in its stride, and one of each besides.
            assert waited[each] <= sum(
                STRIDE[each] // STRIDE[other] + 1 for other in Priority if other != each
            )


def test_urgent_mail_has_the_next_turn_in_a_line_and_the_rest_moves_on() -> None:
    plan = Plan((BULK, 200), (NORMAL, 200))
    plan.priorities(40)
    plan.add("example.com", 3, priority=HIGH)
    order = plan.priorities(20)
    assert HIGH in order[:1]
    assert order.count(HIGH) == 3
    assert {NORMAL, BULK} <= set(plan.priorities(40))


def test_within_a_priority_the_oldest_goes_first() -> None:
    plan = Plan((HIGH, 3), (NORMAL, 3))
    ids: dict[Priority, list[str]] = {HIGH: [], NORMAL: []}
    for each in plan.sent():
        ids[each.priority].append(each.message_id)
    for found in ids.values():
        assert found == sorted(found)
        assert len(found) == 3


def test_a_destination_with_urgent_mail_is_served_before_hundreds_of_others() -> None:
    plan = Plan()
    for n in range(300):
        plan.add(f"d{n}.example", 2, priority=NORMAL)
    plan.add("idle.example", 1, priority=HIGH)
    assert HIGH in plan.priorities(2)


def test_a_destination_that_stands_in_the_ring_already_is_hastened() -> None:
    plan = Plan()
    for n in range(300):
        plan.add(f"d{n}.example", 2, priority=NORMAL)
    plan.add("d299.example", 1, priority=HIGH)
    assert HIGH in plan.priorities(2)
    assert len(plan.priorities(599)) == 599
    assert not plan.priorities(1)
    assert plan.queue.window.waiting == 0


def test_a_full_window_of_bulk_mail_leaves_room_for_urgent_mail() -> None:
    plan = PlanBed(next_hop="hop", window=100)
    plan.add("example.com", 100, priority=BULK)
    assert not wants_claim(plan.queue, {BULK})
    claim = plan_claim(plan.queue, {HIGH, BULK})
    assert claim is not None
    assert (claim.priority, claim.limit) == (HIGH, 100)


def test_claims_take_turns_too() -> None:
    queue = PlanBed().queue
    plans = [plan_claim(queue, set(Priority)) for _ in range(31)]
    assert Counter(each.priority for each in plans if each is not None) == {HIGH: 25, NORMAL: 5, BULK: 1}


def test_withdrawn_and_drained_deliveries_are_found_whatever_their_priority() -> None:
    plan = Plan((HIGH, 2), (NORMAL, 2), (BULK, 2))
    withdrawn = [plan.mail("example.com", priority=priority) for priority in (HIGH, BULK)]
    for some in withdrawn:
        plan.queue.add(some, plan.now, some[0].priority)
    plan.queue.withdraw([each.key for some in withdrawn for each in some])
    assert plan.queue.window.waiting == 6
    left = [each.priority for each in chain.from_iterable(plan.queue.drain())]
    assert left == [HIGH, HIGH, NORMAL, NORMAL, BULK, BULK]
    assert plan.queue.window.waiting == 0


def test_a_destination_that_is_often_hastened_has_no_more_turns_than_its_neighbours() -> None:
    plan = Plan()
    plan.add("hastened.example", 600, priority=NORMAL)
    plan.add("other.example", 600, priority=NORMAL)
    for _ in range(100):
        plan.priorities(2)
        plan.add("hastened.example", priority=HIGH)
    turns = Counter(each.domain for each in islice(plan.sent(), 200) if each.priority is NORMAL)
    assert abs(turns["hastened.example"] - turns["other.example"]) <= 2


# Fresh mail and mail that was put off take turns


def message(number: int) -> str:
    return f"{number:016x}"


def names(line: Backlog) -> list[str]:
    taken = []
    while line.waiting:
        taken += [each.recipient.partition("@")[0] for each in line.take(50)]
    return taken


def test_within_a_backlog_fresh_messages_and_others_take_turns_oldest_first_in_each() -> None:
    line = Backlog(set())
    for number in (3, 1, 2):
        line.add(delivery(f"again{number}@a.example", message_id=message(number), next_attempt=NOW))
    for number in (6, 5):
        line.add(delivery(f"new{number}@a.example", message_id=message(number)))
    assert line.waiting == 5
    assert [each.message_id for each in line] == [message(number) for number in (1, 2, 3, 5, 6)]
    assert names(line) == ["new5", "again1", "new6", "again2", "again3"]


def test_an_empty_backlog_has_no_rows_of_its_own() -> None:
    line = Backlog(set())
    for due in (0.0, NOW):
        line.add(delivery(next_attempt=due))
    assert len(line.drain()) == 2
    assert line._fresh is line._again is Backlog(set())._fresh


def test_withdrawn_mail_leaves_no_names() -> None:
    row = MessageQueue()
    some = [delivery(message_id=message(number)) for number in range(3)]
    for _ in range(3):
        for each in some:
            row.add(each)
        assert [row.remove(each.key) for each in some] == some
    assert not row
    assert row._order == []


def test_a_row_of_domains_apart_gives_one_domain_of_a_message_or_as_many_as_asked_for() -> None:
    def filled() -> MessageQueue:
        row = MessageQueue(apart=True)
        for recipient in ("a@x.example", "b@y.example", "c@X.example", "d@z.example"):
            row.add(delivery(recipient, message_id=message(1)))
        row.add(delivery("e@x.example", message_id=message(2)))
        return row

    def all_of(row: MessageQueue, limit: int, domains: int) -> list[str]:
        taken = []
        while row:
            taken.append("".join(each.recipient[0] for each in row.take(limit, domains)))
        return taken

    assert all_of(filled(), 50, 1) == ["ac", "b", "d", "e"]
    assert all_of(filled(), 1, 1) == ["a", "c", "b", "d", "e"]
    assert all_of(filled(), 50, 2) == ["acb", "d", "e"]
    assert all_of(filled(), 3, 9) == ["acb", "d", "e"]
    row = filled()
    assert row.remove(delivery("b@y.example", message_id=message(1)).key)
    assert not row.remove(delivery("a@y.example", message_id=message(1)).key)
    assert [each.recipient[0] for each in row] == ["a", "c", "d", "e"]
    assert all_of(row, 50, 2) == ["acd", "e"]


@pytest.mark.parametrize("proven", [True, False])
def test_a_single_message_passes_hundreds_of_destinations_with_deferred_mail(*, proven: bool) -> None:
    """As the simulation showed: it waited a quarter of a minute behind 4,000 that had come due together."""
    plan = PlanBed(proven=proven, max_connections=2)
    for number in range(300):
        plan.queue.add(plan.mail(f"d{number}.example", due=NOW - 1), NOW)
    plan.add("idle.example")
    assert "idle.example" in [each.domain for each in islice(plan.sent(), 5)]


# Domains are looked up in the order of their mail


def line(domain: str, *, due: float = 0.0, priority: Priority = Priority.NORMAL) -> UnroutedMail:
    made = UnroutedMail(domain)
    more(made, due=due, priority=priority)
    return made


def more(to: UnroutedMail, *, due: float = 0.0, priority: Priority = Priority.NORMAL) -> None:
    (domain,) = to.domains
    to.add(delivery(f"u@{domain}", next_attempt=due, queue=queue_of("default", priority)), priority)


def all_of(look_ups: RouteLookups) -> list[str]:
    found: list[str] = []
    while some := look_ups.take():
        found += some
        for domain in some:
            look_ups.ended(domain, found=True)
    return found


def test_a_domain_that_waits_is_hastened_and_asked_once() -> None:
    look_ups = RouteLookups()
    lines = [line(f"d{n}.example", due=1.0) for n in range(100)]
    for each in lines:
        look_ups.want(each)
    more(lines[98])
    look_ups.want(lines[98])
    more(lines[99], priority=Priority.HIGH)
    look_ups.want(lines[99])
    found = all_of(look_ups)
    assert found[0] == "d99.example"
    assert "d98.example" in found[:3]
    assert len(found) == len(set(found)) == 100
    more(lines[5])
    look_ups.want(lines[5])
    assert not look_ups.take()


def test_domains_without_a_route_do_not_keep_the_places_of_others() -> None:
    """As the simulation showed: hundreds of dead name servers, asked again for each delivery."""
    look_ups = RouteLookups()
    names = [f"dead{n}.example" for n in range(2 * AT_ONCE)]
    for name in names:
        look_ups.want(line(name))
    while some := look_ups.take():
        for name in some:
            look_ups.ended(name, found=False)
    for name in names:
        look_ups.want(line(name, due=1.0))
        look_ups.want(line(f"alive-{name}", due=1.0))
    under_way = look_ups.take()
    assert len(under_way) == AT_ONCE
    again = [name for name in under_way if name in names]
    assert again == names[:SHARE]
    look_ups.ended(again[0], found=True)
    assert look_ups.take() == [names[SHARE]], "they take turns"
    for name in list(look_ups._under_way):
        look_ups.ended(name, found=True)
    back = line(again[0])
    look_ups.want(back)
    assert back.share == again[0], "it had a route"


def test_the_domains_of_one_organization_do_not_keep_the_places_of_others() -> None:
    look_ups = RouteLookups()
    names = [f"d{number}.silent.example" for number in range(2 * AT_ONCE)]
    for name in [*names, "other.example"]:
        look_ups.want(line(name))
    *of_one, other = look_ups.take()
    assert (of_one, other) == (names[:SHARE], "other.example")
    look_ups.ended(names[0], found=False)
    assert look_ups.take() == [names[SHARE]]
    for name in (*names[1 : SHARE + 1], other):
        look_ups.ended(name, found=False)
    assert all_of(look_ups) == names[SHARE + 1 :]
    assert not look_ups._held_back
    assert not look_ups._active


def test_no_more_of_them_are_remembered_than_was_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zonerelay.queue.destination.destinations.KNOWN", 2)
    look_ups = RouteLookups()
    for name in ("a.example", "b.example", "c.example"):
        look_ups.want(line(name))
        look_ups.take()
        look_ups.ended(name, found=False)
    assert list(look_ups._failed) == ["b.example", "c.example"]


# While new mail keeps the processor busy, mail that has waited before starts at a limited rate


SATURATED, IDLE = 0.95, 0.2
PUT_OFF = NOW - 1
"""`next_attempt` of what was deferred before."""


def run(throttle: BacklogThrottle, seconds: float, *, fresh: int, other: int, busy: float) -> int:
    """So many want to start in each look; how many of the others did."""
    started = 0
    for _ in range(round(seconds / LOOK)):
        for number in range(max(fresh, other)):
            if number < fresh:
                throttle.started(is_fresh=True)
            if number < other and not throttle.is_used_up:
                throttle.started(is_fresh=False)
                started += 1
        throttle.look(LOOK, busy)
    return started


@pytest.fixture
def throttle() -> BacklogThrottle:
    return BacklogThrottle()


def test_a_backlog_is_slowed_down_while_new_mail_saturates_the_loop(throttle: BacklogThrottle) -> None:
    run(throttle, 2.0, fresh=90, other=60, busy=SATURATED)
    assert throttle.rate == LEAST
    assert run(throttle, 10.0, fresh=90, other=60, busy=SATURATED) == pytest.approx(10 * LEAST, rel=0.1)
    run(throttle, 10.0, fresh=300, other=60, busy=SATURATED)
    assert throttle.rate == pytest.approx(3000 / FRESH_STARTS, rel=0.1)


def test_where_it_lasts_the_rest_gets_the_part_that_it_has_of_the_turns(throttle: BacklogThrottle) -> None:
    run(throttle, PATIENCE + 10.0, fresh=100, other=60, busy=SATURATED)
    assert throttle.rate == pytest.approx(1000 / FRESH_WEIGHT, rel=0.01)
    run(throttle, PATIENCE + 10.0, fresh=0, other=60, busy=SATURATED)
    run(throttle, 5.0, fresh=200, other=60, busy=SATURATED)
    assert throttle.rate == pytest.approx(2000 / FRESH_STARTS, rel=0.1)


def test_a_queue_that_is_restrained_by_little_new_mail_keeps_its_least(throttle: BacklogThrottle) -> None:
    run(throttle, 5.0, fresh=20, other=60, busy=SATURATED)
    assert run(throttle, 1.0, fresh=20, other=60, busy=SATURATED) == pytest.approx(LEAST, rel=0.1)


@pytest.mark.parametrize(("fresh", "busy"), [(0, SATURATED), (10, SATURATED), (90, BUSY - 0.01)])
def test_without_new_mail_with_a_trickle_of_it_or_with_time_left_nothing_is_held_back(
    fresh: int, busy: float, throttle: BacklogThrottle
) -> None:
    assert run(throttle, 5.0, fresh=fresh, other=60, busy=busy) == 50 * 60
    assert throttle.rate == math.inf


def test_the_rate_rises_when_the_loop_has_time_and_ends_with_new_mail(throttle: BacklogThrottle) -> None:
    run(throttle, 3.0, fresh=90, other=60, busy=SATURATED)
    assert run(throttle, 3.0, fresh=90, other=60, busy=IDLE) > 900
    assert throttle.rate == math.inf
    run(throttle, 3.0, fresh=90, other=60, busy=SATURATED)
    assert throttle.rate < 100
    run(throttle, 3.0, fresh=0, other=60, busy=SATURATED)
    assert throttle.rate == math.inf


async def test_it_is_looked_at_while_mail_that_has_waited_starts_and_not_longer() -> None:
    begun = []

    def busy() -> float:
        begun.append(True)
        return IDLE

    throttle = BacklogThrottle(busy)
    throttle.started(is_fresh=True)
    assert not begun
    for _ in range(3):
        throttle.started(is_fresh=False)
    assert len(begun) == 1
    throttle.look(LOOK, IDLE)
    assert throttle.is_looked_at
    throttle.look(LOOK, IDLE)
    assert not throttle.is_looked_at
    throttle.started(is_fresh=False)
    assert len(begun) == 2
    throttle.stop()


def test_what_started_while_nobody_looked_is_not_taken_for_a_flood(throttle: BacklogThrottle) -> None:
    for _ in range(100_000):
        throttle.started(is_fresh=True)
    run(throttle, 1.0, fresh=0, other=60, busy=SATURATED)
    assert throttle.rate == math.inf


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.floats(0, 1), st.floats(0.01, 5))))
def test_nothing_stands_still_longer_than_to_a_look(looks: list[tuple[int, int, float, float]]) -> None:
    throttle = BacklogThrottle()
    for fresh, other, busy, seconds in looks:
        for _ in range(fresh):
            throttle.started(is_fresh=True)
        for _ in range(other):
            if not throttle.is_used_up:
                throttle.started(is_fresh=False)
        assert throttle.is_looked_at or not throttle.is_used_up
        throttle.look(seconds, busy)
        assert not throttle.is_used_up


class Zone(PlanBed):
    """A zone's plan for known hosts and others, some with deferred mail, some with fresh."""

    def __init__(self, *, known: bool = True) -> None:
        self.throttle = BacklogThrottle()
        super().__init__(proven=known, driver={"throttle": self.throttle}, max_connections=4)

    def put_in(self, name: str, count: int, **more: Any) -> None:
        for number in range(count):
            self.add(f"{name}{number}.example", **more)

    def use_up(self) -> None:
        run(self.throttle, 3.0, fresh=50, other=50, busy=SATURATED)
        while not self.throttle.is_used_up:
            self.throttle.started(is_fresh=False)

    def let_go(self) -> None:
        for _ in range(40):
            self.throttle.look(LOOK, IDLE)

    def send(self) -> list[str]:
        """The names that batches go to until nothing may start any more."""
        return [each.domain[:3] for each in self.sent()]


@pytest.mark.parametrize(
    ("known", "priority"), [(True, Priority.NORMAL), (False, Priority.NORMAL), (True, Priority.HIGH)]
)
def test_only_fresh_mail_starts_until_the_next_look_then_all(*, known: bool, priority: Priority) -> None:
    zone = Zone(known=known)
    zone.use_up()
    zone.put_in("old", 5, due=PUT_OFF, priority=priority)
    zone.put_in("new", 5)
    assert zone.send() == ["new"] * 5
    assert zone.queue.round_robin.active == 0
    zone.let_go()
    assert zone.send() == ["old"] * 5


def test_starts_are_counted_by_what_is_sent() -> None:
    zone = Zone()
    zone.put_in("old", 3, due=PUT_OFF)
    zone.put_in("new", 2)
    zone.throttle.started(is_fresh=False)
    zone.send()
    assert (zone.throttle._fresh, zone.throttle._other) == (2, 1 + 3)


def test_fresh_mail_for_a_dead_host_counts_although_it_does_not_start() -> None:
    """The probes of 50,000 dead domains took the processor from the mail that still arrived for them."""
    zone = Zone(known=False)
    zone.add("dead.example")
    assert zone.start() == ["dead.example"]
    for _ in range(3):
        zone.throttle.started(is_fresh=False)
    zone.finish("dead.example", NO_HOST)
    zone.add("dead.example", recipients=2)
    zone.add("dead.example", due=PUT_OFF)
    assert zone.start() == []
    assert (zone.throttle._fresh, zone.throttle._other) == (1, 3)


def test_a_thread_that_works_needs_a_processor_and_one_that_sleeps_does_not(tmp_path: Path) -> None:
    """Other programs may hold the processor as long as they like: that counts as need."""
    waited = tmp_path / "schedstat"
    waited.write_text("0 0 0\n")
    demand = CpuDemand(schedstat=waited)
    assert demand.since_last() == 0.0
    end = demand._at + 0.02
    while demand.since_last() < 0.5 and demand._at < end + 1:
        sum(range(10_000))
    assert demand._at < end + 1
    waited.write_text("0 99000000000 0\n")
    assert demand.since_last() == 1.0
    waited.unlink()
    assert demand.since_last() == 0.0


def test_how_long_it_lasted_is_shown() -> None:
    metrics = Metrics()
    metrics.read(lambda: {"zonerelay_restrained_seconds_total": 12.5})
    assert "zonerelay_restrained_seconds_total 12.5" in metrics.exposition().decode()


def test_the_rate_of_new_mail_is_measured_while_somebody_asks_for_it() -> None:
    bed = PlanBed(next_hop="127.0.0.1:25", max_connections_per_destination=2)

    def start(*, due: float = 0.0) -> None:
        bed.add("a.example", recipients=6, due=due)
        assert bed.start()
        bed.finish("a.example")

    def rate() -> float:
        return bed.queue.new_mail_rate(bed.now)

    start()
    assert rate() == math.inf, "measured from now on"
    start()
    start(due=bed.now - 1)  # it was deferred before
    bed.now += MEASURED / 2
    assert rate() == math.inf
    start()
    bed.now += MEASURED / 2
    assert rate() == 12 / MEASURED
    start()
    bed.now += MEASURED
    assert rate() == 12 / MEASURED, "the higher one"
    bed.now += MEASURED
    assert rate() == 6 / MEASURED
    bed.now += MEASURED
    assert rate() == 0
    start()
    bed.now += UNASKED + 1
    assert rate() == math.inf
