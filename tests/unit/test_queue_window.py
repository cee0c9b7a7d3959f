"""While a backlog is worked off, half of all turns are new mail's, and the other half the backlog's."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import pytest

from tests.support.plans import PlanBed
from tests.support.queueing import plan_claim, wants_claim
from zonerelay.model.clock import ManualClock
from zonerelay.model.message_id import MessageIdSource, first_at
from zonerelay.model.queue_name import Priority
from zonerelay.queue.destination.backlog import FRESH_WEIGHT
from zonerelay.queue.zone.window import AGAIN, LOW_MARK

ALL = {Priority.NORMAL}


class Plan(PlanBed):
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
    plan = Plan(proven=proven)
    plan.old(LOW_MARK + 1)
    assert plan.window.since is not None
    plan.put_in("new.example")
    assert "new.example" in plan.look_up()[:4]
    assert "new.example" in plan.send(4)


def test_mail_is_not_told_apart_while_little_waits_nor_in_a_zone_with_one_next_hop() -> None:
    plan = Plan()
    plan.old(LOW_MARK)
    assert plan.window.since is None
    plan = Plan(next_hop="hop.example")
    plan.old(2 * LOW_MARK)
    assert plan.window.since is None
    assert not wants_claim(plan.queue, (), ALL)


@pytest.mark.parametrize("proven", [True, False])
def test_the_backlog_has_its_part_of_the_turns_and_no_more_however_much_new_mail_comes(
    *, proven: bool
) -> None:
    plan = Plan(window=400, proven=proven)
    plan.old(150)
    plan.look_up()
    sent: list[str] = []
    for number in range(100):
        plan.put_in(*(f"new{number}-{n}.example" for n in range(2)))
        sent += plan.send(1)
    assert len(sent) == 100
    assert 100 // (FRESH_WEIGHT + 1) <= len(sent) - sum(is_new(sent)) <= 20
    list(plan.queue.drain())
    assert plan.queue.waiting == plan.window.new_waiting == 0


def test_new_mail_for_a_destination_with_a_backlog_takes_turns_with_that() -> None:
    plan = Plan(window=400)
    plan.old(100)
    plan.put_in(*["old1.example"] * 5)
    first = plan.queue._lines["old1.example"].backlog(Priority.NORMAL)
    assert first.has_fresh
    assert len(list(first)) == 6
    assert [each.message_id for each in first] == sorted(each.message_id for each in first)
    taken = [first.take(1)[0].message_id for _ in range(3)]
    assert taken[1] == min(taken), "the old one is second, not last"


def test_a_destination_in_the_row_of_the_others_comes_forward_when_new_mail_for_it_comes() -> None:
    plan = Plan(window=400, proven=True)
    plan.old(150)
    plan.look_up()
    plan.put_in("old140.example")
    assert "old140.example" in plan.send(3)


def test_new_mail_has_places_besides_a_full_window_and_not_more() -> None:
    plan = Plan(window=80)
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
    plan = Plan(window=80)
    plan.old(21)
    plan.advance(1.0)
    for _ in range(20):
        claim = plan_claim(plan.queue, ALL)
        if claim is None:
            break
        plan.put_in(*(f"new{plan.queue.waiting + number}.example" for number in range(claim.limit)))
    assert plan.queue.waiting <= 80 + plan.window.new_most


def test_mail_of_one_millisecond_is_new_on_one_side_of_the_line_only() -> None:
    clock = ManualClock()
    ids = MessageIdSource(clock, worker=3)
    before = ids.next()
    clock.advance(1.0)
    line = first_at(clock.now())
    assert before < line <= ids.next()


def test_what_is_new_is_counted_aright_after_a_clock_was_set_back() -> None:
    plan = Plan(window=80)
    plan.old(60)
    plan.ids.next()  # they never go backwards
    plan.advance(-100.0)
    plan.put_in(*(f"new{number}.example" for number in range(20)))
    assert plan.window.new_waiting == 80
    assert len(plan.send(100)) == 80
    assert plan.window.new_waiting == plan.queue.waiting == 0
    assert plan.queue.window.of(Priority.NORMAL).room == 80
