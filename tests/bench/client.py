"""The SMTP client under the bench's drivers: one connection that works through a dialog of steps.

Its TLS is the event loop's own (OpenSSL in this process), version 1.3, and it never resumes a session, so
that every handshake is a whole one. It stops at the first reply that is not positive, because a bench with
refusals measures something else.
"""

import asyncio
import base64
import os
import ssl
import sys
from collections.abc import Iterator
from typing import Protocol, cast

from tests.bench.rows import Tls

PASSWORD = "correct horse battery staple"

# What to send, and how many replies to wait for before going on. None: the TLS handshake.
Step = tuple[bytes, int] | None
Steps = Iterator[Step]


class Refused(Exception):
    """The relay did not accept; the text is its reply."""


class Door(Protocol):
    """How a session begins."""

    @property
    def tls(self) -> Tls: ...

    @property
    def users(self) -> int:
        """So many log in, in turn; with 0 nobody does."""


def user_name(number: int) -> str:
    return f"bench{number}"


def opening(door: Door, number: int = 0) -> Steps:
    """Greeting, EHLO, and what the door asks for: STARTTLS, AUTH as the user whose turn it is."""
    yield b"", 1
    yield b"EHLO bench.example.org\r\n", 1
    if door.tls is Tls.STARTTLS:
        yield b"STARTTLS\r\n", 1
        yield None
        yield b"EHLO bench.example.org\r\n", 1
    if door.users:
        secret = f"\0{user_name(number % door.users)}\0{PASSWORD}".encode()
        yield b"AUTH PLAIN " + base64.b64encode(secret) + b"\r\n", 1


def client_context() -> ssl.SSLContext:
    """Whom it talks to is not asked: checking a chain would be the client's work, not the relay's."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


class ClientSession(asyncio.Protocol):
    """`done` is set when the last step has been answered; the connection is closed then.

    The steps are asked for one at a time, each when the one before has been answered.
    """

    def __init__(self, steps: Steps, context: ssl.SSLContext | None = None) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None
        self._steps = steps
        self._context = context
        self._handshake: asyncio.Task[None] | None = None
        self._awaited = 0
        self._partial = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._use(transport)
        self._advance()

    def _use(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes, only alike.
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(0)

    def data_received(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\r\n")
        for line in lines:
            if line[:1] not in (b"2", b"3"):
                self.fail(Refused(line.decode(errors="replace")))
                return
            if line[3:4] != b"-":
                self._awaited -= 1
        if self._awaited == 0:
            self._advance()

    def _advance(self) -> None:
        assert self.transport is not None
        try:
            step = next(self._steps)
        except StopIteration:
            self.finished()
            return
        if step is None:
            self._handshake = asyncio.get_running_loop().create_task(self._start_tls())
            return
        data, self._awaited = step
        if data:
            self.transport.write(data)

    async def _start_tls(self) -> None:
        assert self.transport is not None
        assert self._context is not None
        loop = asyncio.get_running_loop()
        try:
            transport = await loop.start_tls(self.transport, self, self._context)
        except OSError as error:
            self.fail(Refused(f"no TLS: {error}"))
            return
        if transport is None:
            self.fail(Refused("connection lost in the handshake"))
            return
        self._use(transport)
        self._advance()

    def finished(self) -> None:
        """Every step has been answered."""
        assert self.transport is not None
        self.transport.close()
        if not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.fail(Refused(f"connection lost: {exc}"))

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
        if self.transport is not None:
            self.transport.close()


def give_up(_loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    """An error in a callback would otherwise be a wait without end: the process ends instead."""
    print(context.get("exception") or context["message"], file=sys.stderr, flush=True)
    os._exit(1)
