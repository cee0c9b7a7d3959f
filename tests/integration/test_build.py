"""Whatever `build` starts is stopped: by `Worker.stop`, and where the start fails at any of its steps."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.relay import HOSTNAME, MemoryLog, settings
from tests.support.waiting import until
from zonerelay.config.settings import ReportSettings, Settings, WebhookSettings, ZoneSettings
from zonerelay.model.clock import SystemClock
from zonerelay.process.setup import StartError
from zonerelay.store.contract import StoreError
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.worker import build as build_module
from zonerelay.worker.build import build
from zonerelay.worker.worker import Worker


class Cut(AsyncExitStack):
    """Fails at step `at` of the start, before the part has begun."""

    at = 1000
    steps = 0

    def push_async_callback(self, callback: Any, /, *args: Any, **kwds: Any) -> Any:
        return self._step(super().push_async_callback, callback, *args, **kwds)

    def callback(self, callback: Any, /, *args: Any, **kwds: Any) -> Any:
        return self._step(super().callback, callback, *args, **kwds)

    def _step(self, push: Callable[..., Any], callback: Any, *args: Any, **kwds: Any) -> Any:
        number, Cut.steps = Cut.steps, Cut.steps + 1
        push(callback, *args, **kwds)
        if number == Cut.at:
            raise StoreError("cut")
        return callback


@pytest.fixture(autouse=True)
def cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "AsyncExitStack", Cut)
    monkeypatch.setattr(Cut, "at", 1000)


def everything(directory: Path) -> Settings:
    """A relay with all its parts."""
    hook = WebhookSettings(name="hook", url="http://127.0.0.1:1/", events=("delivered",))
    return settings(
        directory,
        zone=ZoneSettings(next_hop="127.0.0.1:1"),
        webhook=(hook,),
        report=ReportSettings(to=("postmaster@example.org",)),
    )


async def built(chosen: Settings) -> Worker:
    Cut.steps = 0
    return await build(
        chosen,
        hostname=HOSTNAME,
        log=MemoryLog(),
        redactor=Redactor(b"", enabled=False),
        clock=SystemClock(),
        randomness=random.Random(1),
    )


def left(directory: Path) -> set[str]:
    """Tasks, threads, open files and sockets of this process, and sockets in the directory."""
    found = {f"task {each.get_coro()}" for each in asyncio.all_tasks()}
    # The pools of threads stay, and a busy machine makes them start another thread.
    found |= {f"thread {each.name.rstrip('0123456789')}" for each in threading.enumerate()}
    for each in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"file {each.name} {each.readlink()}")
        except OSError:
            continue
    return found | {f"socket {each}" for each in directory.rglob("*.sock")}


@asynccontextmanager
async def leaving_nothing(directory: Path) -> AsyncIterator[None]:
    before = left(directory)
    yield
    await until(lambda: not left(directory) - before, seconds=10)


async def test_nothing_is_left_of_a_start_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = everything(tmp_path)
    await (await built(chosen)).stop()  # the pools of threads stay
    steps = Cut.steps
    assert steps > 12
    for step in range(steps):
        monkeypatch.setattr(Cut, "at", step)
        async with leaving_nothing(tmp_path):
            with pytest.raises(StartError, match="cut"):
                await built(chosen)
    monkeypatch.setattr(Cut, "at", 1000)
    async with leaving_nothing(tmp_path):
        await (await built(chosen)).stop()


async def test_the_end_of_one_part_fails_and_the_others_end(tmp_path: Path) -> None:
    chosen = everything(tmp_path)
    await (await built(chosen)).stop()
    for name, verb in (("scheduler", "stop"), ("listeners", "drain")):
        async with leaving_nothing(tmp_path):
            worker = await built(chosen)
            part = getattr(worker, name)
            end = getattr(part, verb)

            async def fails(*args: Any, end: Any = end) -> None:
                await end(*args)
                raise RuntimeError("its end fails")

            setattr(part, verb, fails)
            with pytest.raises(RuntimeError, match="its end fails"):
                await worker.stop()
