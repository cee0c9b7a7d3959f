"""Remembered passwords, and the lanes before the threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from zonerelay.inbound.access.auth import (
    MAX_WAITING,
    MAX_WAITING_PER_CLIENT,
    MIN_REMEMBERED,
    REMEMBERED_FOR,
    ChecksBusyError,
    ClosedError,
    GoneError,
    PasswordChecks,
    RememberedPasswords,
)

SECRET = bytes(range(32))

QUEUES = 2


@pytest.fixture
def remembered() -> RememberedPasswords:
    return RememberedPasswords(SECRET)


def test_a_right_password_is_remembered_for_ten_minutes_from_its_check(
    remembered: RememberedPasswords,
) -> None:
    key = remembered.key("app", "pw", "hash")
    assert not remembered.holds(key, 0.0)
    remembered.add(key, 0.0)
    assert remembered.holds(key, REMEMBERED_FOR - 1)
    assert not remembered.holds(key, REMEMBERED_FOR)
    assert len(remembered.until) == 0


def test_user_password_and_hash_are_all_in_the_key_and_not_run_together(
    remembered: RememberedPasswords,
) -> None:
    triples = [("a", "bc", "d"), ("ab", "c", "d"), ("a", "b", "cd"), ("a", "bc", "e"), ("A", "bc", "d")]
    assert len({remembered.key(*triple) for triple in triples}) == len(triples)
    assert remembered.key("a", "bc", "d") != RememberedPasswords(SECRET[::-1]).key("a", "bc", "d")


def test_the_memory_is_bounded_and_forgets_the_oldest(remembered: RememberedPasswords) -> None:
    keys = [remembered.key(str(number), "pw", "hash") for number in range(MIN_REMEMBERED + 1)]
    for key in keys:
        remembered.add(key, 0.0)
    assert len(remembered.until) == MIN_REMEMBERED
    assert not remembered.holds(keys[0], 1.0)
    assert remembered.holds(keys[1], 1.0)
    remembered.until.limit = MIN_REMEMBERED + 2
    for number in range(3):
        remembered.add(remembered.key(f"another {number}", "pw", "hash"), 0.0)
    assert len(remembered.until) == MIN_REMEMBERED + 2


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes"):
        RememberedPasswords(b"short")


class Gate:
    """A hash function that waits to be let through, and counts."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.begun = threading.Semaphore(0)
        self.calls = 0

    def matches(self, stored_hash: str, password: str) -> bool:
        self.calls += 1
        self.begun.release()
        assert self.open.wait(10)
        if password == "fault":
            raise MemoryError
        return stored_hash == password


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.open.set()


@pytest.fixture
async def checks(gate: Gate) -> AsyncIterator[PasswordChecks]:
    checks = PasswordChecks(gate.matches)
    yield checks
    gate.open.set()
    checks.close()


async def check(checks: PasswordChecks, key: bytes, password: str = "pw", **more: Any) -> bool:
    entered = checks.enter(key, "pw", password, **{"regular": False, "rank": lambda: 0, **more})
    try:
        return await asyncio.shield(entered.done)
    except asyncio.CancelledError:
        checks.leave(entered)
        raise


async def started(checks: PasswordChecks, keys: range, **more: Any) -> list[asyncio.Task[bool]]:
    tasks = [
        asyncio.create_task(check(checks, str(key).encode(), **{"client": f"client {key}", **more}))
        for key in keys
    ]
    await asyncio.sleep(0)
    return tasks


async def test_more_than_the_queue_holds_is_busy_and_the_queue_is_served(
    gate: Gate, checks: PasswordChecks
) -> None:
    tasks = await started(checks, range(1 + MAX_WAITING))
    with pytest.raises(ChecksBusyError):
        await check(checks, b"one more", client="another")
    gate.open.set()
    assert all(await asyncio.gather(*tasks))
    assert await check(checks, b"one more", client="another")
    assert not await check(checks, b"wrong", "other", client="another")


async def test_one_client_cannot_fill_the_queue(gate: Gate, checks: PasswordChecks) -> None:
    tasks = await started(checks, range(MAX_WAITING_PER_CLIENT), client="greedy")
    with pytest.raises(ChecksBusyError):
        await check(checks, b"one more", client="greedy")
    tasks += await started(checks, range(100, 101), client="modest")
    gate.open.set()
    assert all(await asyncio.gather(*tasks))
    assert checks._checks == {}


async def test_equal_checks_at_one_time_are_one_hash(gate: Gate, checks: PasswordChecks) -> None:
    tasks = [*await started(checks, range(1)), *await started(checks, range(1))]
    gate.open.set()
    assert await asyncio.gather(*tasks) == [True, True]
    assert gate.calls == 1


async def test_who_leaves_does_not_take_the_answer_from_others(gate: Gate, checks: PasswordChecks) -> None:
    [leaving] = await started(checks, range(1))
    [staying] = await started(checks, range(1))
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    gate.open.set()
    assert await staying


async def test_an_error_of_the_hash_is_everybodys_and_leaves_no_trace(
    gate: Gate, checks: PasswordChecks
) -> None:
    tasks = await started(checks, range(3), password="fault")
    gate.open.set()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(error, MemoryError)
    assert checks._checks == {}


async def test_closing_answers_what_waits_without_hashing_it(gate: Gate, checks: PasswordChecks) -> None:
    tasks = await started(checks, range(5))
    tasks += await started(checks, range(5, 10), regular=True)
    for _ in range(QUEUES):
        assert await asyncio.to_thread(gate.begun.acquire, timeout=10)
    checks.close()
    gate.open.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert [answers.pop(5), answers.pop(0)] == [True, True]
    assert all(isinstance(answer, ClosedError) for answer in answers)
    assert gate.calls == QUEUES
    with pytest.raises(ClosedError):
        await check(checks, b"late", client="a")


async def test_regulars_do_not_wait_for_strangers_who_have_one_lane(
    gate: Gate, checks: PasswordChecks
) -> None:
    strangers = await started(checks, range(1 + MAX_WAITING))
    assert await asyncio.to_thread(gate.begun.acquire, timeout=10)
    [regular] = await started(checks, range(100, 101), regular=True)
    assert await asyncio.to_thread(gate.begun.acquire, timeout=10)
    assert gate.calls == QUEUES  # nothing else of 66
    gate.open.set()
    assert await regular
    await asyncio.gather(*strangers)


async def test_with_cores_regulars_have_all_of_them_and_strangers_all_but_one(gate: Gate) -> None:
    checks = PasswordChecks(gate.matches, cores=3)
    strangers = await started(checks, range(10))
    regulars = await started(checks, range(100, 110), regular=True)
    for _ in range(2 + 3):
        assert await asyncio.to_thread(gate.begun.acquire, timeout=10)
    assert not await asyncio.to_thread(gate.begun.acquire, timeout=0.2)
    gate.open.set()
    assert all(await asyncio.gather(*strangers, *regulars))
    checks.close()


async def test_strangers_come_in_the_order_of_what_has_failed_where_they_come_from(
    gate: Gate, checks: PasswordChecks
) -> None:
    order: list[str] = []

    def note(name: str) -> Callable[[asyncio.Task[bool]], None]:
        return lambda _: order.append(name)

    await started(checks, range(1))
    for key, (name, rank) in enumerate({"third": 7, "second": 2, "first": 0}.items(), 1):
        [task] = await started(checks, range(key, key + 1), rank=lambda rank=rank: rank)
        task.add_done_callback(note(name))
    [last] = await started(checks, range(9, 10), rank=lambda: 7)
    gate.open.set()
    await last
    assert order == ["first", "second", "third"]


async def test_where_there_is_no_room_the_one_with_the_most_failures_goes(
    gate: Gate, checks: PasswordChecks
) -> None:
    guessing = await started(checks, range(1 + MAX_WAITING), rank=lambda: 3)
    [fresh] = await started(checks, range(100, 101))
    with pytest.raises(ChecksBusyError):
        await check(checks, b"guess", client="another", rank=lambda: 3)
    gate.open.set()
    assert await fresh
    answers = await asyncio.gather(*guessing, return_exceptions=True)
    assert [number for number, answer in enumerate(answers) if isinstance(answer, ChecksBusyError)] == [
        MAX_WAITING
    ]
    assert checks._checks == {}


async def test_what_nobody_waits_for_or_a_lock_has_overtaken_is_not_computed(
    gate: Gate, checks: PasswordChecks
) -> None:
    lock: list[int | None] = [0]
    first, left, *locked = await started(checks, range(4), rank=lambda: lock[0])
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    lock[0] = None
    gate.open.set()
    assert await first
    for answer in await asyncio.gather(*locked, return_exceptions=True):
        assert isinstance(answer, GoneError)
    assert gate.calls == 1
    assert checks._checks == {}


async def test_a_check_that_a_regular_waits_for_too_moves_to_the_lane_of_regulars(
    gate: Gate, checks: PasswordChecks
) -> None:
    strangers = await started(checks, range(3))
    [regular] = await started(checks, range(2, 3), regular=True)
    for _ in range(QUEUES):
        assert await asyncio.to_thread(gate.begun.acquire, timeout=10)
    gate.open.set()
    assert await regular
    assert all(await asyncio.gather(*strangers))
    assert gate.calls == 3
