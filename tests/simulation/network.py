"""Connections of the simulated network: latency, cuts after any number of bytes, silence, dead processes.

A connection has two ends; each runs in the context of its process. Bytes arrive in order after the latency of
the moment. After a cut both ends get a reset; a silent connection carries nothing any more, and neither
end learns of it (half-open); the end of a process closes its connections and its listening sockets.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from tests.simulation.loop import PROCESS, Process, SimLoop

if TYPE_CHECKING:
    from tests.simulation.ledger import Ledger

HIGH = 64 * 1024
FORGOTTEN = 120.0
"""Seconds after which the server's end of a half-open connection gives up."""
Factory = Callable[[], asyncio.Protocol]
Answers = Callable[[str, int], "tuple[float, Factory | OSError, Fault | None]"]


@dataclass
class Fault:
    """What happens to one connection: `cut` after so many bytes towards the server (`back`: towards the
    client), or silence from then on.
    """

    after: int
    back: bool = False
    silent: bool = False


class End(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, link: Link, protocol: asyncio.Protocol, *, is_server: bool) -> None:
        super().__init__()
        self.link = link
        self.protocol = protocol
        self.is_server = is_server
        self.context = contextvars.copy_context()
        self.closed = False
        self.other: End
        self._reads = True
        self._unread: list[bytes] = []
        self._waiting = 0
        self._paused = False
        self._arrives = 0.0
        self._sent = 0

    # asyncio's interface

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol  # type: ignore[assignment]

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        host, _, port = self.link.address.rpartition(":")
        there = (host, int(port)) if port.isdigit() else self.link.address
        peer = ("127.0.0.1", 40000) if self.is_server else there
        return {"peername": peer, "sockname": ("127.0.0.1", 25)}.get(name, default)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = HIGH if high is None else high

    _high = HIGH

    def get_write_buffer_size(self) -> int:
        return self._waiting

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        if not self._reads:
            self._reads = True
            self.link.loop.call_soon(self._read, context=self.context)

    def write(self, data: Any) -> None:
        data = bytes(data)
        if self.closed or not data:
            return
        self._waiting += len(data)
        self.link.network.ledger.written(self, data)
        if self._waiting > self._high and not self._paused:
            self._paused = True
            self.protocol.pause_writing()
        fault = self.link.fault
        if fault is not None and fault.back == self.is_server and self._sent + len(data) > fault.after:
            data = data[: max(0, fault.after - self._sent)]
            self._send(data)
            self.link.fault = None
            self.link.break_off(silent=fault.silent, after=self._arrives)
            return
        self._send(data)

    def _send(self, data: bytes) -> None:
        self._sent += len(data)
        if data and not self.link.broken:
            loop = self.link.loop
            self._arrives = max(self._arrives + 1e-7, loop.now + self.link.latency())
            loop.call_at(self._arrives, self.other._arrive, data, context=self.other.context)

    def close(self) -> None:
        if not self.closed:
            self._end(None, self.other._peer_closed, self._arrives + 1e-7)

    def abort(self) -> None:
        if not self.closed:
            self._end(None, self.other.reset)

    # What the network does

    def _arrive(self, data: bytes) -> None:
        self.other._consumed(len(data))
        if self.closed:
            return
        self._unread.append(data)
        self._read()

    def _read(self) -> None:
        while self._unread and self._reads and not self.closed:
            data, self._unread = b"".join(self._unread), []
            self.protocol.data_received(data)

    def _consumed(self, size: int) -> None:
        self._waiting -= size
        if self._paused and self._waiting <= self._high // 4:
            self._paused = False
            if not self.closed:
                self.link.loop.call_soon(self.protocol.resume_writing, context=self.context)

    def _peer_closed(self) -> None:
        if not self.closed:
            self.protocol.eof_received()
            self.close()

    def reset(self) -> None:
        if not self.closed:
            self._end(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))

    def _end(
        self, error: Exception | None, arrival: Callable[[], None] | None = None, not_before: float = 0.0
    ) -> None:
        """The other end, unless the connection is silent, learns of it by `arrival`."""
        self.closed = True
        self.link.network.ledger.closed(self)
        loop = self.link.loop
        loop.call_soon(self.protocol.connection_lost, error, context=self.context)
        if arrival is not None and not self.link.silent:
            self._arrives = max(not_before, loop.now + self.link.latency())
            loop.call_at(self._arrives, arrival, context=self.other.context)


class Link:
    """Both ends, and what is done to them."""

    def __init__(self, network: Network, address: str, fault: Fault | None) -> None:
        self.loop = network.loop
        self.network = network
        self.address = address
        self.is_local = address.startswith("/")
        self.fault = fault
        self.silent = self.broken = False
        self.client: End
        self.server: End

    def latency(self) -> float:
        """Return what the next bytes take; over a Unix socket that is never long."""
        return self.network.random.uniform(1e-4, 2e-3) if self.is_local else self.network.latency()

    def break_off(self, *, silent: bool = False, after: float = 0.0) -> None:
        """Nothing more is carried; both ends learn of it, unless it is `silent`."""
        self.silent = self.silent or silent
        self.broken = True
        if silent:
            self.loop.call_later(FORGOTTEN, self.server.reset, context=self.server.context)
            return
        for end in (self.client, self.server):
            when = max(after + 1e-7, self.loop.now + self.latency())
            self.loop.call_at(when, end.reset, context=end.context)


class _Server:
    """What `create_server` returns."""

    def __init__(self, network: Network, key: str, sock: Any) -> None:
        self.sockets = (sock,)
        self._network = network
        self._key = key

    def close(self) -> None:
        self._network.listening.pop(self._key, None)
        if self.sockets[0] is not None:
            self.sockets[0].close()

    async def wait_closed(self) -> None:
        """Connections are not waited for."""


class Network:
    """`answer` is asked about every connection to a host outside: how long it takes, and what serves it. The
    `ledger` learns what is opened, written and closed.
    """

    def __init__(self, loop: SimLoop, random: Random, answer: Answers, ledger: Ledger) -> None:
        self.loop = loop
        self.random = random
        self.answer = answer
        self.ledger = ledger
        self.slowest = 0.02
        self.listening: dict[str, tuple[Factory, contextvars.Context]] = {}
        self._dialled: dict[Any, tuple[str, Factory, contextvars.Context, Fault | None]] = {}

    def latency(self) -> float:
        return self.random.uniform(0.0005, self.slowest)

    # Inside: the relay's own sockets

    def listen(self, factory: Factory, sock: Any, path: Any = None) -> _Server:
        key = str(path) if path is not None else _name(sock)
        self.listening[key] = factory, contextvars.copy_context()
        process = PROCESS.get()
        server = _Server(self, key, sock)
        if process is not None:
            process.at_death.append(server.close)
        return server

    async def connect(
        self, key: str, factory: Factory, fault: Fault | None = None
    ) -> tuple[End, asyncio.Protocol]:
        """To one of the relay's sockets. Raises ConnectionRefusedError."""
        await asyncio.sleep(self.latency())
        if key not in self.listening:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        serve, context = self.listening[key]
        return self._join(key, factory, serve, context, fault)

    # Outside: receivers

    async def dial(self, sock: Any, address: tuple[str, int]) -> None:
        seconds, what, fault = self.answer(address[0], address[1])
        await asyncio.sleep(seconds)
        if isinstance(what, OSError):
            raise what
        outside = contextvars.Context()
        self._dialled[sock] = f"{address[0]}:{address[1]}", what, outside, fault

    def adopt(self, sock: Any, factory: Factory) -> tuple[End, asyncio.Protocol]:
        key, serve, context, fault = self._dialled.pop(sock)
        sock.close()
        return self._join(key, factory, serve, context, fault)

    def _join(
        self, key: str, factory: Factory, serve: Factory, context: contextvars.Context, fault: Fault | None
    ) -> tuple[End, asyncio.Protocol]:
        link = Link(self, key, fault)
        mine = factory()
        client = link.client = End(link, mine, is_server=False)
        server = link.server = context.run(lambda: End(link, serve(), is_server=True))
        client.other, server.other = server, client
        process = PROCESS.get()
        for end, owner in ((client, process), (server, context.get(PROCESS))):
            if owner is not None:
                owner.at_death.append(partial(self._died, end))
        self.ledger.opened(client)
        self.loop.call_soon(server.protocol.connection_made, server, context=server.context)
        mine.connection_made(client)
        return client, mine

    def _died(self, end: End) -> None:
        """The system closes the sockets of a process that is gone; after a power cut nobody does."""
        if not end.closed:
            end.closed = True
            self.ledger.closed(end)
            if not end.link.silent:
                when = self.loop.now + self.latency()
                self.loop.call_at(when, end.other.reset, context=end.other.context)


def _name(sock: Any) -> str:
    name = sock.getsockname()
    return name if isinstance(name, str) else f"{name[0]}:{name[1]}"


def process_of(end: End) -> Process | None:
    return end.context.get(PROCESS)
