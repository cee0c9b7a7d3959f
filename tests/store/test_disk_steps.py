"""The disk queue after a crash at any moment: every system call of a change is a moment.

What a process changes in directories is done call by call, so a copy of them before each call is everything
that a `kill -9` can leave. Each copy is opened as a queue of its own: it must be as it was before the
change, or as it is after it, and nothing in between.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store.builders import NOW, attempt, body_of, message_id, own_message, store_message
from tests.store.spools import Spool
from tests.support.waiting import until
from zonerelay.config.settings import Backend
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import Delivery
from zonerelay.model.queue_name import queue_of
from zonerelay.store.contract import Finish, OwnMessage, Postpone, Store

CALLS = ("writev", "link", "rename", "unlink", "fsync")
NAMES = ("env_directory", "meta_directory", "scratch_directory")
BODIES = {1: b"one", 2: b"two", 3: b"three", 4: b"four" * 200_000, 5: b"bounce"}

Queue = frozenset[Delivery]


def queue_in(path: Path, *, apart: bool) -> Spool:
    places = {name: path / name for name in NAMES} if apart else {}
    return Spool(path / "q", backend=Backend.DISK, clock=SystemClock(), places=places)


class Camera:
    """Copies the queue before every call; `shots` are the copies with the changes finished by then."""

    def __init__(self, path: Path, album: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shots: list[tuple[Path, int]] = []
        self.finished = 0
        self._path = path
        self._album = album
        self._lock = threading.Lock()
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrapped(getattr(os, name)))

    def _wrapped(self, call: Callable[..., object]) -> Callable[..., object]:
        def shoot(*args: object, **more: object) -> object:
            with self._lock:
                copy = self._album / f"{len(self.shots):03}"
                shutil.copytree(self._path, copy)
                self.shots.append((copy, self.finished))
                return call(*args, **more)

        return shoot


async def all_of(store: Store) -> Queue:
    return frozenset([delivery async for delivery in store.scan()])


@pytest.mark.parametrize("apart", [False, True])
async def test_crash_before_any_call_leaves_the_queue_before_or_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    path, album = tmp_path / "queue", tmp_path / "album"
    states: list[Queue] = []
    with monkeypatch.context() as patches:
        async with queue_in(path, apart=apart) as queue:
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
    async with queue_in(copy, apart=apart) as queue:
        found = await all_of(queue.store)
        assert found in allowed, copy
        for delivery in found:
            number = int(delivery.message_id, 16)
            assert await body_of(queue.store, delivery.message_id) == BODIES[number]
        again = {
            delivery.message_id for delivery in await queue.store.claim(queue_of("default"), 99, now=NOW + 60)
        }
        assert again == {delivery.message_id for delivery in found}
        kept = {delivery.message_id for delivery in found}
        place = queue.settings.env_directory or queue.settings.path / "messages"
        await until(lambda: {each.name.split("-")[1] for each in place.iterdir() if "-" in each.name} == kept)
