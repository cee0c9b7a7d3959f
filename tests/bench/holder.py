"""Holds many sessions open at once: silent ones, or slow ones that send one octet a second.

Run as `python -m tests.bench.holder '{"port": …}'` with the fields of Hold as JSON. It says `held` on stdout
when every session has got as far as it should, keeps them until its standard input ends, and then prints
how many octets it has sent. A session that the relay ends meanwhile ends the holder, with status 1.

Of the slow ones every other is in the middle of a command, the rest in the middle of a message.
"""

from __future__ import annotations

import asyncio
import gc
import ssl
import sys
from collections.abc import Callable
from functools import partial

import msgspec
import uvloop

from tests.bench.client import ClientSession, Steps, client_context, give_up, opening
from tests.bench.rows import Tls

AT_ONCE = 20  # connections being opened: Postfix starts a process for each
TICKS = 50  # a second


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    port: int
    sessions: int
    tls: Tls = Tls.NONE
    users: int = 0
    slow: bool = False


def idle(hold: Hold, _number: int) -> Steps:
    yield from opening(hold)


def slow(hold: Hold, number: int) -> Steps:
    yield from opening(hold)
    if number % 2:
        yield b"MAIL FROM:<slow@example.org>\r\n", 1
        yield b"RCPT TO:<slow@d0.example.com>\r\n", 1
        yield b"DATA\r\n", 1


class HeldSession(ClientSession):
    """Stays where its steps have led; `lost` is told when the relay ends it."""

    def __init__(self, steps: Steps, context: ssl.SSLContext | None, lost: Callable[[str], None]) -> None:
        super().__init__(steps, context)
        self._lost = lost

    def finished(self) -> None:
        self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if self.done.done():
            self._lost(str(error))
        super().fail(error)

    def drip(self) -> None:
        assert self.transport is not None
        self.transport.write(b"N")


class Holder:
    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._context = client_context() if hold.tls is not Tls.NONE else None
        self._sessions: list[HeldSession] = []
        self._sent = 0
        self._over = False

    async def run(self) -> int:
        gate = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for number in range(self._hold.sessions):
                group.create_task(self._open(number, gate))
        print("held", flush=True)
        dripping = asyncio.create_task(self._drip()) if self._hold.slow else None
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        self._over = True
        if dripping is not None:
            dripping.cancel()
        return self._sent

    async def _open(self, number: int, gate: asyncio.Semaphore) -> None:
        kind = slow if self._hold.slow else idle
        context = self._context if self._hold.tls is Tls.IMPLICIT else None
        begin = partial(HeldSession, kind(self._hold, number), self._context, self._on_lost)
        async with gate:
            loop = asyncio.get_running_loop()
            _, session = await loop.create_connection(begin, "127.0.0.1", self._hold.port, ssl=context)
            await session.done
        self._sessions.append(session)

    async def _drip(self) -> None:
        """An octet for each session in each second, evenly spread."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            await asyncio.sleep(1 / TICKS)
            due = int((loop.time() - began) * len(self._sessions))
            for number in range(self._sent, due):
                self._sessions[number % len(self._sessions)].drip()
            self._sent = due

    def _on_lost(self, what: str) -> None:
        if not self._over:
            raise RuntimeError(f"a held session ended: {what}")


async def run(hold: Hold) -> int:
    asyncio.get_running_loop().set_exception_handler(give_up)
    return await Holder(hold).run()


def main() -> None:
    gc.disable()
    print(uvloop.run(run(msgspec.json.decode(sys.argv[1], type=Hold))))


if __name__ == "__main__":
    main()
