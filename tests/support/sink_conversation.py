"""The sink's side of one SMTP connection, and the manners that it shows.

Small and readable before fast: asyncio streams, one command at a time, in order, so that pipelined
commands are answered as they come.
"""

import asyncio
import hashlib
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zonerelay.sandbox.behaviours import ScriptedReply, behaviour_of

if TYPE_CHECKING:
    from tests.support.sink import Sink

READ_SIZE = 256 * 1024
_END = b"\r\n.\r\n"

Script = Callable[[str, str], str | None]
"""`script(verb, argument)` returns the reply, lines separated by `\\n`, or `None` for the usual one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manners:
    """The kind of server. `tls` offers STARTTLS, `broken_tls` offers it and fails the handshake.

    `injected` is sent in clear text together with the reply to STARTTLS, as an attacker would.
    `chatter` is sent unasked after each message. `byte_by_byte` sends every reply one byte at a time.
    """

    greeting: str = "220 sink ESMTP"
    esmtp: bool = True
    pipelining: bool = True
    eight_bit_mime: bool = True
    smtputf8: bool = True
    dsn: bool = False
    chunking: bool = False
    limits: str = ""
    tls: ssl.SSLContext | None = None
    broken_tls: bool = False
    injected: str = ""
    chatter: str = ""
    size: int | None = None
    max_recipients: int | None = None
    too_many: str = "452 4.5.3 too many recipients"
    messages_per_connection: int | None = None
    multi_line: bool = False
    enhanced: bool = True
    byte_by_byte: bool = False
    greylisting: float = 0.0
    """Seconds for which a greylisted recipient is refused, once with 0. The relay asks some of them again at
    once, on another connection, in case the refusal is about the session.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One accepted message. `body` is un-stuffed, `b""` unless bodies are kept; `sha256` is of the body.

    `chunks` is how many came with BDAT, 0 for DATA.
    """

    mail_from: str
    parameters: str
    recipients: tuple[str, ...]
    body: bytes
    size: int
    sha256: str
    tls: bool
    peer: str
    chunks: int = 0


class Conversation:
    """One connection of a client to the sink."""

    def __init__(self, book: "Sink", reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._book = book
        self._manners = book.manners
        self._reader = reader
        self._writer = writer
        self._buffer = b""
        self._tls = False
        self._accepted = 0
        self._open = True
        self._chunk_refused = False
        self._offered: set[str] = set()
        self._reset()

    async def run(self) -> None:
        await self._greet()
        while self._open:
            verb, _, argument = (await self._line()).partition(" ")
            verb = verb.upper()
            self._book.commands.append(f"{verb} {argument}".rstrip())
            scripted = self._scripted(verb, argument)
            if scripted is not None:
                await self._reply(scripted)
                self._open = not scripted.startswith("421")
            elif self._open:
                await self._command(verb, argument)

    async def _greet(self) -> None:
        await self._reply(self._manners.greeting)

    def _scripted(self, verb: str, argument: str) -> str | None:
        return self._book.script(verb, argument) if self._book.script else None

    async def _command(self, verb: str, argument: str) -> None:
        handlers = {
            "EHLO": self._ehlo,
            "HELO": self._helo,
            "STARTTLS": self._starttls,
            "MAIL": self._mail,
            "RCPT": self._rcpt,
            "DATA": self._data,
            "BDAT": self._bdat,
            "RSET": self._rset,
            "NOOP": self._noop,
            "QUIT": self._quit,
        }
        handler = handlers.get(verb)
        if handler is None or (verb == "EHLO" and not self._manners.esmtp):
            await self._reply("500 5.5.1 unknown command")
        else:
            await handler(argument)

    async def _ehlo(self, argument: str) -> None:
        manners = self._manners
        self._reset()
        offered = {
            "PIPELINING": manners.pipelining,
            "8BITMIME": manners.eight_bit_mime,
            "SMTPUTF8": manners.smtputf8,
            "DSN": manners.dsn,
            "CHUNKING": manners.chunking,
            f"LIMITS {manners.limits}": bool(manners.limits),
            "ENHANCEDSTATUSCODES": manners.enhanced,
            f"SIZE {manners.size}": manners.size is not None,
            "STARTTLS": not self._tls and (manners.tls is not None or manners.broken_tls),
        }
        keywords = [keyword for keyword, is_offered in offered.items() if is_offered]
        self._offered = {keyword.partition(" ")[0] for keyword in keywords}
        await self._reply("\n".join(["250 sink", *keywords]))

    async def _helo(self, argument: str) -> None:
        self._reset()
        await self._reply("250 sink")

    async def _starttls(self, argument: str) -> None:
        context = self._manners.tls
        await self._send(b"220 2.0.0 go ahead\r\n" + self._manners.injected.encode())
        if context is None:
            await self._send(b"this is not TLS\r\n")
            self._open = False
            return
        await self._writer.start_tls(context)
        self._buffer = b""
        self._tls = True

    async def _mail(self, argument: str) -> None:
        limit = self._manners.messages_per_connection
        if limit is not None and self._accepted >= limit:
            await self._reply("421 4.7.0 too many messages on this connection")
            self._open = False
            return
        path, _, self._parameters = argument.partition(" ")
        self._mail_from = path[len("FROM:<") : -1]
        await self._reply("250 2.1.0 sender ok")

    async def _rcpt(self, argument: str) -> None:
        path, _, parameters = argument.partition("> ")
        if parameters and not self._manners.dsn:
            await self._reply("555 5.5.4 parameters are not understood here")
            return
        recipient = path.removeprefix("TO:<").removesuffix(">")
        behaviour = behaviour_of(recipient)
        if behaviour.silent:
            await self._reader.read()
        if behaviour.silent or behaviour.close_at_rcpt:
            self._open = False
            return
        await asyncio.sleep(behaviour.delay)
        reply = self._rcpt_reply(recipient, behaviour)
        if reply.startswith("2"):
            self._recipients[recipient] = behaviour
        self._open = not reply.startswith("421")
        await self._reply(reply)

    def _rcpt_reply(self, recipient: str, behaviour: ScriptedReply) -> str:
        key = (self._mail_from, recipient)
        limit = self._manners.max_recipients
        if behaviour.rcpt:
            return behaviour.rcpt
        if limit is not None and len(self._recipients) >= limit:
            return self._manners.too_many
        now = asyncio.get_running_loop().time()
        if behaviour.greylist and now < self._book.greylisted.get(key, now + 1) + self._manners.greylisting:
            self._book.greylisted.setdefault(key, now)
            return "451 4.7.1 greylisted, come back later"
        return "250 2.1.5 recipient ok"

    async def _data(self, argument: str) -> None:
        behaviours = list(self._recipients.values())
        refused = next((b.data for b in behaviours if b.data), "")
        if refused or not behaviours:
            await self._reply(refused or "554 5.5.1 no valid recipients")
            return
        await self._reply("354 go ahead")
        if any(b.close_before_dot or b.early for b in behaviours):
            await self._reader.read(1)
            self._open = False
            early = next((b.early for b in behaviours if b.early), "")
            if early:
                await self._reply(early)
            return
        body, size, digest = await self._body()
        if any(b.close_after_dot for b in behaviours):
            self._open = False
            return
        await self._answer_message(behaviours, body, size, digest)

    async def _bdat(self, argument: str) -> None:
        """A chunk, read whole whatever is answered (RFC 3030 2): the client's chunks bound the memory."""
        size, _, last = argument.partition(" ")
        content = await self._octets(int(size))
        behaviours = list(self._recipients.values())
        refused = next((b.data for b in behaviours if b.data), "")
        if refused or not behaviours or self._chunk_refused:
            self._chunk_refused = True
            await self._reply(refused or "503 5.5.1 no valid recipients")
            return
        self._open = not any(b.close_before_dot or (last and b.close_after_dot) for b in behaviours)
        early = next((b.early for b in behaviours if b.early), "")
        if self._open and early and self._chunks:
            self._chunk_refused = True
            await self._reply(early)
        elif self._open:
            await self._take_chunk(content, behaviours, last=bool(last))

    async def _take_chunk(self, content: bytes, behaviours: list[ScriptedReply], *, last: bool) -> None:
        self._chunks += 1
        self._size += len(content)
        self._digest.update(content)
        if self._book.keep_bodies:
            self._kept += content
        if last:
            await self._answer_message(behaviours, bytes(self._kept), self._size, self._digest.hexdigest())
        else:
            await self._reply(f"250 2.0.0 {len(content)} octets received")

    async def _answer_message(
        self, behaviours: list[ScriptedReply], body: bytes, size: int, digest: str
    ) -> None:
        refused = next((b.final for b in behaviours if b.final), "")
        too_big = self._manners.size is not None and size > self._manners.size
        if refused or too_big:
            await self._reply(refused or "552 5.3.4 message too big")
        else:
            await self._book.accept(self._received(body, size, digest))
            self._accepted += 1
            await self._reply("250 2.0.0 message accepted")
        if self._manners.chatter:
            await self._send(self._manners.chatter.encode())
        self._reset()

    def _received(self, body: bytes, size: int, digest: str) -> Received:
        name = self._writer.get_extra_info("peername")
        return Received(
            mail_from=self._mail_from,
            parameters=self._parameters,
            recipients=tuple(self._recipients),
            body=body,
            size=size,
            sha256=digest,
            tls=self._tls,
            peer=f"{name[0]}:{name[1]}",
            chunks=self._chunks,
        )

    async def _rset(self, argument: str) -> None:
        self._reset()
        await self._reply("250 2.0.0 reset")

    async def _noop(self, argument: str) -> None:
        await self._reply("250 2.0.0 ok")

    async def _quit(self, argument: str) -> None:
        self._open = False
        await self._reply("221 2.0.0 bye")

    def _reset(self) -> None:
        self._mail_from = ""
        self._parameters = ""
        self._recipients: dict[str, ScriptedReply] = {}
        self._chunks = 0
        self._chunk_refused = False
        self._kept = bytearray()
        self._size = 0
        self._digest = hashlib.sha256()

    # Bytes.

    async def _reply(self, reply: str) -> None:
        code, text = reply[:3], reply[4:]
        if not self._manners.enhanced:
            head, _, rest = text.partition(" ")
            text = rest if head.count(".") == 2 and head.replace(".", "").isdigit() else text
        lines = text.split("\n")
        if self._manners.multi_line:
            lines += ["", "that was all"]
        head = "".join(f"{code}-{line}\r\n" for line in lines[:-1])
        await self._send(f"{head}{code} {lines[-1]}\r\n".encode())

    async def _send(self, data: bytes) -> None:
        step = 1 if self._manners.byte_by_byte else len(data)
        for at in range(0, len(data), step):
            self._writer.write(data[at : at + step])
            await self._writer.drain()
            if step == 1:
                await asyncio.sleep(0)

    async def _more(self) -> None:
        data = await self._reader.read(READ_SIZE)
        if not data:
            raise EOFError
        self._buffer += data

    async def _line(self) -> str:
        while (end := self._buffer.find(b"\r\n")) < 0:
            await self._more()
        line, self._buffer = self._buffer[:end], self._buffer[end + 2 :]
        return line.decode("utf-8", "replace")

    async def _octets(self, size: int) -> bytes:
        parts, left = [self._buffer], size - len(self._buffer)
        self._buffer = b""
        while left > 0:
            parts.append(await self._reader.read(READ_SIZE))
            if not parts[-1]:
                raise EOFError
            left -= len(parts[-1])
        octets = b"".join(parts)
        self._buffer = octets[size:]
        return octets[:size]

    async def _body(self) -> tuple[bytes, int, str]:
        """The un-stuffed body, its size and digest. What is not kept is dropped while it arrives."""
        kept, size, digest = bytearray(), 0, hashlib.sha256()
        # Two octets of what went before stay in front, so that one pattern finds a dot at the start of
        # the body, of a read, and of a line.
        window = b"\r\n" + self._buffer
        while True:
            end = window.find(_END)
            # The last four octets may be the beginning of the end.
            stop = end + 2 if end >= 0 else max(len(window) - 4, 2)
            if end < 0 and window[:stop].endswith(b"\r\n."):
                stop -= 1  # and this dot the first of two
            part = window[:stop].replace(b"\r\n..", b"\r\n.")[2:]
            size += len(part)
            digest.update(part)
            if self._book.keep_bodies:
                kept += part
            if end >= 0:
                self._buffer = window[end + len(_END) :]
                return bytes(kept), size, digest.hexdigest()
            self._buffer = b""
            await self._more()
            window = window[stop - 2 :] + self._buffer
