"""Hands messages to a worker: an SMTP session with it, in the name of an HTTP client.

The worker takes the mail as it takes any other: the same limits, rules, policies and promises. So this side
says XCLIENT with the client's address and the user of the token, then MAIL, RCPT and BDAT, and turns replies
into problems. The worker answers 250 after its synced commit. When the client leaves before the end of its
message nothing is stored.

A session that has taken a message is kept for the next one, of whichever client. The reply to its XCLIENT
shows that it lives: one that has ended meanwhile is replaced, since nothing has been said in it yet. The
worker looks at the user anew at each XCLIENT and each MAIL, and ends sessions when its settings change.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from zonerelay.admin.api.problems import Code, FieldError, Problem
from zonerelay.admin.operators import Place

PATIENCE = 600.0
"""Seconds for a reply, as RFC 5321 4.5.3.2.6 gives the end of data."""
GREETING = 20.0
CHUNK = 256 * 1024
MAX_KEPT = 16
"""Sessions that are kept with one worker."""
KEPT_FOR = 30.0
"""Seconds for which a session is kept: less than a listener waits, which logs that its client is silent."""
_QUEUED = re.compile(r"queued as ([0-9a-f]{16})")
_AGAIN = re.compile(r"in (\d+) (second|minute|hour)")
_SECONDS = {"second": 1, "minute": 60, "hour": 3600}


@dataclass(frozen=True, slots=True)
class Answered:
    """A reply of the worker. `text` is that of all its lines, with the enhanced status."""

    code: int
    text: str

    @property
    def good(self) -> bool:
        return self.code < 400

    @property
    def words(self) -> str:
        return f"{self.code} {self.text}"

    def problem(self, pointers: Sequence[tuple[str, str]]) -> Problem:
        """`pointers` are the fields that are to blame, each with its detail."""
        status, code = _meaning(self)
        again = _AGAIN.search(self.text)
        fields = {}
        if status in (429, 503):
            wait = int(again[1]) * _SECONDS[again[2]] if again else 60 if status == 429 else 10
            fields["Retry-After"] = str(wait)
        errors = [FieldError(pointer=pointer, detail=detail) for pointer, detail in pointers]
        return Problem(status, code, self.text, errors=errors, fields=fields, smtp_reply=self.words)


def _meaning(reply: Answered) -> tuple[int, Code]:
    text = reply.text
    found: tuple[int, Code]
    if reply.code == 535 or text.startswith("5.7.13"):
        found = 403, "forbidden"
    elif text.startswith("5.3.4"):
        found = 413, "too_large"
    elif "Idempotency-Key has to be" in text:
        found = 400, "malformed"
    elif "cannot remember idempotency keys" in text:
        found = 501, "not_possible"
    elif text.startswith("4.3.0") and "idempotency key" in text:
        found = 409, "not_possible"
    elif text.startswith("4.7.") and reply.code == 452:
        found = 429, "too_many"
    elif reply.code >= 500 or text.startswith("4.5.3"):
        found = 422, "refused"
    else:
        found = 503, "unavailable"
    return found


class LostError(Exception):
    """The worker was lost before it answered."""


class Worker(asyncio.Protocol):
    """One session. Its replies come in the order of what was said."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._lines: list[str] = []
        self._replies = deque[Answered]()
        self._waiter: asyncio.Future[None] | None = None
        self._end: asyncio.TimerHandle | None = None

    # The event loop calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\r\n")
        for line in lines:
            text = line.decode("utf-8", "replace")
            self._lines.append(text[4:])
            if text[3:4] != "-":
                self._replies.append(Answered(int(text[:3]), " ".join(self._lines)))
                self._lines = []
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What is said.

    def keep(self) -> None:
        self._end = asyncio.get_running_loop().call_later(KEPT_FOR, self.close)

    def taken_up(self) -> bool:
        """Whether it is open, and nothing waits to be read: the worker has not said farewell."""
        if self._end is not None:
            self._end.cancel()
        return self._transport is not None and not self._transport.is_closing() and not self._replies

    async def greet(self, address: str) -> Answered:
        """Raises LostError."""
        reply = await self._reply(GREETING)
        if reply.good:
            self._write(f"EHLO [{address}]\r\n".encode())
            reply = await self._reply(GREETING)
        return reply

    async def name(self, address: str, user: str) -> Answered:
        """Raises LostError."""
        name = "".join(f"+{octet:02X}" for octet in user.encode())  # xtext, all of it
        self._write(f"XCLIENT ADDR={address or '[UNAVAILABLE]'} HELO=[{address}] LOGIN={name}\r\n".encode())
        return await self._reply(GREETING)

    async def envelope(
        self, sender: str, recipients: Sequence[str], parameters: Mapping[str, str]
    ) -> tuple[Answered, list[Answered]]:
        """The reply to MAIL, and to each RCPT if that was good. Raises Problem."""
        more = "".join(f" {name}={value}" if value else f" {name}" for name, value in parameters.items())
        with _lost():
            self._write(f"MAIL FROM:<{sender}>{more}\r\n".encode())
            reply = await self._reply()
            if not reply.good:
                return reply, []
            self._write("".join(f"RCPT TO:<{each}>\r\n" for each in recipients).encode())
            return reply, [await self._reply() for _ in recipients]

    async def message(self, pieces: AsyncIterator[bytes]) -> Answered:
        """Raises Problem."""
        waiting: list[bytes] = []
        size = 0
        async for piece in pieces:
            waiting.append(piece)
            size += len(piece)
            if size >= CHUNK:
                reply = await self._chunk(b"".join(waiting), b"")
                if not reply.good:
                    return reply
                waiting, size = [], 0
        return await self._chunk(b"".join(waiting), b" LAST")

    async def _chunk(self, octets: bytes, last: bytes) -> Answered:
        with _lost():
            self._write(b"BDAT %d%b\r\n%b" % (len(octets), last, octets))
            return await self._reply()

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    async def _reply(self, patience: float = PATIENCE) -> Answered:
        """Raises LostError."""
        while not self._replies:
            if self._transport is None:
                raise LostError
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            late = loop.call_later(patience, self.close)
            try:
                await self._waiter
            finally:
                late.cancel()
                self._waiter = None
        return self._replies.popleft()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


@contextlib.contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except LostError as error:
        text = "the worker was lost before it answered: whether it has the message is not known"
        raise Problem(503, "unavailable", text, fields={"Retry-After": "5"}) from error


class WorkerSessions:
    """The sessions with workers. `places` are those that take mail now."""

    def __init__(self, places: Callable[[], Sequence[Place]]) -> None:
        self._places = places
        self._kept = defaultdict[Place, list[Worker]](list)

    @contextlib.asynccontextmanager
    async def session(self, client: str, user: str) -> AsyncIterator[Worker]:
        """A session with the first worker that answers, in the name of a client. It is kept for others if the
        block ends without an exception. Raises Problem.
        """
        places = list(self._places())
        for gone in self._kept.keys() - set(places):
            for each in self._kept.pop(gone):
                each.close()
        worker, place = await self._begin(places, f"IPV6:{client}" if ":" in client else client, user)
        try:
            yield worker
        except BaseException:
            worker.close()
            raise
        if len(self._kept[place]) < MAX_KEPT:
            worker.keep()
            self._kept[place].append(worker)
        else:
            worker.close()

    async def _begin(self, places: Sequence[Place], address: str, user: str) -> tuple[Worker, Place]:
        reply = Answered(421, "4.3.2 no worker takes mail now")
        at = secrets.randbelow(len(places)) if len(places) > 1 else 0
        for place in (*places[at:], *places[:at]):
            while True:
                worker, is_kept = self._kept_with(place), True
                if worker is None:
                    worker, is_kept = await _opened(place), False
                    if worker is None:
                        break
                try:
                    reply = Answered(250, "") if is_kept else await worker.greet(address)
                    if reply.good:
                        reply = await worker.name(address, user)
                    if reply.good:
                        return worker, place
                except LostError:  # it hangs, or has ended: no mail has been handed to it yet
                    reply = Answered(421, "4.3.2 the worker was lost before it took mail")
                except BaseException:
                    worker.close()
                    raise
                worker.close()
                if reply.code != 421:
                    raise reply.problem(())
                if not is_kept:
                    break
        raise reply.problem(())

    def _kept_with(self, place: Place) -> Worker | None:
        kept = self._kept[place]
        while kept:
            worker = kept.pop()
            if worker.taken_up():
                return worker
            worker.close()
        return None


async def _opened(place: Place) -> Worker | None:
    worker = Worker()
    if not isinstance(place, Path):
        place(worker)
        return worker
    try:
        await asyncio.get_running_loop().create_unix_connection(lambda: worker, str(place))
    except OSError:
        return None
    return worker


def message_id_of(reply: Answered) -> str:
    found = _QUEUED.search(reply.text)
    assert found is not None
    return found[1]
