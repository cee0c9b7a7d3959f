"""Large bodies take turns; slow clients and small messages neither wait nor hold anybody up."""

from __future__ import annotations

import asyncio

from zonerelay.inbound.limits.memory import FAST, LargeBodies


class Upload:
    def __init__(self) -> None:
        self.held_up = False
        self.turns = 0

    def resume_reading(self) -> None:
        self.turns += 1


def uploads(count: int) -> list[Upload]:
    return [Upload() for _ in range(count)]


async def test_as_many_as_allowed_read_and_the_next_waits_for_the_first_to_end() -> None:
    turns = LargeBodies(at_once=2, patience=60)
    first, second, third, fourth = uploads(4)
    assert turns.may_read(first, FAST, 0)
    assert turns.may_read(second, FAST, 0)
    assert not turns.may_read(third, FAST, 0)
    assert not turns.may_read(fourth, FAST, 0)
    assert turns.may_read(first, FAST, 1)
    turns.leave(second)
    assert (third.turns, fourth.turns) == (1, 0)
    assert turns.may_read(third, FAST, 2)
    turns.leave(fourth)  # gone while it waited
    turns.leave(first)
    assert fourth.turns == 0
    turns.leave(third)


async def test_a_newcomer_does_not_pass_those_who_wait() -> None:
    turns = LargeBodies(at_once=1, patience=60)
    first, second, third = uploads(3)
    assert turns.may_read(first, FAST, 0)
    assert not turns.may_read(second, FAST, 0)
    turns.leave(first)
    assert second.turns == 1
    assert not turns.may_read(third, FAST, 0)
    turns.leave(second)
    assert third.turns == 1
    turns.leave(third)


async def test_a_client_that_we_have_caught_up_with_needs_no_turn() -> None:
    turns = LargeBodies(at_once=1, patience=60)
    fast, slow = uploads(2)
    assert turns.may_read(fast, FAST, 0)
    assert turns.may_read(slow, FAST - 1, 0)
    assert not turns.may_read(slow, FAST, 1)
    assert turns.may_read(fast, 100, 2)  # gives its turn away
    assert slow.turns == 1
    turns.leave(slow)


async def test_a_silent_client_loses_its_turn_to_those_who_wait_but_not_for_our_own_delay() -> None:
    turns = LargeBodies(at_once=2, patience=0.01)
    silent, ours, waiting = uploads(3)
    ours.held_up = True
    now = asyncio.get_running_loop().time()
    assert turns.may_read(silent, FAST, now)
    assert turns.may_read(ours, FAST, now)
    assert not turns.may_read(waiting, FAST, now)
    for _ in range(200):
        if waiting.turns:
            break
        await asyncio.sleep(0.001)
    assert waiting.turns == 1
    assert not turns.may_read(silent, FAST, now)  # both turns are taken: it waits like everybody
    for each in (silent, ours, waiting):
        turns.leave(each)
