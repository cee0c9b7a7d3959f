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

A forged answer has to match the id, which is random, and the port, which the kernel chooses: each query has a
socket of its own (RFC 5452 9.2), which costs as much CPU as the query. Packets from other hosts, or with
another id, are ignored.
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

import msgspec

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
        self._servers = [_Server(server) for server in servers]
        self._random = random
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
        with_edns: dict[_Server, bool] = {}  # what this query has learned
        while turns:
            left = ends - clock()
            if left <= 0:
                raise TimeoutError
            server = turns[0]
            edns = self._wants_dnssec or with_edns.get(server, clock() >= server.plain_until)
            number = self._random.randrange(IDS)
            query = question(number, name, kind.code, wants_dnssec=self._wants_dnssec, edns=edns)
            packet = await _exchange(server.place, query, min(TRY_TIMEOUT, left))
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


class _Server(msgspec.Struct, eq=False):
    """A name server. It is queried without EDNS until `plain_until`, a time of the event loop."""

    place: NameServer
    plain_until: float = 0.0


async def _exchange(server: NameServer, packet: bytes, seconds: float) -> bytes | None:
    """Send a query from a port of its own. Return the response with its id, an empty packet if the server is
    unreachable, or None after a timeout.
    """
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in server.address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
            # A connected socket receives packets only from the server, and reports an error if no server is
            # there.
            sock.connect((server.address, server.port))
            sock.send(packet)
            async with asyncio.timeout(seconds):
                answer = await loop.sock_recv(sock, LONGEST)
                while answer[:2] != packet[:2]:
                    await asyncio.sleep(0)  # a flood of forged answers does not stop other work
                    answer = await loop.sock_recv(sock, LONGEST)
                return answer
    except TimeoutError:
        return None
    except OSError:
        return _UNREACHABLE
