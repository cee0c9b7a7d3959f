"""The disk queue with two failures in a row: any two calls of a batch and of the repair after it.

A bounce and the removal of what it reports are one change: after any two failures, and a crash at the second
of them, one of both is there, and never half of each.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store.builders import NOW, body_of, message_id, own_message, store_message
from tests.store.spools import Spool
from tests.support.waiting import until
from zonerelay.config.settings import Backend
from zonerelay.model.clock import SystemClock
from zonerelay.model.queue_name import queue_of
from zonerelay.store.contract import Finish, OwnMessage, Store, StoreError
from zonerelay.store.keys import group_commit, partition

CALLS = ("writev", "link", "rename", "unlink", "fsync")
BODIES = {1: b"original", 2: b"other", 3: b"refused", 5: b"bounce"}


class Faults:
    """The calls with these numbers fail while it is armed: before they do anything, or (`done`) after it."""

    def __init__(self, numbers: tuple[int, ...], *, done: bool, patches: pytest.MonkeyPatch) -> None:
        self._left = list(numbers)
        self._done = done
        self._count = 0
        self._armed = False
        self._lock = threading.Lock()
        self.on_last: Callable[[], object] = lambda: None
        for name in CALLS:
            patches.setattr(os, name, self._wrapped(getattr(os, name)))

    def arm(self, *, armed: bool = True) -> None:
        self._armed = armed

    @property
    def all_happened(self) -> bool:
        return not self._left

    def _wrapped(self, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **more: object) -> object:
            with self._lock:
                self._count += self._armed
                if not self._armed or not self._left or self._count != self._left[0]:
                    return call(*args, **more)
                if self._done:
                    with contextlib.suppress(OSError):
                        call(*args, **more)
                del self._left[0]
                if not self._left:
                    self._armed = False
                    self.on_last()
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        return counted


def queue_in(path: Path) -> Spool:
    return Spool(path, backend=Backend.DISK, clock=SystemClock())


async def found_in(store: Store) -> set[int]:
    """The messages that are there, each with its body."""
    numbers = {int(delivery.message_id, 16) async for delivery in store.scan()}
    for number in numbers:
        assert await body_of(store, message_id(number)) == BODIES[number]
    assert sum(counts.total for counts in store.counts().values()) == len(numbers)
    return numbers


@pytest.mark.proof
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
async def test_two_failures_and_a_crash_lose_neither_the_original_nor_its_bounce(
    monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    monkeypatch.setattr(partition, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(group_commit, "GATHER_LIMIT", 0.0)
    tried = first = 0
    more = True
    while more:
        first += 1
        second = first
        while True:
            second += 1
            # In memory: what is tried is the order of the calls, and a sync there costs nothing.
            with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
                if not await fail_twice(Path(name), first, second, done=done):
                    break
            tried += 1
        more = second > first + 1
    assert tried > 100


async def fail_twice(path: Path, first: int, second: int, *, done: bool) -> bool:
    """False when there were not so many calls."""
    live, crashed, where = path / "live", path / "crashed", f"calls {first} and {second}"
    with pytest.MonkeyPatch.context() as patches:
        faults = Faults((first, second), done=done, patches=patches)
        faults.on_last = lambda: shutil.copytree(live, crashed)
        async with queue_in(live) as queue:
            store = queue.store
            (original,) = await store_message(store, 1, body=BODIES[1])
            (other,) = await store_message(store, 2, body=BODIES[2])
            message, bounce = own_message(message_id(5), BODIES[5], "from@example.org")
            faults.arm()
            refused, *_ = await asyncio.gather(
                store_message(store, 3, body=BODIES[3]),
                store.settle([Finish(original), OwnMessage(message, BODIES[5], (bounce,))]),
                store.settle([Finish(other)]),
                return_exceptions=True,
            )
            if store.unhealthy() is not None:
                assert await store.usable()
            faults.arm(armed=False)
            left = await found_in(store)
            assert len(left & {1, 5}) == 1, where
            assert (3 in left) != isinstance(refused, StoreError), where
            await store.claim(queue_of("default"), 10, now=NOW)
            store = await queue.reopen()
            assert await found_in(store) == left, where
    if faults.all_happened:
        async with queue_in(crashed) as queue:
            after = await found_in(queue.store)
            assert len(after & {1, 5}) == 1, f"{where}, then a crash"
            place = crashed / "messages"
            wanted = {message_id(number) for number in after}
            await until(
                lambda: {each.name.split("-")[1] for each in place.iterdir() if "-" in each.name} == wanted
            )
    return faults.all_happened
