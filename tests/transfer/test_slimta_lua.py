"""slimta-lua's databases. It cannot be had any more: they are filled as its documents and sources say."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.store.spools import Spool
from tests.support.redis_server import RedisServer
from tests.transfer.queues import import_into, rows
from zonerelay.model.clock import SystemClock
from zonerelay.transfer.others import reading
from zonerelay.transfer.stored import TransferError

OFFSET = 4
BODY = "Subject: x\r\n\r\n.dot\r\nend\r\n"


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


def fill(server: RedisServer, due: float) -> None:
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
    do(server, 2, ("SET", "aaa", BODY), ("SET", "bbb", BODY))


async def test_four_databases_move_in(server: RedisServer, tmp_path: Path) -> None:
    due = float(int(SystemClock.now()) + 600)
    fill(server, due)
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
        BODY.encode(),
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
