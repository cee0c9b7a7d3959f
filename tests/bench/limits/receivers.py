"""All receivers of a plan in one process, each on its own address, recording by this process's clock.

`python -m tests.bench.limits.receivers` reads the plan from its first line of input, answers "ready", then
takes `Change`s, one a line; at the end of the input it writes its `Report` and goes.

Counted are connections from accept to the end as seen here (one whose client has closed it is over even if
that has not been read yet), and MAIL commands, whatever is answered to them.
"""

from __future__ import annotations

import asyncio
import random
import socket
import sys
import time
from functools import partial
from typing import cast

import msgspec
import uvloop

from tests.bench.limits.ledger import Promise, Seen, Tally
from tests.bench.limits.plan import Host, Mood, Plan, Site
from tests.bench.sink import SinkProtocol

BACKLOG = 1024
ESTABLISHED = 1  # of enum tcp_state, the first octet of TCP_INFO
OFTEN = 0.04
SLEEP = 2.5


class Change(msgspec.Struct, frozen=True):
    """From now on something else is promised for a site of one line."""

    site: str
    promise: Promise


class Observed(msgspec.Struct, frozen=True):
    kind: str
    name: str
    history: list[Seen]
    connections: int


class Report(msgspec.Struct, frozen=True):
    observed: list[Observed]
    delivered: int


class Group:
    """A zone, a site or a line, and its connections."""

    def __init__(self, kind: str, name: str, promise: Promise) -> None:
        self.kind = kind
        self.name = name
        self.tally = Tally(promise)
        self.connections = 0
        self._members: set[Connection] = set()

    def enter(self, connection: Connection) -> None:
        self.connections += 1
        gone = sum(member.is_gone for member in self._members) if self.tally.is_full else 0
        self._members.add(connection)
        self.tally.opened(gone=gone)

    def leave(self, connection: Connection) -> None:
        self._members.discard(connection)
        self.tally.closed()

    def observed(self) -> Observed:
        return Observed(self.kind, self.name, self.tally.history, self.connections)


class Receivers:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.random = random.Random(1)
        self.delivered = 0
        self.zones = {name: Group("zone", name, promise) for name, promise in plan.zones.items()}
        self.sites = {site.name: Group("site", site.name, site.promise) for site in plan.sites}
        self.lines: dict[str, Group] = {}
        for site in plan.sites:
            for line in site.lines if len(site.lines) > 1 else ():
                group = Group("line", line.name, line.promise)
                self.lines.update(dict.fromkeys(line.domains, group))
        self.greylisted: set[bytes] = set()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for site in self._plan.sites:
            for host in site.hosts:
                if host.mood is not Mood.DEAD:
                    make = partial(Connection, self, site, host)
                    await loop.create_server(make, host.address, self._plan.port, backlog=BACKLOG)

    def change(self, change: Change) -> None:
        self.sites[change.site].tally.change(change.promise)

    def report(self) -> Report:
        groups = [*self.zones.values(), *self.sites.values(), *dict.fromkeys(self.lines.values())]
        return Report([group.observed() for group in groups], self.delivered)


class Connection(SinkProtocol):
    """One connection: commands are answered in order, as the host's mood is."""

    def __init__(self, receivers: Receivers, site: Site, host: Host) -> None:
        super().__init__(lambda *_: None)
        self._all = receivers
        self._mood = host.mood
        self._groups = [receivers.zones[site.zone], receivers.sites[site.name]]
        self._socket: socket.socket | None = None
        self._line_known = False
        self._transactions = 0
        self._accepted = 0
        self._answer_at = 0.0
        self._over = False

    @property
    def is_gone(self) -> bool:
        assert self._socket is not None
        try:
            return self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED
        except OSError:
            return True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none of asyncio's classes
        self._socket = transport.get_extra_info("socket")
        for group in self._groups:
            group.enter(self)
        if self._mood is Mood.SILENT:
            return
        greeting = b"220 receiver ESMTP\r\n"
        if self._is_moody():
            greeting, self._over = b"421 4.3.2 not now\r\n", True
        elif self._mood is Mood.SLEEPY:
            now = time.monotonic()
            self._answer_at = now + SLEEP - now % SLEEP
        self._answer(self._transport, [greeting])

    def connection_lost(self, exc: Exception | None) -> None:
        for group in self._groups:
            group.leave(self)

    def _command(self, line: bytes) -> bytes:
        if self._over:
            return b""
        now, verb = time.monotonic(), line[:4].upper()
        if verb == b"MAIL":
            return self._mail(now)
        if verb == b"RCPT":
            return self._recipient(line, now)
        if verb == b"EHLO":
            return self._hello()
        if verb == b"DATA" and not self._accepted:
            return b"554 5.5.1 no recipients\r\n"
        self._over = verb == b"QUIT"
        return super()._command(line)

    def _hello(self) -> bytes:
        limits = b"250-LIMITS RCPTMAX=3 MAILMAX=10\r\n" if self._mood is Mood.FEW else b""
        pipelining = b"" if self._mood is Mood.SLOW else b"250-PIPELINING\r\n"
        return b"250-receiver\r\n" + limits + pipelining + b"250-8BITMIME\r\n250 ENHANCEDSTATUSCODES\r\n"

    def _mail(self, now: float) -> bytes:
        self._transactions += 1
        self._recipients = self._accepted = 0
        for group in self._groups:
            group.tally.mail(now)
            group.tally.messages(self._transactions)
        self._over = self._is_moody()
        return b"421 4.3.2 enough of you\r\n" if self._over else b"250 2.1.0 Ok\r\n"

    def _recipient(self, line: bytes, now: float) -> bytes:
        if self._all.lines and not self._line_known:
            self._know_line(line, now)
        self._recipients += 1
        for group in self._groups:
            group.tally.recipients(self._recipients)
        if self._mood is Mood.GREYLIST and line not in self._all.greylisted:
            self._all.greylisted.add(line)
            return b"451 4.7.1 come back later\r\n"
        self._all.greylisted.discard(line)
        if self._mood is Mood.FEW and self._recipients > 3:
            return b"452 4.5.3 too many recipients\r\n"
        self._accepted += 1
        return b"250 2.1.5 Ok\r\n"

    def _know_line(self, line: bytes, now: float) -> None:
        """Whose connection it is tells the first recipient; the MAIL before it was the line's too."""
        self._line_known = True
        domain = line.partition(b"@")[2].partition(b">")[0].decode()
        group = self._all.lines.get(domain)
        if group is not None:
            group.enter(self)
            group.tally.mail(now)
            group.tally.messages(self._transactions)
            self._groups.append(group)

    def _content(self, data: bytes, replies: list[bytes]) -> tuple[bytes, bool]:
        rest, ended = super()._content(data, replies)
        if ended and self._is_moody():
            assert self._transport is not None
            self._over = True
            self._transport.abort()
        elif ended:
            self._all.delivered += self._accepted
        return rest, ended

    def _is_moody(self) -> bool:
        return self._mood is Mood.MOODY and self._all.random.random() < OFTEN

    def _answer(self, transport: asyncio.Transport, replies: list[bytes]) -> None:
        """In order, and as late as the mood is."""
        now = time.monotonic()
        if self._mood is Mood.SLOW:
            self._answer_at = max(now, self._answer_at) + self._all.random.uniform(0.05, 0.2)
        wait = self._answer_at - now
        if wait > 0:
            asyncio.get_running_loop().call_later(wait, self._write, b"".join(replies), self._over)
        else:
            self._write(b"".join(replies), self._over)

    def _write(self, data: bytes, is_last: bool) -> None:
        assert self._transport is not None
        if not self._transport.is_closing():
            self._transport.write(data)
            if is_last:
                self._transport.close()


async def run() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=1 << 20)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    receivers = Receivers(msgspec.json.decode(await reader.readline(), type=Plan))
    await receivers.start()
    print("ready", flush=True)
    while line := await reader.readline():
        receivers.change(msgspec.json.decode(line, type=Change))
    sys.stdout.buffer.write(msgspec.json.encode(receivers.report()))
    sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(run())
