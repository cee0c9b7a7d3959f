"""Connects two protocols in this process: what one writes the other receives at once, without a system call.

Each gets a transport as from a socket. What is written to an end that does not read waits at the other one,
which is told to pause above `HIGH` octets. When one side closes, what it has written arrives first, and then
the other one has lost its connection too.
"""

from __future__ import annotations

import asyncio

HIGH = 64 * 1024


class _End(asyncio.Transport):
    def __init__(self, protocol: asyncio.Protocol, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.protocol = protocol
        self.other: _End
        self._loop = loop
        self._reads = True
        self._waiting = bytearray()  # for this side
        self._closing = False

    def take(self, data: bytes) -> None:
        if self._reads and not self._waiting:
            self.protocol.data_received(data)
            return
        self._waiting += data
        if len(self._waiting) - len(data) <= HIGH < len(self._waiting):
            self.other.protocol.pause_writing()

    def write(self, data: bytes | bytearray | memoryview[int]) -> None:
        if data and not self._closing and not self.other._closing:
            self.other.take(bytes(data))

    def get_write_buffer_size(self) -> int:
        return len(self.other._waiting)

    def pause_reading(self) -> None:
        self._reads = False

    def resume_reading(self) -> None:
        if not self._reads:
            self._reads = True
            self._loop.call_soon(self._take_waiting)

    def _take_waiting(self) -> None:
        if not self._reads or not self._waiting or self._closing:
            return
        data, was_high = bytes(self._waiting), len(self._waiting) > HIGH
        self._waiting.clear()
        self.protocol.data_received(data)
        if was_high and not self.other.is_closing():
            self.other.protocol.resume_writing()

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._lost)

    abort = close

    def _lost(self) -> None:
        self.protocol.connection_lost(None)
        self.other._take_waiting()
        self.other.close()


def connect(client: asyncio.Protocol, server: asyncio.Protocol) -> None:
    loop = asyncio.get_running_loop()
    one, other = _End(client, loop), _End(server, loop)
    one.other, other.other = other, one
    client.connection_made(one)
    server.connection_made(other)
