"""A line with one message to thousands of recipients."""

from __future__ import annotations

from tests.support.queueing import delivery
from zonerelay.model.delivery import Delivery
from zonerelay.queue.destination.backlog import Backlog

MESSAGE = "00000000000000aa"


def test_a_message_to_thousands_is_taken_and_withdrawn_one_by_one_in_order() -> None:
    line = Backlog({"example.com"})
    everybody = [delivery(f"r{number:04}@example.com", message_id=MESSAGE) for number in range(5000)]
    for each in everybody:
        line.add(each)
    for each in everybody[1::2]:
        assert line.remove(each.key)
    assert not line.remove(everybody[1].key)
    taken: list[Delivery] = []
    while line.waiting:
        taken += line.take(7)
    assert taken == everybody[::2]


def test_a_withdrawn_message_does_not_stop_the_next_one() -> None:
    line = Backlog({"example.com"})
    first, second = (
        delivery("a@example.com", message_id=MESSAGE),
        delivery("b@example.com", message_id="f" * 16),
    )
    line.add(first)
    line.add(second)
    assert line.remove(first.key)
    assert line.take(10) == (second,)
    assert line.waiting == 0
