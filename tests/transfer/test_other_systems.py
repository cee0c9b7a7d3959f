"""Queues that other systems have written, and pickles that python-slimta has not."""

import asyncio
import fcntl
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.store.spools import Spool
from tests.support.exim import EximSender
from tests.support.ports import wait_until
from tests.support.postfix import PostfixInstance, PostfixSettings, PostfixTools
from tests.support.redis_server import RedisServer
from tests.support.senders import Server
from tests.support.slimta import fill_queue
from tests.support.zonemta import fill_queue as fill_zonemta
from tests.transfer.queues import hop, import_into, rows, submit
from zonerelay.config.settings import Backend, RedisSettings
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import BodyType, Message, Notify, Ret
from zonerelay.store.leveldb.engine import plyvel
from zonerelay.transfer.files import TransferError
from zonerelay.transfer.others import exim as exim_reader
from zonerelay.transfer.others import reading
from zonerelay.transfer.others import slimta as slimta_reader

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
            assert ("contains mail of python-slimta" in caplog.text) is says
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
    monkeypatch.setattr(slimta_reader, "LIBRARY", name)
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
    with pytest.raises(slimta_reader.PickleError):
        slimta_reader.load_pickle(HOSTILE[name])
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
    assert slimta_reader.load_pickle(b"\x80\x02]r\xff\xff\xff\xff.") == []


def test_known_classes_are_not_built() -> None:
    found = slimta_reader.load_pickle(b"cemail.message\nMessage\n(S'a'\ntR.")
    assert type(found) is slimta_reader.InertObject
    assert found.arguments == ("a",)


def test_a_field_cannot_end_the_header() -> None:
    message = slimta_reader.InertObject()
    message.state = {"_headers": [("Subject", "a\r\n\r\nb\nX: y")]}
    assert slimta_reader.header(message) == b"Subject: a\n \n b\n X: y\n\n"
    message.state = {"_headers": [("Subject: a\r\nBcc", "b")]}
    with pytest.raises(slimta_reader.PickleError, match="field named"):
        slimta_reader.header(message)


# ---- slimta-lua, which cannot be had any more: filled as its documents and sources say --------------


OFFSET = 4
LUA_BODY = "Subject: x\r\n\r\n.dot\r\nend\r\n"


def do(server: RedisServer, database: int, *commands: tuple[str, ...]) -> None:
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection,
        connection.makefile("rwb") as stream,
    ):
        for command in (("SELECT", str(OFFSET + database)), *commands):
            parts = [f"${len(word.encode())}\r\n{word}\r\n" for word in command]
            stream.write(f"*{len(command)}\r\n{''.join(parts)}".encode())
            stream.flush()
            assert stream.readline()[:1] in b"+:"


def fill_lua(server: RedisServer, due: float) -> None:
    do(
        server,
        0,
        ("SADD", "message_ids", "aaa", "bbb", "ccc", "ddd"),
        ("ZADD", "retry_queue", repr(due), "aaa"),
    )
    meta = ("timestamp", "1700000000", "attempts", "2", "sender", "a@example.org", "ip", "192.0.2.1")
    client = ("ehlo", "client.example.org", "protocol", "ESMTP", "auth_info", "app", "dest_port", "25")
    do(
        server,
        1,
        ("HSET", "aaa", *meta, *client, "recipients", "b@example.net\0c@example.net\0"),
        (
            "HSET",
            "bbb",
            "timestamp",
            "1700000001",
            "attempts",
            "0",
            "sender",
            "",
            "recipients",
            "d@example.net\0",
        ),
        ("HSET", "ccc", "sender", "x@example.org"),
    )
    do(server, 2, ("SET", "aaa", LUA_BODY), ("SET", "bbb", LUA_BODY))


async def test_four_databases_move_in(server: RedisServer, tmp_path: Path) -> None:
    due = float(int(SystemClock.now()) + 600)
    fill_lua(server, due)
    url = f"redis://127.0.0.1:{server.port}/{OFFSET}"
    async with Spool(tmp_path / "spool", clock=SystemClock()) as spool:
        loaded = await import_into(spool.store, tmp_path, "slimta-lua", url)
        assert (loaded.messages, loaded.deliveries, loaded.unusable) == (2, 3, 1)
        found = await rows(spool.store)
        again = await import_into(spool.store, tmp_path, "slimta-lua", url)
        assert (again.messages, again.already) == (0, 3)
    (first, ones, body), (second, (alone,), _) = found
    assert (first.envelope.sender, first.envelope.created, body) == (
        "a@example.org",
        1700000000.0,
        LUA_BODY.encode(),
    )
    assert [(each.recipient, each.attempts, each.next_attempt) for each in ones] == [
        ("b@example.net", 2, due),
        ("c@example.net", 2, due),
    ]
    assert (first.envelope.origin.helo, first.envelope.origin.user) == ("client.example.org", "app")
    assert (second.envelope.sender, alone.attempts, alone.next_attempt) == ("", 0, 0.0)


async def test_it_is_refused_while_it_runs(server: RedisServer) -> None:
    url = f"redis://127.0.0.1:{server.port}/{OFFSET}"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"SELECT 5\r\n")
        assert client.recv(100) == b"+OK\r\n"
        with pytest.raises(TransferError, match=f"{client.getsockname()[1]} of .* uses database 5"):
            async with reading("slimta-lua", url, 0.0):
                pass
    do(server, 3, ("SETEX", "aaa", "120", "1"))
    with pytest.raises(TransferError, match="delivering 1 messages"):
        async with reading("slimta-lua", url, 0.0):
            pass


# ---- the spool of an Exim that really ran -----------------------------------------------------------


EXIM_BODY = b"Subject: x\r\nFrom: a@example.org\r\n\r\n.dot \xff\r\n" + b"x" * 300 + b"\r\nend\r\n"


@pytest.fixture
def spool_of_exim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """It has one message, which is deferred for two of three recipients. Exim was refused, and has ended."""
    directory = tmp_path / "exim"
    for each in (directory, *list(directory.parents)[:4]):
        each.mkdir(exist_ok=True)
        each.chmod(0o755)
    exim = EximSender(directory)
    with hop() as port, exim.receiving(Server(port=port), options="dsn_advertise_hosts = *\n") as own:
        submit(own, EXIM_BODY)
        log = directory / "log" / "main"
        assert wait_until(lambda: log.read_text().count(" == ") == 2, timeout=20), log.read_text()
        asyncio.run(refused(directory / "spool"))
    # Another test may run an Exim at this moment.
    monkeypatch.setattr(exim_reader, "_PROGRAMS", (b"no-exim",))
    return directory / "spool"


async def refused(spool: Path) -> None:
    with pytest.raises(TransferError, match=r"Exim is running as process \d+"):
        async with reading("exim", str(spool), 0.0):
            pass


async def test_a_spool_moves_in(spool_of_exim: Path, tmp_path: Path) -> None:
    async with Spool(tmp_path / "spool", clock=SystemClock()) as spool:
        loaded = await import_into(spool.store, tmp_path, "exim", str(spool_of_exim))
        assert (loaded.messages, loaded.deliveries, loaded.unusable) == (1, 2, 0)
        ((message, deliveries, body),) = await rows(spool.store)
        again = await import_into(spool.store, tmp_path, "exim", str(spool_of_exim))
        assert (again.messages, again.already) == (0, 2)
    envelope = message.envelope
    assert (envelope.sender, envelope.ret, envelope.envid) == ("a@example.org", Ret.HDRS, "QQ+2B1")
    assert abs(envelope.created - SystemClock.now()) < 60
    assert (envelope.origin.client_address, envelope.origin.helo) == ("127.0.0.1", "client.example.org")
    assert body == EXIM_BODY
    second, first = deliveries
    assert (first.recipient, second.recipient) == ("bad@example.net", "bad2@example.net")
    assert (first.notify, first.orcpt) == (Notify.SUCCESS | Notify.FAILURE, "rfc822;orig+2Bx@example.net")
    for each in deliveries:
        assert (each.attempts, each.next_attempt, each.held) == (1, 0.0, False)
        assert each.last is not None
        assert str(each.last.reply) == "450 4.2.1 <x> mailbox busy"
        assert abs(each.last.at - SystemClock.now()) < 60


async def test_the_journal_frozen_mail_and_mail_in_delivery(spool_of_exim: Path, tmp_path: Path) -> None:
    (head,) = (spool_of_exim / "input").glob("*-H")
    head.write_bytes(head.read_bytes().replace(b"-body_linecount", b"-frozen 1795576102\n-body_linecount"))
    journal = head.with_name(head.name.replace("-H", "-J"))
    journal.write_text("bad2@example.net\n")  # as a delivery that was killed leaves it
    data = head.with_name(head.name.replace("-H", "-D"))
    async with Spool(tmp_path / "spool") as spool:
        lock = (
            f"import fcntl; f = open({str(data)!r}, 'r+b'); fcntl.lockf(f, {fcntl.LOCK_EX});"
            "print(1, flush=True); input()"
        )
        with subprocess.Popen(
            ["python3", "-c", lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as delivering:
            assert delivering.stdout is not None
            delivering.stdout.readline()
            loaded = await import_into(spool.store, tmp_path, "exim", str(spool_of_exim))
            assert (loaded.messages, loaded.unusable) == (0, 1)
            delivering.kill()
        await import_into(spool.store, tmp_path, "exim", str(spool_of_exim))
        ((_, (only,), _),) = await rows(spool.store)
        assert (only.recipient, only.held) == ("bad@example.net", True)


def test_a_tree_of_finished_recipients_is_read_whole() -> None:
    raw = (
        b"1xW3Ms-0007Ih-0w-H\nmail 8 8\n<>\n1795576102 0\n"
        b"YY c@x.org\nNY a@x.org\nNN b@x.org\nNN d@x.org\n"
        b'3\na@x.org\n"e f"@x.org er@x.org 8,-1#1\n"g h"@x.org  0,16 er@x.org 8,-1#3\n\n'
        b"044* Received: ; Wed, 25 Nov 2026 03:08:22 +0000\n011  Subject: x\n"
    )
    head = exim_reader.parse_head(raw)
    assert head.finished == {"a@x.org", "b@x.org", "c@x.org", "d@x.org"}
    assert [each.address for each in head.recipients] == ["a@x.org", '"e f"@x.org', '"g h"@x.org']
    assert head.recipients[2].notify is Notify.DELAY
    assert head.header == b"Subject: x\n"
    for cut in range(len(raw) - 1):
        if not raw[:cut].endswith(b"\n011  Subject: x") and cut not in (
            raw.index(b"044*"),
            raw.index(b"011 "),
        ):
            with pytest.raises(ValueError):
                exim_reader.parse_head(raw[:cut])


# ---- the queue of a Postfix that really ran ---------------------------------------------------------


POSTFIX_BODY = b"Subject: x\r\nFrom: a@example.org\r\n\r\n.dot \xff\r\n" + b"x" * 5000 + b"\r\nend\r\n"


@pytest.fixture(scope="module")
def tools() -> PostfixTools:
    return PostfixTools()


@pytest.fixture
def postfix(tools: PostfixTools, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostfixInstance]:
    """It runs, and has a message that is deferred for two of three recipients."""
    directory = Path("/tmp") / f"postfix-{os.getpid()}"
    monkeypatch.setenv("PATH", f"{tools.sbin}:{os.environ['PATH']}")
    monkeypatch.setenv("LD_LIBRARY_PATH", tools.environment["LD_LIBRARY_PATH"])
    with hop() as port:
        instance = PostfixInstance(tools, directory, PostfixSettings(next_hop=f"[127.0.0.1]:{port}"))
        try:
            with instance:
                defer(instance)
                yield instance
        finally:
            subprocess.run(["rm", "-rf", str(directory)], check=True)


def defer(postfix: PostfixInstance) -> None:
    submit(postfix.smtp_port, POSTFIX_BODY)
    deferred = postfix.queue / "deferred"
    assert wait_until(lambda: any(each.is_file() for each in deferred.rglob("*")), timeout=20)


async def test_a_queue_of_postfix_moves_in(postfix: PostfixInstance, tmp_path: Path) -> None:
    config = str(postfix.directory / "config")
    with pytest.raises(TransferError, match=f"running as process {postfix.pid}"):
        async with reading("postfix", config, 0.0):
            pass
    postfix.stop()
    (queued,) = [each for each in (postfix.queue / "deferred").rglob("*") if each.is_file()]
    due = queued.stat().st_mtime
    async with Spool(tmp_path / "spool", clock=SystemClock()) as spool:
        loaded = await import_into(spool.store, tmp_path, "postfix", config)
        assert (loaded.messages, loaded.deliveries, loaded.unusable) == (1, 2, 0)
        ((message, deliveries, body),) = await rows(spool.store)
        again = await import_into(spool.store, tmp_path, "postfix", config)
        assert (again.messages, again.already) == (0, 2)
    envelope = message.envelope
    assert (envelope.sender, envelope.ret, envelope.envid) == ("a@example.org", Ret.HDRS, "QQ+2B1")
    assert envelope.body is BodyType.EIGHT_BIT
    assert abs(envelope.created - SystemClock.now()) < 60
    assert body.endswith(POSTFIX_BODY.partition(b"\r\n\r\n")[2])
    assert message.header("Subject") == "x"
    by_name = {each.recipient: each for each in deliveries}
    bad = by_name["bad@example.net"]  # type: ignore[index]
    assert (bad.notify, bad.orcpt) == (Notify.SUCCESS | Notify.FAILURE, "rfc822;orig+2Bx@example.net")
    for each in deliveries:
        assert (each.attempts, each.next_attempt, each.zone) == (1, due, "default")
        assert each.last is not None
        assert str(each.last.reply).startswith("450 4.2.1 <x> mailbox busy")


async def test_mail_on_hold_is_held_and_maildrop_is_named(postfix: PostfixInstance, tmp_path: Path) -> None:
    postfix.stop()
    (queued,) = [each for each in (postfix.queue / "deferred").rglob("*") if each.is_file()]
    queued.rename(postfix.queue / "hold" / queued.name)  # as postsuper -h does
    (postfix.queue / "maildrop" / "ABCDEF").write_bytes(b"")
    async with Spool(tmp_path / "spool") as spool:
        loaded = await import_into(spool.store, tmp_path, "postfix", str(postfix.directory / "config"))
        assert (loaded.deliveries, loaded.unusable) == (2, 1)
        ((_, deliveries, _),) = await rows(spool.store)
        assert all(each.held for each in deliveries)


# ---- a queue that ZoneMTA of 2016 has written -------------------------------------------------------


ZONEMTA_BODY = (
    b"From: a@example.org\r\nSubject: caf\xe9\r\n folded\r\n\r\n.dot \xff\r\n" + (b"x" * 70 + b"\r\n") * 2000
)


def files_of(directory: Path) -> dict[str, tuple[bytes, int]]:
    return {each.name: (each.read_bytes(), each.stat().st_mtime_ns) for each in directory.iterdir()}


async def test_a_queue_of_zonemta_moves_in(tmp_path: Path) -> None:
    queue = tmp_path / "queue"
    with fill_zonemta(queue, "wait") as zonemta:
        assert zonemta.stdout is not None
        assert len(zonemta.stdout.readline().split()) == 2
        with pytest.raises(TransferError, match=f"ZoneMTA is running as process {zonemta.pid}"):
            async with reading("zonemta", str(queue), 0.0):
                pass
        zonemta.kill()
    before = files_of(queue)
    async with Spool(tmp_path / "spool", clock=SystemClock()) as spool:
        loaded = await import_into(spool.store, tmp_path, "zonemta", str(queue))
        assert (loaded.messages, loaded.deliveries, loaded.unusable) == (2, 3, 0)
        found = await rows(spool.store)
        again = await import_into(spool.store, tmp_path, "zonemta", str(queue))
        assert (again.messages, again.already) == (0, 3)
    assert files_of(queue) == before
    (null, (alone,), _), (mail, (bad, late), body) = sorted(found, key=lambda row: row[0].envelope.sender)
    assert (null.envelope.sender, alone.recipient) == ("", "late@example.org")
    assert (bad.recipient, late.recipient) == ("bad@example.net", "late+1@example.net")
    assert body == ZONEMTA_BODY + b"end\r\n"
    assert mail.envelope.created == 1700000000.25
    assert (mail.envelope.origin.client_address, mail.envelope.origin.user) == ("192.0.2.1", "app")
    assert (late.attempts, late.next_attempt, late.last) == (0, 0.0, None)
    assert bad.attempts == 1
    assert 3500 < bad.next_attempt - SystemClock.now() <= 3600
    assert bad.last is not None
    assert str(bad.last.reply) == "450 4.2.1 <x> mailbox busy"


async def test_tables_are_read_and_left_alone(tmp_path: Path) -> None:
    queue = tmp_path / "queue"
    with fill_zonemta(queue) as zonemta:
        assert zonemta.wait(60) == 0
    database = plyvel.DB(str(queue))
    database.compact_range()
    for number in range(3):
        database.put(b"ref %d default a%%40example.net" % number, b'{"recipient": "a@example.net"}')
        database.put(b"message %d #" % number, b"{}")
    database.put(b"message 1 *", b'{"x": ' + b"[" * 100_000)
    database.put(b"message 2 *", b'{"from": "\xff"}')
    database.close()
    assert list(queue.glob("*.ldb"))
    before = files_of(queue)
    async with Spool(tmp_path / "spool") as spool:
        loaded = await import_into(spool.store, tmp_path, "zonemta", str(queue))
        assert (loaded.messages, loaded.deliveries, loaded.unusable) == (2, 3, 3)
    assert files_of(queue) == before
    assert sorted(each.name for each in tmp_path.iterdir()) == ["imported", "queue", "spool"]


async def test_other_directories_are_refused(tmp_path: Path) -> None:
    for name, why in (("sst_0", "Basho"), ("nothing", "not a LevelDB database")):
        (tmp_path / name / name).mkdir(parents=True)
        with pytest.raises(TransferError, match=why):
            async with reading("zonemta", str(tmp_path / name), 0.0):
                pass
