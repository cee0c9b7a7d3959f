"""Urgent mail first and nothing waits for ever: in turns, in the ring, in a line, in claims."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from tests.support.queueing import DELIVERED, delivery, plan_claim, route_to, wants_claim
from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.model.delivery import Delivery
from zonerelay.model.queue_name import Priority, parse_queue, queue_of, queues_of
from zonerelay.queue.destination.backlog import STRIDE, Precedence
from zonerelay.queue.zone.plan import ZonePlan

NOW = 1_700_000_000.0
HIGH, NORMAL, BULK = Priority


def mail(n: int, priority: Priority, domain: str = "example.com") -> Delivery:
    return delivery(f"u@{domain}", message_id=f"{n:016x}", queue=queue_of("default", priority))


def plan(*claims: tuple[Priority, int], connections: int = 1, **zone: object) -> ZonePlan:
    """One window each of so many deliveries, to one destination each where `domains` is not given."""
    queue = ZonePlan(ZoneSettings(max_connections=connections, **zone), RetrySettings())  # type: ignore[arg-type]  # fields by name
    for priority, count in claims:
        add(queue, priority, count)
    return queue


def add(queue: ZonePlan, priority: Priority, count: int, *, domain: str = "example.com") -> None:
    queue.add([mail(n, priority, domain) for n in range(count)], NOW, priority)
    for each in queue.take_look_ups():
        queue.found(each, route_to("default", each), NOW)


def sent(queue: ZonePlan, count: int) -> list[Priority]:
    """The priorities of the next messages, with one connection."""
    order = []
    for _ in range(count):
        work = queue.next_work(NOW)
        assert work is not None
        order.append(work.deliveries[0].priority)
        queue.finished(work, [DELIVERED], NOW)
    return order


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


def test_shares_of_a_long_run() -> None:
    precedence = Precedence()
    assert Counter(precedence.pick(Priority) for _ in range(310)) == {HIGH: 250, NORMAL: 50, BULK: 10}


def test_urgent_mail_has_the_next_turn_in_a_line_and_the_rest_moves_on() -> None:
    queue = plan((BULK, 200), (NORMAL, 200))
    sent(queue, 40)
    add(queue, HIGH, 3)
    order = sent(queue, 20)
    assert HIGH in order[:1]
    assert order.count(HIGH) == 3
    assert {NORMAL, BULK} <= set(sent(queue, 40))


def test_within_a_priority_the_oldest_goes_first() -> None:
    queue = plan((HIGH, 3), (NORMAL, 3))
    ids: dict[Priority, list[str]] = {HIGH: [], NORMAL: []}
    while (work := queue.next_work(NOW)) is not None:
        ids[work.deliveries[0].priority].append(work.message_id)
        queue.finished(work, [DELIVERED], NOW)
    for found in ids.values():
        assert found == sorted(found)
        assert len(found) == 3


def test_a_destination_with_urgent_mail_is_served_before_hundreds_of_others() -> None:
    queue = plan()
    for n in range(300):
        add(queue, NORMAL, 2, domain=f"d{n}.example")
    add(queue, HIGH, 1, domain="idle.example")
    assert HIGH in sent(queue, 2)


def test_a_destination_that_stands_in_the_ring_already_is_hastened() -> None:
    queue = plan()
    for n in range(300):
        add(queue, NORMAL, 2, domain=f"d{n}.example")
    add(queue, HIGH, 1, domain="d299.example")
    assert HIGH in sent(queue, 2)
    assert len(sent(queue, 599)) == 599
    assert queue.next_work(NOW) is None
    assert queue.waiting == 0


def test_a_full_window_of_bulk_mail_leaves_room_for_urgent_mail() -> None:
    queue = ZonePlan(ZoneSettings(next_hop="hop"), RetrySettings(), window=100)
    queue.add([mail(n, BULK) for n in range(100)], NOW, BULK)
    assert not wants_claim(queue, {BULK})
    claim = plan_claim(queue, {HIGH, BULK})
    assert claim is not None
    assert (claim.priority, claim.limit) == (HIGH, 100)


def test_claims_take_turns_too() -> None:
    queue = ZonePlan(ZoneSettings(), RetrySettings())
    plans = [plan_claim(queue, set(Priority)) for _ in range(31)]
    assert Counter(each.priority for each in plans if each is not None) == {HIGH: 25, NORMAL: 5, BULK: 1}


def test_withdrawn_and_drained_deliveries_are_found_whatever_their_priority() -> None:
    queue = plan((HIGH, 2), (NORMAL, 2), (BULK, 2))
    queue.withdraw([mail(0, HIGH).key, mail(1, BULK).key])
    assert queue.waiting == 4
    assert [each.priority for each in chain.from_iterable(queue.drain())] == [HIGH, NORMAL, NORMAL, BULK]
    assert queue.waiting == 0


def test_a_destination_that_is_often_hastened_has_no_more_turns_than_its_neighbours() -> None:
    queue = plan()
    add(queue, NORMAL, 600, domain="hastened.example")
    add(queue, NORMAL, 600, domain="other.example")
    for n in range(100):
        sent(queue, 2)
        queue.add([mail(1000 + n, HIGH, "hastened.example")], NOW, HIGH)
    turns = Counter[str]()
    for _ in range(200):
        work = queue.next_work(NOW)
        assert work is not None
        if work.deliveries[0].priority is NORMAL:
            turns[work.deliveries[0].domain] += 1
        queue.finished(work, [DELIVERED], NOW)
    assert abs(turns["hastened.example"] - turns["other.example"]) <= 2
