"""The calls by which a disk queue changes its files: a crash before any of them, and two that fail."""

import abc
import asyncio
import contextlib
import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import pytest

from tests.store.builders import NOW, attempt, body_of, message_id, own_message, store_message
from tests.store.spools import Spool
from tests.store.test_disk import NAMES, queue_in
from tests.support.waiting import until
from zonerelay.model.delivery import Delivery, queue_of
from zonerelay.store.contract import Finish, OwnMessage, Postpone, Store, StoreError
from zonerelay.store.keys import group_commit, partition

CALLS = ("writev", "link", "rename", "unlink", "fsync")
BODIES = {1: b"one", 2: b"two", 3: b"three", 4: b"four" * 200_000, 5: b"bounce"}

Queue = frozenset[Delivery]


class Calls(abc.ABC):
    """Is asked about every call by which a disk queue changes its files, one at a time."""

    def __init__(self, patches: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        for name in CALLS:
            patches.setattr(os, name, self._wrapped(getattr(os, name)))

    def _wrapped(self, call: Callable[..., object]) -> Callable[..., object]:
        def asked(*args: object, **more: object) -> object:
            with self._lock:
                return self.around(partial(call, *args, **more))

        return asked

    @abc.abstractmethod
    def around(self, call: Callable[[], object]) -> object: ...


async def until_bodies_are_of(queue: Spool, messages: Collection[str]) -> None:
    """No body is left over, and none is missing."""
    place = queue.settings.env_directory or queue.settings.path / "messages"
    await until(lambda: {each.name.split("-")[1] for each in place.iterdir() if "-" in each.name} == messages)


# --- a crash before any call


def places_in(path: Path, apart: bool) -> dict[str, Path]:
    return {name: path / name for name in NAMES} if apart else {}


class Camera(Calls):
    """Copies the queue before every call; `shots` are the copies with the changes finished by then."""

    def __init__(self, path: Path, album: Path, patches: pytest.MonkeyPatch) -> None:
        self.shots: list[tuple[Path, int]] = []
        self.finished = 0
        self._path = path
        self._album = album
        super().__init__(patches)

    def around(self, call: Callable[[], object]) -> object:
        copy = self._album / f"{len(self.shots):03}"
        shutil.copytree(self._path, copy)
        self.shots.append((copy, self.finished))
        return call()


async def all_of(store: Store) -> Queue:
    return frozenset([delivery async for delivery in store.scan()])


@pytest.mark.parametrize("apart", [False, True])
async def test_crash_before_any_call_leaves_the_queue_before_or_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    path, album = tmp_path / "queue", tmp_path / "album"
    states: list[Queue] = []
    with monkeypatch.context() as patches:
        async with queue_in(path, **places_in(path, apart)) as queue:
            store = queue.store
            a, b = await store_message(store, 1, "a@example.net", "b@example.net", body=BODIES[1])
            (two,) = await store_message(store, 2, body=BODIES[2])
            message, bounce = own_message(message_id(5), BODIES[5], "from@example.org")
            later = b.deferred(NOW + 60, attempt())
            changes = (
                lambda: store_message(store, 3, body=BODIES[3]),
                lambda: store_message(store, 4, body=BODIES[4]),
                lambda: store.settle([Finish(a), OwnMessage(message, BODIES[5], (bounce,))]),
                lambda: store.settle([Postpone(later), Finish(two)]),
                lambda: store.settle([Finish(later)]),
                lambda: store.settle([Finish(bounce)]),
            )
            states.append(await all_of(store))
            camera = Camera(path, album, patches)
            for change in changes:
                await change()
                camera.finished += 1
                states.append(await all_of(store))
    assert len(camera.shots) >= 40
    for copy, finished in camera.shots:
        await check(copy, states[finished : finished + 2], apart=apart)


async def check(copy: Path, allowed: list[Queue], *, apart: bool) -> None:
    async with queue_in(copy, **places_in(copy, apart)) as queue:
        found = await all_of(queue.store)
        assert found in allowed, copy
        for delivery in found:
            number = int(delivery.message_id, 16)
            assert await body_of(queue.store, delivery.message_id) == BODIES[number]
        again = {
            delivery.message_id for delivery in await queue.store.claim(queue_of("default"), 99, now=NOW + 60)
        }
        assert again == {delivery.message_id for delivery in found}
        await until_bodies_are_of(queue, {delivery.message_id for delivery in found})


# --- two calls that fail


class Faults(Calls):
    """The calls with these numbers fail while it is armed: before they do anything, or (`done`) after it."""

    def __init__(self, numbers: tuple[int, ...], *, done: bool, patches: pytest.MonkeyPatch) -> None:
        self._left = list(numbers)
        self._done = done
        self._count = 0
        self._armed = False
        self.on_last: Callable[[], object] = lambda: None
        super().__init__(patches)

    def arm(self, *, armed: bool = True) -> None:
        self._armed = armed

    @property
    def all_happened(self) -> bool:
        return not self._left

    def around(self, call: Callable[[], object]) -> object:
        self._count += self._armed
        if not self._armed or not self._left or self._count != self._left[0]:
            return call()
        if self._done:
            with contextlib.suppress(OSError):
                call()
        del self._left[0]
        if not self._left:
            self._armed = False
            self.on_last()
        raise OSError(errno.EIO, os.strerror(errno.EIO))


async def found_in(store: Store) -> set[int]:
    """The messages that are there, each with its body."""
    numbers = {int(delivery.message_id, 16) async for delivery in store.scan()}
    for number in numbers:
        assert await body_of(store, message_id(number)) == BODIES[number]
    assert sum(counts.total for counts in store.counts().values()) == len(numbers)
    return numbers


@pytest.mark.proof
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
async def test_two_failures_and_a_crash_lose_no_mail(monkeypatch: pytest.MonkeyPatch, done: bool) -> None:
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
            await until_bodies_are_of(queue, {message_id(number) for number in after})
    return faults.all_happened
