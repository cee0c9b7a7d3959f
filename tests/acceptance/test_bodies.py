"""Bodies through a real relay: byte for byte over every chunk boundary, and large ones in flat memory."""

import contextlib
import hashlib
from pathlib import Path

import pytest

from tests.support.process import RelayProcess
from tests.support.sink import Sink
from tests.support.smtp_client import TO_DATA, connected
from zonerelay.store.contract import CHUNK_SIZE

MB = 1024 * 1024


async def submit(port: int, body: bytes | int, *, piece: int = 1 << 20) -> str:
    """Send one message over a raw connection, dot-stuffed; an integer sends that many octets of filler."""
    async with connected(port, *TO_DATA) as client:
        if isinstance(body, int):
            line = b"y" * 78 + b"\r\n"
            block = line * (piece // len(line))
            client.write(b"Subject: large\r\n\r\n")
            for _ in range(body // len(block)):
                client.write(block)
                await client.writer.drain()
        else:
            client.write(body.replace(b"\r\n.", b"\r\n.."))
        client.write(b".\r\n")
        return (await client.reply()).decode()


def message(size: int, tail: bytes) -> bytes:
    """A message of `size` octets that tell their place, with `tail` just before the last line end."""
    head = b"Date: x\r\nMessage-ID: <x@y>\r\n\r\n"
    lines, length = [head], len(head)
    number = 0
    while length < size - 200:
        line = b"." * (number % 3) + b"%09d " % number + bytes([33 + number % 90]) * (number % 61) + b"\r\n"
        lines.append(line)
        length += len(line)
        number += 1
    rest = size - length - len(tail) - 2
    return b"".join(lines) + b"z" * rest + tail + b"\r\n"


async def test_bodies_arrive_byte_for_byte_over_every_chunk_boundary(tmp_path: Path, sink: Sink) -> None:
    """What matters (a line end, a dot, the end) is put on every place around the first boundary.

    Our own Received field shifts the body, so offsets sweep over more than its length as well.
    """
    sent: list[str] = []
    with RelayProcess(tmp_path, next_hop=f"127.0.0.1:{sink.port}") as relay:
        for shift in range(-260, 12):
            for tail in (b"", b"\r\n.", b"\r\n..\r\n."):
                if shift % 13 and tail != b"\r\n.":
                    continue  # every place gets a dotted line end, some the other tails too
                body = message(CHUNK_SIZE + shift, tail)
                assert (await submit(relay.smtp_port, body)).startswith("250")
                sent.append(hashlib.sha256(body).hexdigest())
        await sink.wait_for(len(sent), timeout=30)
    arrived = sorted(_without_received(each.body) for each in sink.messages)
    assert arrived == sorted(sent)


def _without_received(body: bytes) -> str:
    at = body.index(b"Date: x\r\n")
    return hashlib.sha256(body[at:]).hexdigest()


@pytest.mark.parametrize("megabytes", [100])
async def test_a_large_message_passes_in_flat_memory(tmp_path: Path, megabytes: int) -> None:
    with (
        Sink(keep_bodies=False) as sink,
        RelayProcess(
            tmp_path, next_hop=f"127.0.0.1:{sink.port}", listener={"max_message_size": "200 MB"}
        ) as relay,
    ):
        assert (await submit(relay.smtp_port, MB)).startswith("250")  # what any first message allocates
        await sink.wait_for(1, timeout=30)
        before = relay.peak_rss()
        assert (await submit(relay.smtp_port, megabytes * MB)).startswith("250")
        await sink.wait_for(2, timeout=60)
        growth = relay.peak_rss() - before
        print(f"{megabytes} MB: peak memory grew by {growth / MB:.1f} MB to {relay.peak_rss() / MB:.1f} MB")
        assert sink.messages[1].size > megabytes * MB * 0.99
        assert growth < 64 * MB


async def test_a_stream_without_line_ends_is_refused_in_flat_memory(tmp_path: Path) -> None:
    with RelayProcess(tmp_path, next_hop="127.0.0.1:1", listener={"max_message_size": "1 MB"}) as relay:
        before = relay.peak_rss()
        answer = b""
        async with connected(relay.smtp_port, *TO_DATA) as client:
            with contextlib.suppress(OSError):  # the relay may have closed, with more on the way
                for _ in range(60):
                    client.write(b"x" * MB)
                    await client.writer.drain()
                client.write(b"\r\n.\r\n")
                await client.writer.drain()
                answer = await client.reader.read(200)
        growth = relay.peak_rss() - before
        print(f"peak memory grew by {growth / MB:.1f} MB; answer {answer!r}")
        assert growth < 10 * MB
        assert answer[:9] in (b"552 5.3.4", b"")
        assert [event["reason"] for event in relay.events("refused")] == ["size"]
