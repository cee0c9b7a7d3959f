"""Queues that python-slimta has written, and pickles that it has not."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.store.spools import Spool
from tests.support.redis_server import RedisServer
from tests.support.slimta import fill_queue
from tests.transfer.queues import import_into, rows
from zonerelay.config.settings import Backend, RedisSettings
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.transfer.others import reading
from zonerelay.transfer.others import slimta as reader
from zonerelay.transfer.stored import TransferError

BODY = b"""\
Received: from client.example.org
\tby slimta.example.org
From: a@example.org
Subject: %b
 folded
X-Set: by its own program

.dot \xff
end
""".replace(b"\n", b"\r\n")


def check(found: list[tuple[Message, list[Delivery], bytes]], *, attempts: int, delivered: bool) -> None:
    """The two messages of `slimta_queue.py`, in either order: they are of the same time."""
    (null, null_ones, null_body), (mail, ones, body) = sorted(found, key=lambda row: row[0].envelope.sender)
    assert null.envelope.sender == ""
    assert [each.recipient for each in null_ones] == ["bad@example.org"]
    assert null_body == BODY.replace(b"%b", b"null")
    good = [] if delivered else ["good@example.net"]
    assert [each.recipient for each in ones] == ["bad@example.net", "büro@example.net", *good]
    assert body == BODY.replace(b"%b", b"caf\xe9")
    assert mail.envelope.smtputf8
    assert mail.envelope.created == 1700000000.25
    origin = mail.envelope.origin
    assert (origin.client_address, origin.helo, origin.user) == ("192.0.2.1", "client.example.org", "app")
    for each in (*null_ones, *ones):
        assert each.attempts >= attempts
        assert each.created == 1700000000.25
        assert 3500 < each.next_attempt - SystemClock.now() <= 3600


async def test_a_redis_queue_moves_in(server: RedisServer, tmp_path: Path) -> None:
    with fill_queue("redis", "127.0.0.1", str(server.port), "wait") as slimta:
        assert slimta.stdout is not None
        assert len(slimta.stdout.readline().split()) == 2
        with pytest.raises(TransferError, match="python-slimta is running"):
            async with reading("slimta-redis", server.url, 0.0):
                pass
        slimta.kill()
    async with Spool(tmp_path / "spool", clock=SystemClock()) as spool:
        loaded = await import_into(spool.store, tmp_path, "slimta-redis", server.url)
        assert (loaded.messages, loaded.deliveries, loaded.unusable) == (2, 3, 0)
        check(await rows(spool.store), attempts=1, delivered=True)
        again = await import_into(spool.store, tmp_path, "slimta-redis", f"{server.url}?prefix=slimta:")
        assert (again.messages, again.already) == (0, 3)
        other = await import_into(spool.store, tmp_path, "slimta-redis", f"{server.url}?prefix=other:")
        assert other.already == 0


async def test_a_relay_on_the_same_prefix_says_so(
    server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with fill_queue("redis", "127.0.0.1", str(server.port)) as slimta:
        assert slimta.wait(60) == 0
    for prefix, says in (("slimta:", True), ("zonerelay:", False)):
        settings = RedisSettings(url=server.url, prefix=prefix)
        async with Spool(tmp_path / prefix, backend=Backend.REDIS, redis=settings) as spool:
            assert ("there is mail of python-slimta" in caplog.text) is says
            caplog.clear()
            assert spool.store.unhealthy() is None


async def test_a_disk_queue_moves_in(tmp_path: Path) -> None:
    queue = tmp_path / "queue"
    queue.mkdir()
    with fill_queue("disk", str(queue)) as slimta:
        assert slimta.wait(60) == 0
    async with Spool(tmp_path / "spool", clock=SystemClock()) as spool:
        loaded = await import_into(spool.store, tmp_path, "slimta-disk", str(queue))
        assert (loaded.messages, loaded.unusable) == (2, 0)
        # It fails to write down what it has delivered, and would send it again itself.
        check(await rows(spool.store), attempts=1, delivered=False)


async def test_a_disk_queue_in_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"pyaio{os.getpid()}"  # another test may import at this moment
    monkeypatch.setattr(reader, "LIBRARY", name)
    library = tmp_path / f"{name}.abi3.so"
    library.write_bytes(b"\0" * 4096)
    hold = (
        f"import mmap; f = open({str(library)!r}, 'r+b'); m = mmap.mmap(f.fileno(), 0);"
        "print(1, flush=True); input()"
    )
    command = [sys.executable, "-c", hold]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        user.stdout.readline()
        with pytest.raises(TransferError, match=f"process {user.pid} has loaded {name}"):
            async with reading("slimta-disk", str(tmp_path), 0.0):
                pass
        user.kill()


async def test_recipients_that_are_written_down_are_left_out(tmp_path: Path) -> None:
    """As older versions have done it on disk, and as a change by hand may."""
    queue = tmp_path / "queue"
    queue.mkdir()
    with fill_queue("disk", str(queue)) as slimta:
        assert slimta.wait(60) == 0
    for path in queue.glob("*.meta"):
        meta = pickle.loads(path.read_bytes())
        path.write_bytes(pickle.dumps({**meta, "delivered_indexes": [0]}, 2))
    async with Spool(tmp_path / "spool") as spool:
        loaded = await import_into(spool.store, tmp_path, "slimta-disk", str(queue))
        assert (loaded.messages, loaded.deliveries) == (1, 2)
        assert sorted([each.recipient async for each in spool.store.scan()])[1] == "good@example.net"


class Evil:
    """Writes a file when it is unpickled by anything but the restricted reader."""

    def __init__(self, *call: Any) -> None:
        self._call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return self._call[0], self._call[1:]


MARK = Path("/tmp/zonerelay-hostile-pickle")

HOSTILE = {
    "a call": pickle.dumps(Evil(MARK.touch)),
    "a call inside": pickle.dumps({"timestamp": Evil(eval, f"open({str(MARK)!r}, 'w')")}),
    "a name of a known module": b"cemail.message\nre.compile\n(S'a'\ntR.",
    "a module through a known one": b"cemail.headerregistry\npolicy.sys.exit\n(tR.",
    "a name in protocol 4": b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x04true\x85R.",
    "an instance": b"(S'true'\nios\nsystem\n.",
    "getattr": b"cbuiltins\ngetattr\n(cemail.message\nMessage\nS'mro'\ntR.",
    "a huge text": b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent id": b"Pid\n.",
    "an empty one": b"",
    "one that is cut": pickle.dumps({"a": "b" * 100})[:50],
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_pickles_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(reader.PickleError):
        reader.load_pickle(HOSTILE[name])
    assert not MARK.exists()
    (tmp_path / "a.env").write_bytes(HOSTILE[name])
    (tmp_path / "b.env").write_bytes(pickle.dumps({"no": "envelope"}))
    (tmp_path / "b.meta").write_bytes(HOSTILE[name])
    async with Spool(tmp_path / "spool") as spool:
        loaded = await import_into(spool.store, tmp_path, "slimta-disk", str(tmp_path))
        assert (loaded.messages, loaded.unusable) == (0, 2)
    assert not MARK.exists()


def test_a_hostile_number_takes_no_memory() -> None:
    """The reader in C makes a table of so many places."""
    assert reader.load_pickle(b"\x80\x02]r\xff\xff\xff\xff.") == []


def test_known_classes_are_not_built() -> None:
    found = reader.load_pickle(b"cemail.message\nMessage\n(S'a'\ntR.")
    assert type(found) is reader.InertObject
    assert found.arguments == ("a",)


def test_a_field_cannot_end_the_header() -> None:
    message = reader.InertObject()
    message.state = {"_headers": [("Subject", "a\r\n\r\nb\nX: y")]}
    assert reader.header(message) == b"Subject: a\n \n b\n X: y\n\n"
    message.state = {"_headers": [("Subject: a\r\nBcc", "b")]}
    with pytest.raises(reader.PickleError, match="field named"):
        reader.header(message)
