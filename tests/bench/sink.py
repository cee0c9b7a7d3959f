"""A minimal SMTP sink that counts recipients, which smtp-sink does not.

Run as `python -m tests.bench.sink [--tls CERTIFICATE KEY] PORT COUNTERS ADDRESS…`: it listens on that port of
every address and keeps its counters in the shared file COUNTERS, so that reading them costs it nothing. It
accepts everything and stores nothing. With a certificate it offers STARTTLS. Also used inside the latency
probe.
"""

import asyncio
import contextlib
import gc
import mmap
import ssl
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

import uvloop

BACKLOG = 1024
MAX_COMMAND = 4096
_COUNTERS = struct.Struct("=qqqd")
_END = b"\r\n.\r\n"
_OFFERS = b"250-PIPELINING\r\n250-8BITMIME\r\n250-SIZE\r\n250 ENHANCEDSTATUSCODES\r\n"
_EHLO = b"250-sink\r\n" + _OFFERS
_EHLO_TLS = b"250-sink\r\n250-STARTTLS\r\n" + _OFFERS
_START_TLS = b"220 2.0.0 go ahead\r\n"
_OK = b"250 2.0.0 Ok\r\n"

C = TypeVar("C", bound=tuple[Any, ...])  # Any: numbers

# Called with the number of recipients and the time at which the final dot was seen.
Arrived = Callable[[int, float], None]


class Counts(NamedTuple):
    """What a sink has taken since it started."""

    sessions: int = 0
    messages: int = 0
    recipients: int = 0
    last: float = 0.0


class SinkProtocol(asyncio.Protocol):
    """One connection: commands answered in order, message content dropped up to its final dot."""

    def __init__(
        self,
        arrived: Arrived,
        connected: Callable[[], None] = lambda: None,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._context = context
        self._handshake: asyncio.Task[None] | None = None
        self._arrived = arrived
        self._connected = connected
        self._pending = b""
        self._in_data = False
        self._recipients = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes, only alike.
        self._transport = cast(asyncio.Transport, transport)
        self._connected()
        self._transport.write(b"220 sink ESMTP\r\n")

    def data_received(self, data: bytes) -> None:
        transport = self._transport
        assert transport is not None
        rest = self._pending + data
        replies: list[bytes] = []
        while rest:
            if self._in_data:
                rest, ended = self._content(rest, replies)
                if not ended:
                    break
            else:
                line, found, after = rest.partition(b"\r\n")
                if not found:
                    break
                rest = after
                replies.append(self._command(line))
        self._pending = rest
        if len(rest) > MAX_COMMAND:
            transport.abort()
            return
        if replies:
            self._answer(transport, replies)

    def _answer(self, transport: asyncio.Transport, replies: list[bytes]) -> None:
        transport.write(b"".join(replies))
        if replies[-1].startswith(b"221"):
            transport.close()
        elif replies[-1] is _START_TLS:
            self._handshake = asyncio.ensure_future(self._start_tls(transport))

    async def _start_tls(self, transport: asyncio.Transport) -> None:
        context, self._context = self._context, None
        assert context is not None
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):  # whoever connects says what is wrong
            self._transport = await loop.start_tls(transport, self, context, server_side=True)

    def _content(self, data: bytes, replies: list[bytes]) -> tuple[bytes, bool]:
        """What is left to read, and whether the message ended."""
        end = data.find(_END)
        if end < 0:
            # Keep what might be the beginning of the end.
            return data[-(len(_END) - 1) :], False
        self._arrived(self._recipients, time.monotonic())
        self._in_data, self._recipients = False, 0
        replies.append(_OK)
        return data[end + len(_END) :], True

    def _command(self, line: bytes) -> bytes:
        verb = line[:4].upper()
        if verb == b"RCPT":
            self._recipients += 1
            return _OK
        if verb == b"DATA":
            self._in_data = True
            return b"354 go on\r\n"
        if verb == b"EHLO":
            return _EHLO if self._context is None else _EHLO_TLS
        if verb == b"STAR" and self._context is not None:
            return _START_TLS
        if verb == b"QUIT":
            return b"221 2.0.0 bye\r\n"
        if verb in (b"MAIL", b"RSET"):
            self._recipients = 0
        return _OK


class CounterFile(Generic[C]):
    """Counters, shared with the process that waits for them: a tuple of whole numbers and a time."""

    def __init__(self, path: Path, kind: type[C]) -> None:
        self._kind = kind
        if not path.exists():
            path.write_bytes(bytes(_COUNTERS.size))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _COUNTERS.size)

    def read(self) -> C:
        return self._kind(*_COUNTERS.unpack_from(self._memory))

    def write(self, counts: C) -> None:
        _COUNTERS.pack_into(self._memory, 0, *counts)

    def close(self) -> None:
        self._memory.close()


async def serve(
    port: int, counters: CounterFile[Counts], addresses: list[str], context: ssl.SSLContext | None
) -> None:
    sessions = messages = recipients = 0
    last = 0.0

    def arrived(count: int, now: float) -> None:
        nonlocal messages, recipients, last
        messages, recipients, last = messages + 1, recipients + count, now
        counters.write(Counts(sessions, messages, recipients, last))

    def connected() -> None:
        nonlocal sessions
        sessions += 1
        counters.write(Counts(sessions, messages, recipients, last))

    server = await asyncio.get_running_loop().create_server(
        lambda: SinkProtocol(arrived, connected, context), addresses, port, backlog=BACKLOG
    )
    async with server:
        await server.serve_forever()


def main() -> None:
    gc.disable()
    words, context = sys.argv[1:], None
    if words[0] == "--tls":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(words[1], words[2])
        words = words[3:]
    port, counters, *addresses = words
    uvloop.run(serve(int(port), CounterFile(Path(counters), Counts), addresses, context))


if __name__ == "__main__":
    main()
