"""While a backlog is worked off, half of all turns are new mail's, and the other half the backlog's."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.support.queueing import DELIVERED, delivery, plan_claim, prove, route_to, wants_claim
from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import Delivery
from zonerelay.model.message_id import MessageIdSource, first_at
from zonerelay.model.queue_name import Priority
from zonerelay.queue.destination.backlog import FRESH_WEIGHT
from zonerelay.queue.zone.plan import WINDOW, ZonePlan
from zonerelay.queue.zone.window import AGAIN, LOW_MARK

ALL = {Priority.NORMAL}


class Relay:
    """A zone's plan with a clock; every domain has a host of its own."""

    def __init__(self, zone: ZoneSettings | None = None, window: int = WINDOW) -> None:
        self.clock = ManualClock()
        self.ids = MessageIdSource(self.clock)
        self.queue = ZonePlan(zone or ZoneSettings(max_connections=2), RetrySettings(), window=window)
        self.window = self.queue._window.of(Priority.NORMAL)

    def mail(self, *domains: str) -> list[Delivery]:
        return [delivery(f"u@{domain}", message_id=self.ids.next()) for domain in domains]

    def add(self, *domains: str) -> None:
        self.queue.add(self.mail(*domains), self.clock.now())

    def old(self, count: int) -> None:
        """A backlog that is claimed some time after it came."""
        mail = self.mail(*(f"old{number}.example" for number in range(count)))
        self.clock.advance(1.0)
        self.queue.add(mail, self.clock.now())

    def look_up(self) -> list[str]:
        domains = self.queue.take_look_ups()
        for domain in domains:
            self.queue.found(domain, route_to("default", f"mx.{domain}"), self.clock.now())
        return domains

    def send(self, count: int) -> list[str]:
        """To whom the next batches go."""
        sent = []
        for _ in range(count):
            while self.look_up():
                pass
            work = self.queue.next_work(self.clock.now())
            if work is None:
                break
            sent.append(work.deliveries[0].domain)
            self.queue.finished(work, [DELIVERED], self.clock.now())
        return sent


def is_new(domains: Iterable[str]) -> list[bool]:
    return [domain.startswith("new") for domain in domains]


@pytest.mark.parametrize("proven", [True, False])
def test_a_single_for_an_idle_host_passes_a_thousand_that_came_before(*, proven: bool) -> None:
    relay = Relay()
    relay.old(LOW_MARK + 1)
    assert relay.window.since is not None
    relay.add("new.example")
    assert "new.example" in relay.look_up()[:4]
    while relay.look_up():
        pass
    if proven:
        prove(relay.queue)
    assert "new.example" in relay.send(4)


def test_mail_is_not_told_apart_while_little_waits_nor_in_a_zone_with_one_next_hop() -> None:
    relay = Relay()
    relay.old(LOW_MARK)
    assert relay.window.since is None
    relay = Relay(ZoneSettings(next_hop="hop.example"))
    relay.old(2 * LOW_MARK)
    assert relay.window.since is None
    assert not wants_claim(relay.queue, (), ALL)


@pytest.mark.parametrize("proven", [True, False])
def test_the_backlog_has_its_part_of_the_turns_and_no_more_however_much_new_mail_comes(
    *, proven: bool
) -> None:
    relay = Relay(window=400)
    relay.old(150)
    while relay.look_up():
        pass
    if proven:
        prove(relay.queue)
    sent: list[str] = []
    for number in range(100):
        relay.add(*(f"new{number}-{n}.example" for n in range(2)))
        sent += relay.send(1)
    assert len(sent) == 100
    assert 100 // (FRESH_WEIGHT + 1) <= len(sent) - sum(is_new(sent)) <= 20
    list(relay.queue.drain())
    assert relay.queue.waiting == relay.window.new_waiting == 0


def test_new_mail_for_a_destination_with_a_backlog_takes_turns_with_that() -> None:
    relay = Relay(window=400)
    relay.old(100)
    relay.add(*["old1.example"] * 5)
    first = relay.queue._lines["old1.example"].backlog(Priority.NORMAL)
    assert first.has_fresh
    assert len(list(first)) == 6
    assert [each.message_id for each in first] == sorted(each.message_id for each in first)
    taken = [first.take(1)[0].message_id for _ in range(3)]
    assert taken[1] == min(taken), "the old one is second, not last"


def test_a_destination_in_the_row_of_the_others_comes_forward_when_new_mail_for_it_comes() -> None:
    relay = Relay(window=400)
    relay.old(150)
    while relay.look_up():
        pass
    prove(relay.queue)
    relay.add("old140.example")
    assert "old140.example" in relay.send(3)


def test_new_mail_has_places_besides_a_full_window_and_not_more() -> None:
    relay = Relay(window=80)
    relay.old(80)
    assert not wants_claim(relay.queue, ALL)
    assert wants_claim(relay.queue, ALL, ALL)
    plan = plan_claim(relay.queue, ALL, ALL)
    assert plan is not None
    assert plan.since is not None
    assert plan.limit == 20
    relay.add(*(f"new{number}.example" for number in range(20)))
    assert relay.window.new_waiting == 20
    assert not wants_claim(relay.queue, ALL, ALL)
    last = relay.mail("new.example")
    relay.clock.advance(AGAIN)
    relay.queue.add(last, relay.clock.now())
    assert relay.window.new_waiting == 0, "what was new for so long is backlog"
    assert not wants_claim(relay.queue, ALL, ALL), "one too many is in memory"
    relay.send(2)
    assert not wants_claim(relay.queue, ALL)
    assert wants_claim(relay.queue, ALL, ALL)


def test_what_is_new_does_not_make_room_for_more_than_the_window_holds() -> None:
    relay = Relay(window=80)
    relay.old(21)
    relay.clock.advance(1.0)
    for _ in range(20):
        plan = plan_claim(relay.queue, ALL)
        if plan is None:
            break
        relay.add(*(f"new{relay.queue.waiting + number}.example" for number in range(plan.limit)))
    assert relay.queue.waiting <= 80 + relay.window.new_most


def test_mail_of_one_millisecond_is_new_on_one_side_of_the_line_only() -> None:
    clock = ManualClock()
    ids = MessageIdSource(clock, worker=3)
    before = ids.next()
    clock.advance(1.0)
    line = first_at(clock.now())
    assert before < line <= ids.next()


def test_what_is_new_is_counted_aright_after_a_clock_was_set_back() -> None:
    relay = Relay(window=80)
    relay.old(60)
    relay.ids.next()  # they never go backwards
    relay.clock.advance(-100.0)
    relay.add(*(f"new{number}.example" for number in range(20)))
    assert relay.window.new_waiting == 80
    assert len(relay.send(100)) == 80
    assert relay.window.new_waiting == relay.queue.waiting == 0
    assert relay.queue._window.of(Priority.NORMAL).room == 80
