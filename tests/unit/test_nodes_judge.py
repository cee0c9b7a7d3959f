"""The judge of the three-node tests finds what must not be."""

from __future__ import annotations

from tests.support.nodes.judge import Fault, above_rate, judge, most_within
from tests.support.nodes.sink import Arrival, Begun

FAULT = Fault("kill", frozenset({"a"}), at=10.0, known=10.1)


def arrivals(*copies: tuple[str, float, float]) -> dict[str, list[Arrival]]:
    return {"t1": [Arrival("t1", node, began, ended, began) for node, began, ended in copies]}


def test_what_was_acknowledged_and_never_came_is_missing() -> None:
    assert judge({"t1", "t2"}, arrivals(("a", 1, 2)), []).missing == {"t2"}


def test_a_copy_is_explained_by_a_fault_of_the_node_that_sent_the_other_just_then() -> None:
    verdict = judge({"t1"}, arrivals(("a", 9.9, 10.0), ("b", 13.0, 13.1)), [FAULT])
    assert verdict.repeated == {"kill": 1}
    assert not verdict.unexplained


def test_a_copy_of_what_was_done_long_before_the_fault_or_begun_after_it_is_not_explained() -> None:
    for copies in ((("a", 5.0, 5.1), ("b", 13.0, 13.1)), (("a", 11.0, 11.1), ("b", 13.0, 13.1))):
        assert judge({"t1"}, arrivals(*copies), [FAULT]).unexplained


def test_a_copy_is_not_explained_by_the_fault_of_a_node_that_did_not_send_it() -> None:
    assert judge({"t1"}, arrivals(("c", 9.9, 10.0), ("b", 13.0, 13.1)), [FAULT]).unexplained


def test_a_machine_that_is_late_with_everything_explains_that_much_more() -> None:
    for copy in (("a", 8.0, 8.6), ("a", 10.5, 10.6)):
        copies = arrivals(copy, ("b", 13.0, 13.1))
        assert judge({"t1"}, copies, [FAULT], slack=0.3).unexplained
        assert not judge({"t1"}, copies, [FAULT], slack=0.5).unexplained


def test_a_copy_that_may_have_begun_in_time_was_only_read_late() -> None:
    late = Arrival("t1", "a", began=10.4, ended=10.5, earliest=10.0)
    assert not judge({"t1"}, {"t1": [late, *arrivals(("b", 13.0, 13.1))["t1"]]}, [FAULT]).unexplained


def test_two_nodes_that_send_it_at_the_same_time_are_found() -> None:
    assert judge({"t1"}, arrivals(("c", 20.0, 20.5), ("b", 20.2, 20.6)), [FAULT]).at_once


def begun(*moments: float, late: float = 0.0) -> list[Begun]:
    return [Begun("a", "limited.test", at, at + late) for at in moments]


def test_more_than_a_rate_allows_is_found_in_any_second() -> None:
    assert not above_rate(begun(0.0, 0.5, 1.0, 1.5), 2, 1.0)
    ((first, last),) = above_rate(begun(0.0, 0.6, 1.1, 1.5), 2, 1.0)
    assert (first.at, last.at) == (0.6, 1.5)
    assert most_within(begun(0.0, 0.6, 1.1, 1.5), 1.0) == 3


def test_what_the_receiver_read_late_is_not_held_against_the_rate() -> None:
    assert not above_rate(begun(0.0, 0.5, 0.9, late=0.1), 2, 1.0)
    assert above_rate(begun(0.0, 0.5, 0.8, late=0.1), 2, 1.0)
