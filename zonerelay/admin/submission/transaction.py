"""Hands messages to a worker: an SMTP session on its socket for HTTP, in the name of an HTTP client.

The worker takes the mail as it takes any other: the same limits, rules, policies and promises. So this side
says XCLIENT with the client's address and the user of the token, then MAIL, RCPT and BDAT, and turns replies
into problems. The worker answers 250 after its synced commit. When the client leaves before the end of its
message nothing is stored.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zonerelay.admin.api.problems import Code, FieldError, Problem

PATIENCE = 600.0
"""Seconds for a reply, as RFC 5321 4.5.3.2.6 gives the end of data."""
GREETING = 20.0
CHUNK = 256 * 1024
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


class Worker:
    """One session. Close it in any case."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, sockets: Sequence[Path], client: str, user: str) -> Worker:
        """With the first worker that answers. Raises Problem."""
        reply = Answered(421, "4.3.2 no worker takes mail now")
        for path in sockets:
            try:
                worker = cls(*await asyncio.open_unix_connection(str(path)))
            except OSError:
                continue
            try:
                async with asyncio.timeout(GREETING):
                    reply = await worker._begin(client, user)
            except (TimeoutError, Problem):
                worker.close()
                continue  # it hangs, or has ended: nothing has been said to it yet
            except BaseException:
                worker.close()
                raise
            if reply.good:
                return worker
            worker.close()
            if reply.code != 421:
                break
        raise reply.problem(())

    async def _begin(self, client: str, user: str) -> Answered:
        address = f"IPV6:{client}" if ":" in client else client
        name = "".join(f"+{octet:02X}" for octet in user.encode())  # xtext, all of it
        reply = await self._reply()
        for line in (f"EHLO [{address}]", f"XCLIENT ADDR={address or '[UNAVAILABLE]'} LOGIN={name}"):
            if reply.good:
                reply = await self._say(line)
        return reply

    async def envelope(
        self, sender: str, recipients: Sequence[str], parameters: Mapping[str, str]
    ) -> tuple[Answered, list[Answered]]:
        """The reply to MAIL, and to each RCPT if that was good."""
        more = "".join(f" {name}={value}" if value else f" {name}" for name, value in parameters.items())
        reply = await self._say(f"MAIL FROM:<{sender}>{more}")
        replies = []
        # In groups, so that neither side waits for the other with full buffers.
        for at in range(0, len(recipients) if reply.good else 0, 100):
            group = recipients[at : at + 100]
            self._writer.write("".join(f"RCPT TO:<{each}>\r\n" for each in group).encode())
            replies += [await self._reply() for _ in group]
        return reply, replies

    async def message(self, pieces: AsyncIterator[bytes]) -> Answered:
        waiting: list[bytes] = []
        size = 0
        async for piece in pieces:
            waiting.append(piece)
            size += len(piece)
            if size >= CHUNK:
                reply = await self._chunk(b"".join(waiting), "")
                if not reply.good:
                    return reply
                waiting, size = [], 0
        return await self._chunk(b"".join(waiting), " LAST")

    async def _chunk(self, octets: bytes, last: str) -> Answered:
        self._writer.write(b"BDAT %d%b\r\n" % (len(octets), last.encode()))
        self._writer.write(octets)
        return await self._reply()

    async def _say(self, line: str) -> Answered:
        self._writer.write(f"{line}\r\n".encode())
        return await self._reply()

    async def _reply(self) -> Answered:
        """Raises Problem."""
        lines = []
        try:
            async with asyncio.timeout(PATIENCE):
                await self._writer.drain()
                while True:
                    line = (await self._reader.readuntil()).decode().rstrip("\r\n")
                    lines.append(line[4:])
                    if line[3:4] != "-":
                        return Answered(int(line[:3]), " ".join(lines))
        except (OSError, EOFError, TimeoutError, ValueError) as error:
            text = "the worker was lost before it answered: whether it has the message is not known"
            raise Problem(503, "unavailable", text, fields={"Retry-After": "5"}) from error

    def close(self) -> None:
        self._writer.close()


def message_id_of(reply: Answered) -> str:
    found = _QUEUED.search(reply.text)
    assert found is not None
    return found[1]
