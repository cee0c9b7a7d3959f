"""Receivers that speak SMTP over the simulated network, with the faults of real ones.

What a site answers is decided by the world model of `tests.bench.simulate.world` (greylisting, limits,
outages, refusals); what happens to the connection is decided here: the reply after the final dot is lost or
comes late, the connection ends in the middle, or nothing is sent at all. `Mail` is what a receiver has
accepted; it counts as accepted before the reply is written.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from types import SimpleNamespace
from typing import NamedTuple, cast

from tests.bench.simulate.world import TAKEN, Site
from tests.simulation.loop import Process, SimLoop
from tests.simulation.network import End, process_of
from zonerelay.model.delivery import Delivery

_PATH = re.compile(rb"(?:FROM|TO):\s*<([^>]*)>", re.I)


@dataclass
class Mail:
    """One copy for one recipient. `replied` is when its 250 was written."""

    recipient: str
    sender: str
    body: bytes
    at: float
    end: End
    replied: float | None = None


class Offer(NamedTuple):
    at: float
    end: End
    sender: str
    recipient: str


@dataclass
class Quirks:
    """How often a site does what, per transaction, and how long it takes for it."""

    lose_reply: float = 0.0
    late_reply: float = 0.0
    per_session: int = 0
    """Messages that it takes in a session; 0: any number."""
    refuse_at: bytes = b"MAIL"
    drop_chunk: bool = False
    """BDAT is offered."""


@dataclass
class Receivers:
    """All sites of the world; `mails` is what they accepted, in order."""

    loop: SimLoop
    random: Random
    sometimes: Counter[str]
    at_once: Callable[[End, End, str], None]
    """Called when a recipient is offered on another connection meanwhile."""
    mails: list[Mail] = field(default_factory=list)
    quirks: dict[str, Quirks] = field(default_factory=dict)
    seen: dict[tuple[str, str], float] = field(default_factory=dict)
    """When a recipient's mail with a tag was first offered, for greylisting."""
    offers: list[Offer] = field(default_factory=list)
    """Each RCPT command."""
    under_way: "dict[tuple[str, str], Receiver]" = field(default_factory=dict)
    """Where a sender's mail to a recipient is being taken at this moment."""
    refused: set[str] = field(default_factory=set)
    """Recipients for whom 5yz was the answer."""

    def is_sending(self, process: Process) -> bool:
        """A transaction of the process is under way."""
        return any(process_of(each.end.other) is process for each in self.under_way.values())


class Receiver(asyncio.Protocol):
    """One connection."""

    def __init__(self, receivers: Receivers, site: Site) -> None:
        self._all = receivers
        self._site = site
        self._quirks = receivers.quirks.setdefault(site.name, Quirks())
        self._random = receivers.random
        self._buffer = b""
        self._need = 0
        self._in_data = False
        self._body = b""
        self._sender: str | None = None
        self._recipients: list[str] = []
        self._count = 0
        self._free_at = 0.0
        self.end: End

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.end = cast(End, transport)
        refusal = self._site.greet(self._all.loop.now)
        self._site.open += 1
        if self._site.kind.silent:
            return
        if refusal is not None:
            self._reply(b"421 4.7.0 too many connections, come back later", close=True)
            self._all.sometimes["421 greeting"] += 1
            return
        self._reply(b"220 mx.test ESMTP")

    def _over_with(self, recipients: Iterable[str]) -> None:
        """The transaction for these is over."""
        gone = set(recipients)
        for key in [key for key, who in self._all.under_way.items() if key[1] in gone and who is self]:
            del self._all.under_way[key]

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.under_way = {k: each for k, each in self._all.under_way.items() if each is not self}
        self._site.open -= 1

    def _reply(
        self, *lines: bytes, delay: float = 0.0, close: bool = False, mails: list[Mail] | None = None
    ) -> None:
        """Replies come in order, each after the time that the server takes."""
        loop = self._all.loop
        least, most = self._site.kind.seconds
        pause = delay or (least + (most - least) * self._random.random()) / 4
        self._free_at = max(self._free_at, loop.now) + pause
        loop.call_at(self._free_at, self._write, lines, close, mails or [])

    def _write(self, lines: tuple[bytes, ...], close: bool, mails: list[Mail]) -> None:
        if self.end.closed or self._site.is_down(self._all.loop.now):
            self.end.abort()
            return
        self.end.write(b"\r\n".join(lines) + b"\r\n")
        for mail in mails:
            mail.replied = self._all.loop.now
        self._over_with(mail.recipient for mail in mails)
        if close:
            self.end.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while self._step():
            pass

    def _step(self) -> bool:
        if self.end.closed or self._site.kind.silent:
            return False
        if self._need:
            piece, self._buffer = self._buffer[: self._need], self._buffer[self._need :]
            self._body += piece
            self._need -= len(piece)
            if self._need:
                return False
            if self._last:
                self._finish()
            else:
                self._reply(b"250 2.0.0 more")
            return True
        if self._in_data:
            stop = self._buffer.find(b"\r\n.\r\n")
            if stop < 0:
                return False
            text, self._buffer = self._buffer[: stop + 2], self._buffer[stop + 5 :]
            self._in_data = False
            self._body = (b"\r\n" + text).replace(b"\r\n.", b"\r\n")[2:]
            self._finish()
            return True
        line, found, rest = self._buffer.partition(b"\r\n")
        if not found:
            return False
        self._buffer = rest
        self._command(line)
        return True

    _last = False

    def _command(self, line: bytes) -> None:
        verb = line.split(b" ", 1)[0].upper()
        match verb:
            case b"EHLO":
                lines = [b"250-mx.test", b"250-PIPELINING", b"250-8BITMIME", b"250-SMTPUTF8", b"250-DSN"]
                self._reply(
                    *lines, *([b"250-CHUNKING"] if self._quirks.drop_chunk else []), b"250 SIZE 9000000"
                )
            case b"MAIL":
                self._reset()
                if self._over(b"MAIL"):
                    return
                self._sender = _path(line)
                self._reply(b"250 2.1.0 sender")
            case b"RCPT" if self._sender is not None:
                self._recipient(_path(line))
            case b"DATA" if self._recipients:
                if self._over(b"DATA"):
                    self._over_with(self._recipients)
                    return
                self._in_data = True
                self._reply(b"354 go on")
            case b"BDAT":
                _, size, *last = line.split()
                self._last = bool(last)
                self._need = int(size)
                if self._need == 0 and self._last:
                    self._finish()
            case b"RSET":
                self._reset()
                self._reply(b"250 2.0.0 reset")
            case b"QUIT":
                self._reply(b"221 2.0.0 bye", close=True)
            case b"NOOP":
                self._reply(b"250 2.0.0 still here")
            case _:
                self._reply(b"503 5.5.1 what?")

    def _reset(self) -> None:
        self._over_with(self._recipients)
        self._sender, self._recipients, self._body = None, [], b""

    def _over(self, at: bytes) -> bool:
        """The session has carried what it may."""
        quirks = self._quirks
        if quirks.per_session and self._count >= quirks.per_session and quirks.refuse_at == at:
            self._all.sometimes["session limit"] += 1
            self._reply(b"452 4.4.5 too many messages in this session")
            return True
        return False

    def _recipient(self, recipient: str) -> None:
        loop = self._all.loop
        key = (self._sender or "", recipient)
        self._all.offers.append(Offer(loop.now, self.end, *key))
        first = self._all.under_way.get(key)
        if first is not None and first is not self and self._sender:
            self._all.at_once(self.end, first.end, recipient)
        seen = self._all.seen.setdefault(key, loop.now)
        asked = cast(Delivery, SimpleNamespace(recipient=recipient, attempts=int(seen < loop.now)))
        outcome = self._site.answer(asked, loop.now, loop.now - seen, self._random)
        if outcome is TAKEN:
            self._all.under_way[key] = self
            self._recipients.append(recipient)
            self._reply(b"250 2.1.5 recipient")
        else:
            code, detail = outcome.reply.code, outcome.reply.detail
            if code >= 500:
                self._all.refused.add(recipient)
            self._reply(f"{code} {code // 100}.{detail} no".encode())

    def _finish(self) -> None:
        body, self._body = self._body, b""
        recipients, self._recipients = self._recipients, []
        if not recipients:
            self._reply(b"503 5.5.1 no recipients")
            return
        now = self._all.loop.now
        mails = [Mail(each, self._sender or "", body, now, self.end) for each in recipients]
        self._all.mails += mails
        self._count += 1
        draw = self._random.random()
        if draw < self._quirks.lose_reply:
            self._all.sometimes["reply lost after the dot"] += 1
            self.end.link.break_off(silent=self._random.random() < 0.5)
        elif draw < self._quirks.lose_reply + self._quirks.late_reply:
            self._all.sometimes["late reply"] += 1
            self._reply(b"250 2.0.0 at last", delay=self._random.choice((40.0, 75.0)), mails=mails)
        else:
            self._reply(b"250 2.0.0 taken", mails=mails)


def _path(line: bytes) -> str:
    found = _PATH.search(line)
    return "" if found is None else found[1].decode()
