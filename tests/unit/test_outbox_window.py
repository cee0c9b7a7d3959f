"""How many rows of which queue a relay has at hand."""

from __future__ import annotations

import random

from zonerelay.model.queue_name import QueueName, queue_of
from zonerelay.outbox.rows import claims
from zonerelay.outbox.rows.claims import BATCH, FEW, MOST, RESERVE, SHARE, ClaimWindow

SLOW = queue_of("slow")


def fill(held: ClaimWindow, queues: dict[QueueName, int]) -> list[QueueName]:
    """Claim as long as there is room, from endless queues first come, first served; who got something."""
    came: list[QueueName] = []
    while room := held.room():
        full = held.full()
        open_ = [queue for queue, left in queues.items() if left and queue not in full]
        if not open_:
            break
        for _ in range(room):
            queue = next((each for each in open_ if queues[each]), None)
            if queue is None:
                break
            queues[queue] -= 1
            held.add(queue)
            came.append(queue)
    return came


def test_one_queue_alone_has_its_share_and_no_more() -> None:
    held = ClaimWindow()
    assert len(fill(held, {SLOW: 10_000})) == SHARE
    assert list(held.full()) == [SLOW]


def test_however_many_are_slow_the_next_queue_comes_in() -> None:
    held, quick = ClaimWindow(), queue_of("quick")
    for number in range(150):
        fill(held, {queue_of(f"slow {number}"): 500})
        assert quick in fill(held, {quick: 1})
        held.remove(quick)
        assert sum(held._counts.values()) <= MOST + RESERVE


def test_the_end_is_the_end_and_the_first_that_leaves_makes_room() -> None:
    held = ClaimWindow()
    fill(held, {queue_of(f"slow {number}"): 500 for number in range(1000)})
    assert sum(held._counts.values()) == MOST + RESERVE
    assert held.room() == 0
    looks = [held.remove(queue) for queue in list(held.queues)[-FEW:]]
    assert looks[-1]
    assert held.room() == FEW


def test_a_queue_that_has_half_of_its_share_left_is_filled_up_again() -> None:
    held = ClaimWindow()
    fill(held, {SLOW: SHARE})
    for _ in range(SHARE // 2 - 1):
        assert not held.remove(SLOW)
        assert SLOW in held.full()
    assert held.remove(SLOW)
    assert not held.full()
    assert held.room() == BATCH


def test_nothing_is_forgotten_whatever_comes_and_goes() -> None:
    """The counts add up, and a queue with nothing at hand is never passed over while there is room."""
    chance, held, count = random.Random(7), ClaimWindow(), {queue_of(str(n)): 0 for n in range(40)}
    for _ in range(20_000):
        queue = chance.choice(list(count))
        if chance.random() < 0.6 and held.room() and queue not in held.full():
            held.add(queue)
            count[queue] += 1
        elif count[queue]:
            held.remove(queue)
            count[queue] -= 1
        assert not any(not count[each] for each in held.full())
    assert held.queues == {each for each, left in count.items() if left}
    assert sum(count.values()) <= claims.MOST + claims.RESERVE
