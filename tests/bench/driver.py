"""A load driver of our own, for what smtp-source cannot do: many domains, TLS, log-ins, and latencies.

Run as `python -m tests.bench.driver '{"port": …}'` with the fields of Load as JSON; prints the fields
of Report as JSON. It sends at the speed of the relay, or the one that is offered, over a fixed number of
sessions, and stops at the first reply that is not positive, because a bench with refusals measures something
else.
"""

import asyncio
import gc
import sys
import time
from functools import partial

import msgspec
import uvloop

from tests.bench.client import ClientSession, Step, Steps, client_context, give_up, opening
from tests.bench.rows import Tls, domain

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
    session_messages: int = 0
    pipelining: bool = False
    tls: Tls = Tls.NONE
    users: int = 0
    offered: int = 0
    senders: int = 1


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`began` and `ended` are readings of the system-wide monotonic clock. `latencies` run from the final
    dot to its reply; `cpu` is the driver's own.
    """

    began: float
    ended: float
    latencies: list[float]
    cpu: float

    @property
    def busy(self) -> float:
        """How much of one core the driver itself needed."""
        return self.cpu / (self.ended - self.began)


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
    sender = _letters(number % load.senders) if load.senders > 1 else b"sender"
    return [b"MAIL FROM:<%s@example.org>\r\n" % sender, *recipients, b"DATA\r\n"]


def _letters(number: int) -> bytes:
    """A name without digits: senders that only count are one to the relay (`inbound/bursts.py`)."""
    return bytes(ord("a") + int(digit) for digit in f"{number:04d}")


class Work:
    """What the sessions share: messages still to send and the latencies found."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.content = message(load.size)
        self.context = client_context() if load.tls is not Tls.NONE else None
        self.latencies: list[float] = []
        self._next = 0

    def take(self) -> int | None:
        """The number of the next message, None when all are taken."""
        if self._next == self.load.messages:
            return None
        self._next += 1
        return self._next - 1


class DriverSession(ClientSession):
    """Takes messages from the work and sends them: one, or as long as there are any."""

    def __init__(self, work: Work, first: int) -> None:
        self._work = work
        self._blocked = False
        self._dot_at = 0.0
        self._dot_owed = False
        super().__init__(self._dialog(first), work.context)

    def _dialog(self, first: int) -> Steps:
        load, work = self._work.load, self._work
        yield from opening(load, first)
        number: int | None = first
        left = load.session_messages if load.reuse else 1
        while number is not None:
            yield from self._transaction(number)
            work.latencies.append(time.monotonic() - self._dot_at)
            left -= 1  # without a limit it is never 0
            number = work.take() if left else None
        yield b"QUIT\r\n", 1

    def _transaction(self, number: int) -> Steps:
        commands = envelope(self._work.load, number)
        steps: list[Step] = [(command, 1) for command in commands]
        if self._work.load.pipelining:
            steps = [(b"".join(commands), len(commands))]
        yield from steps
        self._send_content(self._work.content)
        yield b"", 1

    def _send_content(self, content: bytes) -> None:
        """The final dot of a long message is timed when all before it has left for the kernel."""
        assert self.transport is not None
        if len(content) <= ONE_WRITE:
            self._dot_at = time.monotonic()
            self.transport.write(content + b".\r\n")
            return
        self._dot_owed = True
        self.transport.write(content)
        if not self._blocked:
            self._send_dot()

    def _send_dot(self) -> None:
        assert self.transport is not None
        self._dot_owed = False
        self._dot_at = time.monotonic()
        self.transport.write(b".\r\n")

    def pause_writing(self) -> None:
        self._blocked = True

    def resume_writing(self) -> None:
        self._blocked = False
        if self._dot_owed:
            self._send_dot()


async def run(load: Load) -> Report:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(give_up)
    work = Work(load)
    implicit = work.context if load.tls is Tls.IMPLICIT else None

    async def worker() -> None:
        while (number := work.take()) is not None:
            if load.offered:
                await asyncio.sleep(began + number / load.offered - time.monotonic())
            begin = partial(DriverSession, work, number)
            _, session = await loop.create_connection(begin, "127.0.0.1", load.port, ssl=implicit)
            await session.done

    began, cpu = time.monotonic(), time.process_time()
    async with asyncio.timeout(TIME_LIMIT), asyncio.TaskGroup() as group:
        for _ in range(min(load.sessions, load.messages)):
            group.create_task(worker())
    return Report(
        began=began, ended=time.monotonic(), latencies=work.latencies, cpu=time.process_time() - cpu
    )


def main() -> None:
    gc.disable()
    load = msgspec.json.decode(sys.argv[1], type=Load)
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(run(load))))


if __name__ == "__main__":
    main()
