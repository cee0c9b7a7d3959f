"""Turns in one zone's plan: lines that share hosts, limits of their own, rates, and that nothing is stuck."""

import time
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest
from msgspec import structs

from tests.support.plans import NOW, RETRY, PlanBed
from tests.support.queueing import DELIVERED, LOCAL, NO_HOST, plan_claim, wants_claim
from zonerelay.config.units import Rate, parse_rate
from zonerelay.model.clock import ManualClock
from zonerelay.model.envelope import MessageIdSource, Priority, first_at
from zonerelay.model.reply import Outcome
from zonerelay.queue.destination.backlog import FRESH_WEIGHT
from zonerelay.queue.destination.destinations import Pacer, Rates
from zonerelay.queue.selection import MOST_IN_VISIT, VISIT_SECONDS
from zonerelay.queue.zone.window import AGAIN, LOW_MARK
from zonerelay.routing.destinations.route import DestinationLimits

PLAIN = DestinationLimits(
    max_connections=2, max_recipients_per_transaction=50, max_messages_per_connection=100
)


class Plan(PlanBed):
    """All destinations have answered before."""

    def __init__(self, rates: Rates | None = None, **zone: Any) -> None:
        super().__init__(proven=True, rates=rates, **zone)

    def follow(self, domain: str, outcome: Outcome = DELIVERED, *, seconds: float = 0.0) -> bool:
        """Its batch ends after so long; whether another one of the same turn follows."""
        work = self.work(domain)
        self.finish(domain, outcome, seconds=seconds)
        following = self.queue.following(work, NOW, self.tick)
        if following is not None:
            assert following.destination is work.destination
            self.works.append(following)
        return following is not None

    def until_turn(self) -> None:
        assert self.queue.round_robin.next_turn is not None
        self.tick = self.queue.round_robin.next_turn


def rated(rate: str, **more: int) -> DestinationLimits:
    return structs.replace(PLAIN, max_rate=parse_rate(rate), **more)


# Turns of several batches


def crowd(rate: Rate | None = None) -> Plan:
    """One connection, and two destinations with mail; the turn of a.example has begun."""
    plan = Plan(max_connections=1, max_rate_per_destination=rate)
    for name in ("a.example", "b.example"):
        plan.add(name, 20)
    assert plan.start() == ["a.example"]
    return plan


def test_a_turn_goes_on_for_some_batches_and_then_it_is_anothers() -> None:
    plan = crowd()
    batches = 1
    while plan.follow("a.example", seconds=0.0):
        assert plan.start() == []
        batches += 1
    assert batches == MOST_IN_VISIT
    assert plan.start() == ["b.example"]


def test_a_turn_goes_on_for_a_part_of_a_second_after_its_first_batch() -> None:
    plan = crowd()
    assert plan.follow("a.example", seconds=2.0)  # the connection took so long
    assert plan.follow("a.example", seconds=VISIT_SECONDS * 0.6)
    assert not plan.follow("a.example", seconds=VISIT_SECONDS * 0.6)
    assert plan.start() == ["b.example"]


def test_a_destination_with_nothing_more_to_send_leaves_its_turn() -> None:
    plan = Plan(max_connections=1)
    plan.add("a.example", 2)
    plan.add("b.example", 1)
    assert plan.start() == ["a.example"]
    assert plan.follow("a.example")
    assert not plan.follow("a.example")
    assert plan.start() == ["b.example"]


@pytest.mark.parametrize("outcome", [NO_HOST, None])
def test_a_turn_that_reached_nobody_does_not_go_on(outcome: Outcome | None) -> None:
    plan = crowd()
    if outcome is None:
        (work,) = plan.works
        plan.works.clear()
        plan.queue.finished(work, (), NOW)
        assert plan.queue.following(work, NOW) is None
    else:
        assert not plan.follow("a.example", outcome)
    assert plan.start() == ["b.example"]


def test_a_destination_that_takes_long_does_not_go_on() -> None:
    plan = crowd()
    assert not plan.follow("a.example", seconds=3.1)


def test_a_zone_with_one_next_hop_has_no_turns_of_several_batches() -> None:
    plan = Plan(max_connections=1, next_hop="hop")
    plan.add("a.example", 3)
    assert plan.start() == ["a.example"]
    assert not plan.follow("a.example")
    assert plan.start() == ["a.example"]


def test_what_is_more_urgent_ends_a_turn() -> None:
    plan = crowd()
    plan.add("c.example", priority=Priority.HIGH)
    assert not plan.follow("a.example")
    assert plan.start() == ["c.example"]


def test_fresh_mail_of_others_ends_the_turn_of_what_was_put_off() -> None:
    plan = Plan(max_connections=1)
    plan.add("a.example", 8, due=NOW - 1)
    assert plan.start() == ["a.example"]
    assert plan.follow("a.example")
    plan.add("b.example", 1)
    assert not plan.follow("a.example")
    assert plan.start() == ["b.example"]


def test_another_line_that_waits_for_the_same_hosts_ends_a_turn() -> None:
    plan = Plan(max_connections=5)
    for name in ("a.example", "b.example"):
        plan.domain(name, "hosts", structs.replace(PLAIN, max_connections=1))
        plan.add(name, 9)
    assert plan.start() == ["a.example"]
    assert not plan.follow("a.example")
    assert plan.start() == ["b.example"]


def test_a_turn_goes_on_no_faster_than_the_rate() -> None:
    plan = crowd(parse_rate("10/1s"))
    assert not plan.follow("a.example")
    assert plan.start() == ["b.example"]
    (work,) = plan.works
    assert work.ticket is not None
    work.ticket.take(plan.tick)
    plan.tick = 10.0
    assert plan.follow("b.example")


def test_who_has_one_message_does_not_wait_for_all_who_have_many() -> None:
    plan = Plan(max_connections=1)
    for n in range(8):
        plan.add(f"many{n}.example", 50)
    order = plan.start()
    for _ in range(8):
        plan.finish(order[-1])
        order += plan.start()
    plan.add("one.example", 1)
    plan.add("another.example", 1)
    for _ in range(3):
        plan.finish(order[-1])
        order += plan.start()
    assert order[-3:] == ["one.example", "many1.example", "another.example"]


# Lines at one site


def test_lines_with_equal_limits_share_their_hosts_and_take_turns() -> None:
    plan = Plan(max_connections=10)
    for name in ("a.example", "b.example"):
        plan.domain(name, "hosts", PLAIN)
        plan.add(name, 5)
    assert plan.start() == ["a.example", "b.example"]
    order = []
    for _ in range(8):
        plan.finish(plan.works[0].deliveries[0].domain)
        order += plan.start()
        assert len(plan.works) <= 2
    assert order == ["a.example", "b.example"] * 4


def test_a_line_with_a_small_limit_keeps_it_and_is_not_starved_by_its_neighbour() -> None:
    plan = Plan(max_connections=10)
    plan.domain("many.example", "hosts", structs.replace(PLAIN, max_connections=4))
    plan.domain("few.example", "hosts", structs.replace(PLAIN, max_connections=1))
    plan.add("many.example", 10)
    assert plan.start() == ["many.example"] * 4
    plan.add("few.example", 3)
    assert plan.start() == []
    plan.finish("many.example")
    assert plan.start() == ["few.example"]
    plan.finish("many.example")
    assert plan.start() == ["many.example"]
    plan.finish("few.example")
    assert len(plan.start()) == 1
    assert len(plan.works) == 4


def test_a_line_with_a_large_limit_leaves_the_others_theirs() -> None:
    plan = Plan(max_connections=20)
    plan.domain("large.example", "hosts", structs.replace(PLAIN, max_connections=6))
    plan.domain("usual.example", "hosts", PLAIN)
    plan.domain("another.example", "hosts", PLAIN)
    plan.add("usual.example", 9)
    plan.add("another.example", 9)
    assert len(plan.start()) == 2
    plan.add("large.example", 9)
    assert plan.start() == ["large.example"] * 4
    for _ in range(4):
        plan.finish("large.example")
    assert set(plan.start()) == {"large.example"}
    assert len(plan.works) == 6


def test_a_full_site_holds_no_connection_of_the_zone() -> None:
    plan = Plan(max_connections=3)
    for name in ("a.example", "b.example", "c.example"):
        plan.domain(name, "hosts", structs.replace(PLAIN, max_connections=1))
        plan.add(name, 5)
    plan.add("elsewhere.example", 5)
    assert Counter(plan.start()) == {"a.example": 1, "elsewhere.example": 2}


def test_hundreds_of_lines_at_one_site_cost_a_batch_no_square_of_them() -> None:
    """A table of [[destination]] with an entry for each customer, and all of them at one provider."""
    plan = Plan(max_connections=20)
    for n in range(1000):
        plan.domain(f"d{n}.example", "hosts", structs.replace(PLAIN, max_connections=10))
        plan.add(f"d{n}.example", 2)
    plan.start()
    began = time.process_time()
    for _ in range(40):
        plan.finish(plan.works[0].deliveries[0].domain)
        assert len(plan.start()) == 1
    assert time.process_time() - began < 1.0


def test_recipients_of_one_transaction_are_as_many_as_the_destination_takes() -> None:
    plan = Plan(max_recipients_per_transaction=50)
    plan.domain("picky.example", limits=structs.replace(PLAIN, max_recipients_per_transaction=3))
    plan.add("picky.example", 1, recipients=7)
    plan.add("usual.example", 1, recipients=7)
    sizes: dict[str, list[int]] = {}
    while started := plan.start():
        for domain in started:
            sizes.setdefault(domain, []).append(len(plan.works[0].deliveries))
            plan.finish(domain)
    assert sizes == {"picky.example": [3, 3, 1], "usual.example": [7]}


# Rates


def test_a_limited_destination_waits_aside_and_holds_nothing() -> None:
    plan = Plan(max_connections=2)
    plan.domain("slow.example", limits=rated("60/1m"))
    plan.add("slow.example", 5)
    plan.add("quick.example", 5)
    assert plan.start() == ["slow.example", "quick.example"]
    plan.finish("slow.example")
    assert plan.start() == ["quick.example"]
    for _ in range(3):
        plan.finish("quick.example")
        plan.start()
    assert plan.queue.round_robin.next_turn == Pacer(Rate(60, 60.0)).interval
    plan.until_turn()
    plan.finish("quick.example")
    assert plan.start() == ["slow.example"]


def test_a_status_says_how_long_mail_waits_for_its_turn() -> None:
    plan = Plan(max_rate=parse_rate("1/1m"))
    plan.add("a.example", 2)
    assert [each.turn_in(plan.tick) for each in plan.queue.shown_destinations(NOW)] == [None]
    assert plan.start() == ["a.example"]
    plan.finish("a.example")
    (destination,) = plan.queue.shown_destinations(NOW)
    turn_in = destination.turn_in(plan.tick + 10)
    assert turn_in is not None
    assert 50 <= turn_in <= 52
    plan.until_turn()
    assert [each.turn_in(plan.tick) for each in plan.queue.shown_destinations(NOW)] == [None]
    plan.start()
    assert [each.turn_in(plan.tick) for each in plan.queue.shown_destinations(NOW)] == [None], "nothing waits"


def test_the_zones_rate_is_shared_in_turns() -> None:
    plan = Plan(max_rate=parse_rate("60/1m"))
    for name in ("a.example", "b.example"):
        plan.add(name, 3)
    order = plan.start()
    for _ in range(5):
        assert plan.start() == []
        plan.until_turn()
        order += plan.start()
    assert order == ["a.example", "b.example"] * 3
    assert plan.queue.round_robin.next_turn is None


def test_lines_at_one_site_share_a_rate_in_turns() -> None:
    plan = Plan()
    for name in ("a.example", "b.example"):
        plan.domain(name, "hosts", rated("60/1m"))
        plan.add(name, 3)
    order = plan.start()
    while len(order) < 6:
        plan.finish(order[-1])
        plan.until_turn()
        order += plan.start()
    assert order == ["a.example", "b.example"] * 3


def test_a_start_that_came_to_nothing_is_given_back_at_once() -> None:
    plan = Plan()
    plan.domain("rare.example", limits=rated("1/1h"))
    plan.add("rare.example", 3)
    assert plan.start() == ["rare.example"]
    plan.finish("rare.example", LOCAL, turn=False)
    assert plan.start() == ["rare.example"]
    plan.finish("rare.example")
    assert plan.start() == []


def test_the_next_batch_need_not_wait_for_the_end_of_a_slow_one() -> None:
    plan = Plan()
    plan.domain("rare.example", limits=rated("1/1m"))
    plan.add("rare.example", 3)
    assert plan.start() == ["rare.example"]
    (work,) = plan.works
    plan.tick = 100.0
    assert plan.start() == []  # the first still has no connection
    assert plan.queue.round_robin.next_turn is None
    assert work.ticket is not None
    work.ticket.take(plan.tick)
    assert plan.start() == []
    plan.until_turn()
    assert plan.start() == ["rare.example"]


def test_a_queue_with_other_settings_goes_on_where_the_turns_are() -> None:
    plan = Plan(max_rate_per_destination=parse_rate("60/1m"))
    plan.add("a.example", 2)
    assert plan.start() == ["a.example"]
    later = Plan(plan.rates, max_rate_per_destination=parse_rate("60/1m"), max_connections=3)
    later.add("a.example", 1)
    assert later.start() == []
    # The old one's batch ends without a turn: that is for the new one to use.
    plan.finish("a.example", NO_HOST, turn=False)
    assert later.start() == ["a.example"]


def test_a_suspended_destination_is_not_brought_back_by_its_rate() -> None:
    plan = Plan()
    plan.domain("dead.example", limits=rated("60/1m"))
    plan.add("dead.example", 3)
    assert plan.start() == ["dead.example"]
    plan.finish("dead.example", NO_HOST, turn=False)
    assert len(plan.queue.take_parked()) == 1
    plan.tick = 10.0
    assert plan.start() == []


def test_mail_behind_a_probe_is_not_forgotten_when_the_clock_is_set_back() -> None:
    plan = Plan()
    plan.add("dead.example")
    plan.start()
    plan.finish("dead.example", NO_HOST)
    later = NOW + RETRY.suspend_min + 1
    plan.queue.add(plan.mail("dead.example", 2), later)
    probe = plan.queue.next_work(later)
    assert probe is not None
    assert plan.queue.next_work(later) is None
    plan.queue.finished(probe, [LOCAL], NOW)
    assert plan.queue.next_work(NOW) is not None
    assert plan.queue.window.waiting == 0


# While a backlog is worked off, half of all turns are new mail's, and the other half the backlog's


ALL = {Priority.NORMAL}


class Backlog(PlanBed):
    """Its messages have ids of their time."""

    def __init__(self, **more: Any) -> None:
        self.clock = ManualClock()
        self.ids = MessageIdSource(self.clock)
        super().__init__(**{"max_connections": 2, **more})
        self.window = self.queue.window.of(Priority.NORMAL)

    def message_id(self) -> str:
        return self.ids.next()

    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.now = self.clock.now()

    def put_in(self, *domains: str) -> None:
        self.queue.add([each for domain in domains for each in self.mail(domain)], self.now)

    def old(self, count: int) -> None:
        """A backlog that is claimed some time after it came."""
        mail = [each for number in range(count) for each in self.mail(f"old{number}.example")]
        self.advance(1.0)
        self.queue.add(mail, self.now)

    def send(self, count: int) -> list[str]:
        """To whom the next batches go."""
        self.look_up()
        return [each.domain for each in islice(self.sent(), count)]


def is_new(domains: Iterable[str]) -> list[bool]:
    return [domain.startswith("new") for domain in domains]


@pytest.mark.parametrize("proven", [True, False])
def test_a_single_for_an_idle_host_passes_a_thousand_that_came_before(*, proven: bool) -> None:
    plan = Backlog(proven=proven)
    plan.old(LOW_MARK + 1)
    assert plan.window.since is not None
    plan.put_in("new.example")
    assert "new.example" in plan.look_up()[:4]
    assert "new.example" in plan.send(4)


def test_mail_is_not_told_apart_while_little_waits_nor_in_a_zone_with_one_next_hop() -> None:
    plan = Backlog()
    plan.old(LOW_MARK)
    assert plan.window.since is None
    plan = Backlog(next_hop="hop.example")
    plan.old(2 * LOW_MARK)
    assert plan.window.since is None
    assert not wants_claim(plan.queue, (), ALL)


@pytest.mark.parametrize("proven", [True, False])
def test_the_backlog_has_its_part_of_turns_and_no_more_however_much_mail_comes(*, proven: bool) -> None:
    plan = Backlog(window=400, proven=proven)
    plan.old(150)
    plan.look_up()
    sent: list[str] = []
    for number in range(100):
        plan.put_in(*(f"new{number}-{n}.example" for n in range(2)))
        sent += plan.send(1)
    assert len(sent) == 100
    assert 100 // (FRESH_WEIGHT + 1) <= len(sent) - sum(is_new(sent)) <= 20
    list(plan.queue.drain())
    assert plan.queue.window.waiting == plan.window.new_waiting == 0


def test_new_mail_for_a_destination_with_a_backlog_takes_turns_with_that() -> None:
    plan = Backlog(window=400)
    plan.old(100)
    plan.put_in(*["old1.example"] * 5)
    first = plan.queue._lines["old1.example"].backlog(Priority.NORMAL)
    assert first.has_fresh
    assert len(list(first)) == 6
    assert [each.message_id for each in first] == sorted(each.message_id for each in first)
    taken = [first.take(1)[0].message_id for _ in range(3)]
    assert taken[1] == min(taken), "the old one is second, not last"


def test_a_destination_in_the_row_of_the_others_comes_forward_when_new_mail_for_it_comes() -> None:
    plan = Backlog(window=400, proven=True)
    plan.old(150)
    plan.look_up()
    plan.put_in("old140.example")
    assert "old140.example" in plan.send(3)


def test_new_mail_has_places_besides_a_full_window_and_not_more() -> None:
    plan = Backlog(window=80)
    plan.old(80)
    assert not wants_claim(plan.queue, ALL)
    assert wants_claim(plan.queue, ALL, ALL)
    claim = plan_claim(plan.queue, ALL, ALL)
    assert claim is not None
    assert claim.since is not None
    assert claim.limit == 20
    plan.put_in(*(f"new{number}.example" for number in range(20)))
    assert plan.window.new_waiting == 20
    assert not wants_claim(plan.queue, ALL, ALL)
    last = plan.mail("new.example")
    plan.advance(AGAIN)
    plan.queue.add(last, plan.now)
    assert plan.window.new_waiting == 0, "what was new for so long is backlog"
    assert not wants_claim(plan.queue, ALL, ALL), "one too many is in memory"
    plan.send(2)
    assert not wants_claim(plan.queue, ALL)
    assert wants_claim(plan.queue, ALL, ALL)


def test_what_is_new_does_not_make_room_for_more_than_the_window_holds() -> None:
    plan = Backlog(window=80)
    plan.old(21)
    plan.advance(1.0)
    for _ in range(20):
        claim = plan_claim(plan.queue, ALL)
        if claim is None:
            break
        plan.put_in(*(f"new{plan.queue.window.waiting + number}.example" for number in range(claim.limit)))
    assert plan.queue.window.waiting <= 80 + plan.window.new_most


def test_mail_of_one_millisecond_is_new_on_one_side_of_the_line_only() -> None:
    clock = ManualClock()
    ids = MessageIdSource(clock, worker=3)
    before = ids.next()
    clock.advance(1.0)
    line = first_at(clock.now())
    assert before < line <= ids.next()


def test_what_is_new_is_counted_aright_after_a_clock_was_set_back() -> None:
    plan = Backlog(window=80)
    plan.old(60)
    plan.ids.next()  # they never go backwards
    plan.advance(-100.0)
    plan.put_in(*(f"new{number}.example" for number in range(20)))
    assert plan.window.new_waiting == 80
    assert len(plan.send(100)) == 80
    assert plan.window.new_waiting == plan.queue.window.waiting == 0
    assert plan.queue.window.of(Priority.NORMAL).room == 80
