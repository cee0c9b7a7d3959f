"""SIGHUP to one worker: the loop goes on while the file is read, and the last of several signals counts."""

import asyncio
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.ports import LOOPBACK
from tests.support.relay import Running, relay_with, settings
from zonerelay.config.settings import ZoneSettings
from zonerelay.process.setup import Identity
from zonerelay.process.sockets import Notifier
from zonerelay.serve import WorkerProcess

CONFIG = f"""
[[listener]]
address = "{LOOPBACK}:0"

[[zone]]
name = "default"
next_hop = "127.0.0.1:1"
"""
READY = "READY=1"


@pytest.fixture
def channel() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def reloading(config: Path, running: Running, theirs: socket.socket) -> WorkerProcess:
    notifier = Notifier({}, lambda error: None, theirs)
    return WorkerProcess(config, running.worker, notifier, nullcontext, lambda: None)


async def said(ours: socket.socket, count: int) -> list[str]:
    """What the supervisor is told, without readings of clocks and addresses."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(10):
        packets = [(await loop.sock_recv(ours, 65536)).decode() for _ in range(count)]
    return [packet.partition("\n")[0] for packet in packets]


async def test_the_loop_runs_in_a_read(tmp_path: Path, channel: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = channel
    config = tmp_path / "zonerelay.toml"
    os.mkfifo(config)
    may_end = threading.Event()

    def write() -> None:
        may_end.wait(5)
        config.write_text(CONFIG)

    writer = threading.Thread(target=write)
    async with relay_with(settings(tmp_path, zone=ZoneSettings(next_hop="127.0.0.1:1"))) as running:
        writer.start()
        reloading(config, running, theirs).begin()
        assert await said(ours, 1) == ["RELOADING=1"]
        for _ in range(10):
            await asyncio.sleep(0)
        assert not may_end.is_set()
        assert not running.log.named("reloaded")
        may_end.set()
        assert await said(ours, 2) == ["TAKEN=1", READY]
        assert len(running.log.named("reloaded")) == 1
    writer.join()


async def test_a_signal_while_a_file_is_read_is_another_reload_after_it(
    tmp_path: Path, channel: tuple[socket.socket, socket.socket]
) -> None:
    ours, theirs = channel
    config, next_one = tmp_path / "zonerelay.toml", tmp_path / "next.toml"
    os.mkfifo(config)
    next_one.write_text(CONFIG.replace("127.0.0.1:1", "127.0.0.1:3"))
    async with relay_with(settings(tmp_path, zone=ZoneSettings(next_hop="127.0.0.1:1"))) as running:
        found = reloading(config, running, theirs)
        found.begin()
        assert await said(ours, 1) == ["RELOADING=1"]
        read = await asyncio.to_thread(os.open, config, os.O_WRONLY)
        found.begin()
        next_one.replace(config)
        os.write(read, CONFIG.replace("next_hop", "next_hup").encode())
        os.close(read)
        refused, *rest = await said(ours, 5)
        assert refused.startswith("REFUSED=zone[0].next_hup: unknown key")
        assert rest == [READY, "RELOADING=1", "TAKEN=1", READY]
        assert running.worker.settings.zone[0].next_hop == "127.0.0.1:3"
        assert "reload was refused" not in " ".join(running.worker.problems)


async def test_one_that_ends_while_it_is_stopping_says_nothing(
    tmp_path: Path, channel: tuple[socket.socket, socket.socket]
) -> None:
    """What it said would take back that it stops."""
    ours, theirs = channel
    config = tmp_path / "zonerelay.toml"
    config.write_text(CONFIG)
    async with relay_with(settings(tmp_path, zone=ZoneSettings(next_hop="127.0.0.1:1"))) as running:
        found = reloading(config, running, theirs)
        found.begin()
        await asyncio.sleep(0)  # a turn, no more: a reload may end before the test has the processor again
        running.worker.draining = True
        assert await said(ours, 1) == ["RELOADING=1"]
        assert found._task is not None
        await found._task
        found.begin()
        await found._task
    with pytest.raises(BlockingIOError):
        ours.recv(65536)


async def test_an_unexpected_error_does_not_mean_that_the_spool_of_a_removed_worker_is_empty(
    tmp_path: Path, channel: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise RuntimeError("a record that nobody expected")

    monkeypatch.setattr("zonerelay.serve.until_empty", fails)
    async with relay_with(settings(tmp_path, zone=ZoneSettings(next_hop="127.0.0.1:1"))) as running:
        monkeypatch.setattr(running.worker, "identity", Identity(drains_spool=True))
        with pytest.raises(RuntimeError, match="nobody expected"):
            await reloading(tmp_path / "zonerelay.toml", running, channel[1])._until_stopped()
