"""Queries name servers over UDP if the answers are nearly always plain (`packets.py`), and detects their
outages.

The servers are queried in turn, `TRY_TIMEOUT` seconds each, repeatedly until the time is up. A server that
reports a failure is skipped. If every remaining server is silent, TimeoutError is raised. An answer that is
not plain (truncated, malformed, an unreachable server) is not interpreted here: `dnspython_client.py` sends
the query again.

Some servers, and firewalls in front of them, refuse or drop a query with EDNS (RFC 6891 7). So a query
without an answer is repeated without EDNS, and a server that answers then is queried without EDNS for
`EDNS_PAUSE` seconds. If DNSSEC is required, EDNS is always used, because an attacker who can drop packets
could disable DANE otherwise.

A forged answer has to match the id, which is random for each query, and the port, which the kernel chooses
for each socket. A socket carries only a few queries, then a new one replaces it (RFC 5452 9.2). Packets from
other hosts, or with an unknown id, are ignored. A socket without an answer is not used again, because the
machine may have a new address.
"""

from __future__ import annotations

import asyncio
import enum
import ipaddress
import re
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from zonerelay.config.endpoints import NameServer, parse_name_server
from zonerelay.config.settings import DnsSettings
from zonerelay.process.tasks import cancel_all
from zonerelay.routing.dns.answers import DnsStatus, Record
from zonerelay.routing.dns.packets import ParsedAnswer, RecordType, is_truncated, question, read_answer

if TYPE_CHECKING:
    from zonerelay.telemetry.events.events import NameServerEvents


# Detects that no name server answers. A domain whose own servers are silent or broken is not an outage.
#
# answering → doubted: one query was silent.
# doubted → lost: a probe is silent, too.
# answering → lost: `FAILURES` different names failed in a row.
# lost → answering: any answer.
#
# A probe queries each server once for a name that every resolver answers itself (RFC 6303). While the name
# servers are lost a probe runs every `PROBE_PAUSE` seconds, so that recovery is detected without mail. With
# up to four servers an outage is detected within ten seconds of the first query without an answer.

PROBE = "127.in-addr.arpa"
PROBE_PAUSE = 3.0
FAILURES = 5


class Outage(StrEnum):
    SILENT = "they are unreachable or do not respond"
    FAILING = "they return a failure to every query"


class NameServerWatch:
    """The state of the name servers. `ask(name)` queries the servers for that name. `servers` is their
    description in messages.
    """

    def __init__(
        self, servers: str, ask: Callable[[str], Awaitable[DnsStatus]], observer: NameServerEvents | None
    ) -> None:
        self.servers = servers
        self._ask = ask
        self._observer = observer
        self.on_restored: Callable[[], object] | None = None
        self._failed: dict[str, None] = {}
        self._answers = 0
        self._reason: Outage | None = None
        self._since = 0.0
        self._task: asyncio.Task[None] | None = None

    def problem(self) -> str | None:
        """Return the outage as a message, or None while name servers answer."""
        if not self._reason:
            return None
        return (
            f"no name server is usable ({self.servers}): {self._reason}. New mail is accepted, but mail "
            "that requires DNS lookups stays in the queue. Check that the servers run and are reachable, "
            "or set [dns] servers to others"
            + ("; with [dns] trust_ad they must support EDNS" if self._reason is Outage.FAILING else "")
        )

    def state(self) -> str:
        """Return the servers and whether they are reachable, for a line of the status."""
        if self._reason:
            return f"{self.servers}: {self._reason}"
        return f"{self.servers}: {'reachable' if self._answers else 'not used yet'}"

    # Results of queries.

    def silent(self) -> None:
        """Note that a server was silent or unreachable."""
        if not self._reason and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._doubt())

    def ended(self, name: str, status: DnsStatus) -> None:
        """Note the result of a query."""
        if status.is_definite or status is DnsStatus.NO_TCP:
            self._answered()
        elif status is DnsStatus.TIMEOUT:
            self.silent()
        elif self._reason is Outage.SILENT:
            self._answered()
        elif not self._reason:
            self._failed[name] = None
            if len(self._failed) >= FAILURES:
                self._lose(Outage.FAILING)

    async def close(self) -> None:
        await cancel_all(self._task)

    # Probes.

    async def _doubt(self) -> None:
        before = self._answers
        status = await self._ask(PROBE)
        self._task = None
        if status is DnsStatus.TIMEOUT and self._answers == before:
            self._lose(Outage.SILENT)

    def _lose(self, reason: Outage) -> None:
        if self._reason:
            return
        loop = asyncio.get_running_loop()
        self._reason, self._since = reason, loop.time()
        if self._observer is not None:
            self._observer.lost(self.servers, reason)
        if self._task is not None:
            self._task.cancel()
        self._task = loop.create_task(self._look_again())

    async def _look_again(self) -> None:
        # The probe's name has an answer even if no other name has one.
        name = PROBE if self._reason is Outage.SILENT else next(iter(self._failed))
        while self._reason:
            await asyncio.sleep(PROBE_PAUSE)
            self.ended(name, await self._ask(name))

    def _answered(self) -> None:
        self._failed.clear()
        self._answers += 1
        if not self._reason:
            return
        self._reason = None
        if self._observer is not None:
            self._observer.restored(self.servers, asyncio.get_running_loop().time() - self._since)
        if self.on_restored is not None:
            self.on_restored()
        # If the task itself has received the answer, its loop ends here.
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._task = None


TRY_TIMEOUT = 2.0
"""Seconds for one name server, out of the `dns.timeout` for all of them."""
EDNS_PAUSE = 600.0
"""Seconds without EDNS for a server that answers only without it."""
PER_SOCKET = 32
"""Queries per socket. Opening a socket costs as much as one query."""
LONGEST = 4096
"""Bytes. A longer packet is truncated and therefore not plain."""
IDS = 1 << 16

RESOLV_CONF = "/etc/resolv.conf"
LOCAL_SERVER = "127.0.0.1"
"""Queried when no name server is configured, as libc does."""

_NAME_SERVER = re.compile(r"\s*nameserver\s+(\S+)")
_UNREACHABLE = b""


class DnspythonReason(enum.Enum):
    """The reason why dnspython has to send the query."""

    TRUNCATED = "truncated"
    OTHER = "other"


def servers_of(
    settings: DnsSettings, resolv_conf: str = RESOLV_CONF, *, before: Sequence[NameServer] = ()
) -> list[NameServer]:
    """Return the configured name servers, or the system's, or those `before` and the one on this machine.
    Return none if the system names one by anything but its address, because dnspython supports other
    protocols than DNS over UDP and TCP.
    """
    if settings.servers:
        return [parse_name_server(server) for server in settings.servers]
    try:
        lines = Path(resolv_conf).read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    named = [found[1] for line in lines if (found := _NAME_SERVER.match(line))]
    if not named:
        return list(dict.fromkeys((*before, NameServer(LOCAL_SERVER))))
    try:
        return [NameServer(name) for name in named if ipaddress.ip_address(name)]
    except ValueError:
        return []


class NameServers:
    """Sends DNS queries to the name servers over UDP and TCP. `random` must be unpredictable. Without
    `servers` no query is sent here.

    `silent` is called when a server has not answered in time, or is unreachable.
    """

    def __init__(
        self,
        servers: Sequence[NameServer],
        random: Random,
        *,
        wants_dnssec: bool,
        silent: Callable[[], None] = lambda: None,
    ) -> None:
        self._servers = [_ServerSockets(server, random) for server in servers]
        self._silent = silent
        self._wants_dnssec = wants_dnssec

    async def ask(
        self, name: str, kind: RecordType[Record], *, lifetime: float
    ) -> ParsedAnswer[Record] | DnspythonReason:
        """Send a query and return the answer. `name` is plain. Raise TimeoutError after
        `lifetime` seconds.
        """
        clock = asyncio.get_running_loop().time
        ends = clock() + lifetime
        turns = deque(self._servers)
        with_edns: dict[_ServerSockets, bool] = {}  # what this query has learned
        while turns:
            left = ends - clock()
            if left <= 0:
                raise TimeoutError
            server = turns[0]
            edns = self._wants_dnssec or with_edns.get(server, clock() >= server.plain_until)
            packet = await server.ask(
                name, kind.code, min(TRY_TIMEOUT, left), dnssec=self._wants_dnssec, edns=edns
            )
            may_do_without = edns and not self._wants_dnssec
            if packet is None:
                self._silent()
                if may_do_without:
                    with_edns[server] = False
                turns.rotate(-1)
                continue
            if packet == _UNREACHABLE:
                self._silent()
                turns.popleft()
                continue
            reading = read_answer(packet, name, kind)
            truncated = reading is None and is_truncated(packet)
            is_answer = truncated or (reading is not None and reading.status.is_definite)
            if may_do_without and not is_answer:
                with_edns[server] = False
                continue
            if truncated and not edns and server not in with_edns:
                # A lost packet may have looked like a refusal, and EDNS allows larger answers.
                with_edns[server] = True
                continue
            if is_answer and server in with_edns:
                server.plain_until = 0.0 if edns else clock() + EDNS_PAUSE
            if reading is None:
                return DnspythonReason.TRUNCATED if truncated else DnspythonReason.OTHER
            turns.popleft()
            if reading.status is not DnsStatus.SERVFAIL or not turns:
                return reading
        return DnspythonReason.OTHER

    def close(self) -> None:
        for server in self._servers:
            server.close()


class _ServerSockets:
    """The sockets to one name server."""

    def __init__(self, server: NameServer, random: Random) -> None:
        self._server = server
        self._random = random
        self._line: _QuerySocket | None = None
        self.plain_until = 0.0
        """The time of the event loop until which the server is queried without EDNS."""

    async def ask(self, name: str, code: int, seconds: float, *, dnssec: bool, edns: bool) -> bytes | None:
        """Return the response with the query's id, an empty packet if the server is unreachable, or None
        after a timeout.
        """
        line = self._line
        try:
            if line is None or line.left <= 0:
                line = self._line = _QuerySocket(self._server)
            number = self._number(line)
            answer = line.send(number, question(number, name, code, wants_dnssec=dnssec, edns=edns))
        except OSError:
            self._line = None
            return _UNREACHABLE
        timer = asyncio.get_running_loop().call_later(seconds, _set, answer, None)
        try:
            packet = await answer
        finally:
            timer.cancel()
            line.forget(number)
        if not packet:
            line.retire()
        return packet

    def _number(self, line: _QuerySocket) -> int:
        while True:
            number = self._random.randrange(IDS)
            if number not in line.waiting:
                return number

    def close(self) -> None:
        if self._line is not None:
            self._line.retire()
            self._line = None


class _QuerySocket:
    """A socket with its own port. It closes itself after its last query has ended."""

    def __init__(self, server: NameServer) -> None:
        """Open a socket. Raise OSError."""
        family = socket.AF_INET6 if ":" in server.address else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._loop = asyncio.get_running_loop()
        self.waiting: dict[int, asyncio.Future[bytes | None]] = {}
        self.left = PER_SOCKET
        try:
            # A connected socket receives packets only from the server, and reports an error if no server is
            # there.
            self._socket.connect((server.address, server.port))
            self._loop.add_reader(self._socket.fileno(), self._receive)
        except BaseException:
            self._socket.close()
            raise

    def send(self, number: int, packet: bytes) -> asyncio.Future[bytes | None]:
        """Send a query and return a future for its answer. Raise OSError."""
        self.left -= 1
        answer: asyncio.Future[bytes | None] = self._loop.create_future()
        self.waiting[number] = answer
        try:
            self._socket.send(packet)
        except OSError:
            self.forget(number)
            self.retire()
            raise
        return answer

    def forget(self, number: int) -> None:
        self.waiting.pop(number, None)
        self._close_if_done()

    def retire(self) -> None:
        """Accept no more queries."""
        self.left = 0
        self._close_if_done()

    def _receive(self) -> None:
        try:
            packet = self._socket.recv(LONGEST)
        except BlockingIOError:
            return
        except OSError:
            # ICMP reports that no server is there, but not for which query, so every query fails.
            for answer in self.waiting.values():
                _set(answer, _UNREACHABLE)
            self.retire()
            return
        number = int.from_bytes(packet[:2])
        if number in self.waiting:
            _set(self.waiting[number], packet)

    def _close_if_done(self) -> None:
        if self.left <= 0 and not self.waiting and self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()


def _set(answer: asyncio.Future[bytes | None], packet: bytes | None) -> None:
    if not answer.done():
        answer.set_result(packet)
