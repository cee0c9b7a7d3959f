"""Remembered passwords, and the queue before the two threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from zonerelay.inbound.password_check import (
    MAX_REMEMBERED,
    MAX_WAITING,
    MAX_WAITING_PER_CLIENT,
    REMEMBERED_FOR,
    THREADS,
    BusyError,
    ClosedError,
    PasswordChecks,
    RememberedPasswords,
)

SECRET = bytes(range(32))


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
    assert len(remembered) == 0


def test_user_password_and_hash_are_all_in_the_key_and_not_run_together(
    remembered: RememberedPasswords,
) -> None:
    triples = [("a", "bc", "d"), ("ab", "c", "d"), ("a", "b", "cd"), ("a", "bc", "e"), ("A", "bc", "d")]
    assert len({remembered.key(*triple) for triple in triples}) == len(triples)
    assert remembered.key("a", "bc", "d") != RememberedPasswords(SECRET[::-1]).key("a", "bc", "d")


def test_the_memory_is_bounded_and_forgets_the_oldest(remembered: RememberedPasswords) -> None:
    keys = [remembered.key(str(number), "pw", "hash") for number in range(MAX_REMEMBERED + 1)]
    for key in keys:
        remembered.add(key, 0.0)
    assert len(remembered) == MAX_REMEMBERED
    assert not remembered.holds(keys[0], 1.0)
    assert remembered.holds(keys[1], 1.0)


def test_a_secret_that_can_be_guessed_is_refused() -> None:
    with pytest.raises(ValueError, match="16 octets"):
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


async def started(
    checks: PasswordChecks, keys: range, *, client: str = "", password: str = "pw"
) -> list[asyncio.Task[bool]]:
    tasks = [
        asyncio.create_task(checks.check(str(key).encode(), "pw", password, client=client or f"client {key}"))
        for key in keys
    ]
    await asyncio.sleep(0)
    return tasks


async def test_more_than_the_queue_holds_is_busy_and_the_queue_is_served(gate: Gate) -> None:
    checks = PasswordChecks(gate.matches)
    tasks = await started(checks, range(THREADS + MAX_WAITING))
    with pytest.raises(BusyError):
        await checks.check(b"one more", "pw", "pw", client="another")
    gate.open.set()
    assert all(await asyncio.gather(*tasks))
    assert await checks.check(b"one more", "pw", "pw", client="another")
    assert not await checks.check(b"wrong", "pw", "other", client="another")
    checks.close()


async def test_one_client_cannot_fill_the_queue(gate: Gate) -> None:
    checks = PasswordChecks(gate.matches)
    tasks = await started(checks, range(MAX_WAITING_PER_CLIENT), client="greedy")
    with pytest.raises(BusyError):
        await checks.check(b"one more", "pw", "pw", client="greedy")
    tasks += await started(checks, range(100, 101), client="modest")
    gate.open.set()
    assert all(await asyncio.gather(*tasks))
    assert checks._of_client == {}
    checks.close()


async def test_equal_checks_at_one_time_are_one_hash(gate: Gate) -> None:
    checks = PasswordChecks(gate.matches)
    tasks = [*await started(checks, range(1)), *await started(checks, range(1))]
    gate.open.set()
    assert await asyncio.gather(*tasks) == [True, True]
    assert gate.calls == 1
    checks.close()


async def test_who_leaves_does_not_take_the_answer_from_others(gate: Gate) -> None:
    checks = PasswordChecks(gate.matches)
    [leaving] = await started(checks, range(1))
    [staying] = await started(checks, range(1))
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    gate.open.set()
    assert await staying
    checks.close()


async def test_an_error_of_the_hash_is_everybodys_and_leaves_no_trace(gate: Gate) -> None:
    checks = PasswordChecks(gate.matches)
    tasks = await started(checks, range(3), password="fault")
    gate.open.set()
    for error in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(error, MemoryError)
    assert checks._running == {}
    assert checks._of_client == {}
    checks.close()


async def test_closing_answers_what_waits_without_hashing_it(gate: Gate) -> None:
    checks = PasswordChecks(gate.matches)
    tasks = await started(checks, range(10))
    for _ in range(THREADS):
        assert await asyncio.to_thread(gate.begun.acquire, timeout=10)
    checks.close()
    gate.open.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert answers[:THREADS] == [True, True]
    assert all(isinstance(answer, ClosedError) for answer in answers[THREADS:])
    assert gate.calls == THREADS
    with pytest.raises(ClosedError):
        await checks.check(b"late", "pw", "pw", client="a")
