"""Urgent mail first and nothing waits for ever: in turns, in the ring, in a line, in claims."""

from __future__ import annotations

from collections import Counter
from itertools import chain, islice

from hypothesis import given
from hypothesis import strategies as st

from tests.support.plans import PlanBed
from tests.support.queueing import plan_claim, wants_claim
from zonerelay.model.queue_name import Priority, parse_queue, queue_of, queues_of
from zonerelay.queue.destination.backlog import STRIDE, Precedence

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


def test_shares_of_a_long_run() -> None:
    precedence = Precedence()
    assert Counter(precedence.pick(Priority) for _ in range(310)) == {HIGH: 250, NORMAL: 50, BULK: 10}


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
    assert plan.queue.waiting == 0


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
    assert plan.queue.waiting == 6
    left = [each.priority for each in chain.from_iterable(plan.queue.drain())]
    assert left == [HIGH, HIGH, NORMAL, NORMAL, BULK, BULK]
    assert plan.queue.waiting == 0


def test_a_destination_that_is_often_hastened_has_no_more_turns_than_its_neighbours() -> None:
    plan = Plan()
    plan.add("hastened.example", 600, priority=NORMAL)
    plan.add("other.example", 600, priority=NORMAL)
    for _ in range(100):
        plan.priorities(2)
        plan.add("hastened.example", priority=HIGH)
    turns = Counter(each.domain for each in islice(plan.sent(), 200) if each.priority is NORMAL)
    assert abs(turns["hastened.example"] - turns["other.example"]) <= 2
