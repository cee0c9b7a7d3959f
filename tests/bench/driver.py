"""A load driver of our own, for what smtp-source cannot do: many domains, and latencies.

Run as `python -m tests.bench.driver '{"port": …}'` with the fields of Load as JSON; prints the fields
of Report as JSON. It sends at the speed of the relay over a fixed number of sessions and stops at the
first reply that is not positive, because a bench with refusals measures something else.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Generator
from typing import cast

import msgspec
import uvloop

from tests.bench.rows import domain

LINE = b"0123456789abcdefghijklmnopqrstuvwxyz0123456789abcdefghijklmnopqrstuvwxyz01\r\n"
ONE_WRITE = 64 * 1024
TIME_LIMIT = 120.0


class Load(msgspec.Struct, frozen=True, kw_only=True):
    port: int
    sessions: int
    messages: int
    size: int
    recipients: int = 1
    domains: int = 1
    reuse: bool = False
    pipelining: bool = False


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`began` and `ended` are readings of the system-wide monotonic clock."""

    began: float
    ended: float
    latencies: list[float]


class Refused(Exception):
    """The relay did not accept; the text is its reply."""


# What to send, and how many replies to wait for before going on.
Step = tuple[bytes, int]


def message(size: int) -> bytes:
    """Header and body of at least `size` octets, CRLF line ends, no final dot."""
    header = b"From: <sender@example.org>\r\nTo: undisclosed-recipients:;\r\nSubject: bench\r\n"
    header += b"Date: Thu, 20 Nov 2025 12:00:00 +0000\r\nMessage-ID: <bench@example.org>\r\n\r\n"
    return header + LINE * (size // len(LINE) + 1)


def envelope(load: Load, number: int) -> list[bytes]:
    """MAIL, RCPT…, DATA: recipient n of a message is in domain n modulo the domains."""
    recipients = (
        b"RCPT TO:<r%d.%d@%s>\r\n" % (number, one, domain(one % load.domains).encode())
        for one in range(load.recipients)
    )
    return [b"MAIL FROM:<sender@example.org>\r\n", *recipients, b"DATA\r\n"]


class Work:
    """What the sessions share: messages still to send and the latencies found."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.content = message(load.size)
        self.latencies: list[float] = []
        self._next = 0

    def take(self) -> int | None:
        """The number of the next message, None when all are taken."""
        if self._next == self.load.messages:
            return None
        self._next += 1
        return self._next - 1

    @property
    def left(self) -> bool:
        return self._next < self.load.messages


class ClientSession(asyncio.Protocol):
    """One connection that works through its dialog; `done` is set when the relay has answered QUIT."""

    def __init__(self, work: Work) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._work = work
        self._steps = self._dialog()
        self._awaited = 0
        self._partial = b""
        self._blocked = False
        self._dot_at = 0.0
        self._dot_owed = False
        self._transport: asyncio.Transport | None = None

    def _dialog(self) -> Generator[Step, None, None]:
        load, work = self._work.load, self._work
        yield b"", 1
        yield b"EHLO bench.example.org\r\n", 1
        while (number := work.take()) is not None:
            commands = envelope(load, number)
            if load.pipelining:
                yield b"".join(commands), len(commands)
            else:
                for command in commands:
                    yield command, 1
            self._send_content(work.content)
            yield b"", 1
            work.latencies.append(time.monotonic() - self._dot_at)
            if not load.reuse:
                break
        yield b"QUIT\r\n", 1

    def _send_content(self, content: bytes) -> None:
        """The final dot of a long message is timed when all before it has left for the kernel."""
        assert self._transport is not None
        if len(content) <= ONE_WRITE:
            self._dot_at = time.monotonic()
            self._transport.write(content + b".\r\n")
            return
        self._dot_owed = True
        self._transport.write(content)
        if not self._blocked:
            self._send_dot()

    def _send_dot(self) -> None:
        assert self._transport is not None
        self._dot_owed = False
        self._dot_at = time.monotonic()
        self._transport.write(b".\r\n")

    def pause_writing(self) -> None:
        self._blocked = True

    def resume_writing(self) -> None:
        self._blocked = False
        if self._dot_owed:
            self._send_dot()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes, only alike.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(0)
        self._advance()

    def data_received(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\r\n")
        for line in lines:
            if line[:1] not in (b"2", b"3"):
                self._fail(Refused(line.decode(errors="replace")))
                return
            if line[3:4] != b"-":
                self._awaited -= 1
        if self._awaited == 0:
            self._advance()

    def _advance(self) -> None:
        assert self._transport is not None
        step = next(self._steps, None)
        if step is None:
            self._transport.close()
            if not self.done.done():
                self.done.set_result(None)
            return
        data, self._awaited = step
        if data:
            self._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(Refused(f"connection lost: {exc}"))

    def _fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
        if self._transport is not None:
            self._transport.close()


def give_up(_loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """An error in a callback would otherwise be a wait without end: the process ends instead."""
    print(context.get("exception") or context["message"], file=sys.stderr, flush=True)
    os._exit(1)


async def run(load: Load) -> Report:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(give_up)
    work = Work(load)

    async def worker() -> None:
        while work.left:
            _, session = await loop.create_connection(lambda: ClientSession(work), "127.0.0.1", load.port)
            await session.done

    began = time.monotonic()
    async with asyncio.timeout(TIME_LIMIT), asyncio.TaskGroup() as group:
        for _ in range(min(load.sessions, load.messages)):
            group.create_task(worker())
    return Report(began=began, ended=time.monotonic(), latencies=work.latencies)


def main() -> None:
    gc.disable()
    load = msgspec.json.decode(sys.argv[1], type=Load)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(run(load))))


if __name__ == "__main__":
    main()
