"""An asynchronous DNS resolver with a bounded cache; it returns failures as values.

Answers are cached by their TTL, between `MIN_TTL` and `dns.max_ttl`; "no such name" and "no data" by the
zone's negative TTL, up to `dns.negative_ttl`; failures only for `FAILURE_TTL`, so that a short problem of a
name server is soon forgotten. Equal queries are joined, and a caller that is cancelled does not take the
answer from the others. Names are queried unchanged (no search list), except that address look-ups of a name
without dots use the system's search list, which is how a container finds `mailhog`.

An answer is `secure` if the resolver reports that it has validated it (the AD bit) and `dns.trust_ad` is set.
Without that option DNSSEC is not requested.

The system's name servers are those in resolv.conf at the time of the query, because DHCP, a VPN or the
migration of a container changes the file while the relay runs. While it names none (it is being written, or
the network is down), the previous name servers are used, and then the one on this machine.

Every failure is a value. `destinations/mx.py` decides what it means for mail, and `NameServerWatch` whether
it is an outage of the name servers.

The servers are queried in turn, `TRY_TIMEOUT` seconds each, repeatedly until the time is up (`NameServers`).
A server that is unreachable or returns a failure or a malformed answer is skipped. A truncated answer is
fetched again over TCP.

Some servers, and firewalls in front of them, refuse or drop a query with EDNS (RFC 6891 7). So it is used
only with `dns.trust_ad`, for which a server needs it, and then always, because an attacker who can drop
packets could disable DANE otherwise.

A forged answer has to match the id, which is random, and the port, which the kernel chooses: each query has a
socket of its own (RFC 5452 9.2), which costs as much CPU as the query. Packets from other hosts, or with
another id, are ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import StrEnum
from itertools import chain, zip_longest
from pathlib import Path
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from zonerelay.config.endpoints import NameServer, is_address, parse_name_server
from zonerelay.config.settings import DnsSettings
from zonerelay.model.bounded import BoundedDict
from zonerelay.model.clock import Clock
from zonerelay.model.reply import NO_NAMES, Reply
from zonerelay.process.files import FileState, file_state
from zonerelay.process.tasks import cancel_all
from zonerelay.routing.addresses import ascii_domain, organization
from zonerelay.routing.dns import answers
from zonerelay.routing.dns.answers import TRY_TIMEOUT, Addresses, DnsAnswer, DnsStatus, ParsedAnswer, Record

if TYPE_CHECKING:
    from zonerelay.telemetry.events.events import Events


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
    """The reason why no name server is usable."""

    SILENT = "they are unreachable or do not respond"
    FAILING = "they return a failure to every query"


class NameServerWatch:
    """Monitors whether the name servers are usable. `ask(name)` queries the servers for that name. `servers`
    is their description in messages.
    """

    def __init__(
        self, servers: str, ask: Callable[[str], Awaitable[DnsStatus]], observer: Events | None
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
        """Return a message about the outage, or None while name servers respond."""
        if not self._reason:
            return None
        return (
            f"no name server is usable ({self.servers}): {self._reason}. New mail is accepted, but mail "
            "that requires DNS lookups stays in the queue. Check that the servers run and are reachable, "
            "or set [dns] servers to others"
            + ("; with [dns] trust_ad they must support EDNS" if self._reason is Outage.FAILING else "")
        )

    def state(self) -> str:
        """Return a description of the name servers and whether they are reachable, for `status`."""
        if self._reason:
            return f"{self.servers}: {self._reason}"
        return f"{self.servers}: {'reachable' if self._answers else 'not used yet'}"

    # Results of queries.

    def silent(self) -> None:
        """Record that a name server did not respond or was unreachable."""
        if not self._reason and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._doubt())

    def ended(self, name: str, status: DnsStatus) -> None:
        """Record the result of a query."""
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
            self._observer.name_servers_lost(self.servers, reason)
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
            self._observer.name_servers_restored(
                self.servers, asyncio.get_running_loop().time() - self._since
            )
        if self.on_restored is not None:
            self.on_restored()
        # If the task itself has received the answer, its loop ends here.
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._task = None


LONGEST = 65_535
"""Bytes of a packet, whatever EDNS says."""
IDS = 1 << 16
LEAST_TIME = 0.1  # seconds for a query that is repeated over TCP although the time is nearly up

RESOLV_CONF = "/etc/resolv.conf"
LOCAL_SERVER = "127.0.0.1"
"""Queried when no name server is configured, as libc does."""

_UNREACHABLE = b""
_GRAVEST = (DnsStatus.SERVFAIL, DnsStatus.NO_TCP, DnsStatus.BAD)
"""Of several failures, the first of these is reported."""


class SystemNames(NamedTuple):
    """The content of resolv.conf: name servers, and the search list."""

    servers: list[NameServer]
    search: list[str]


def system_names(resolv_conf: str, *, before: Sequence[NameServer] = ()) -> SystemNames:
    """Read resolv.conf, and return the name servers and the search list. If the file has no server, return
    those `before` and the one on this machine. If it has no search list, return the domain of this machine,
    as libc does.
    """
    try:
        lines = Path(resolv_conf).read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    servers: list[NameServer] = []
    search = [socket.gethostname().partition(".")[2]]
    for line in lines:
        match line.split():
            case ["nameserver", address, *_]:
                with contextlib.suppress(ValueError):
                    servers.append(NameServer(str(ipaddress.ip_address(address))))
            case ["search" | "domain", *search]:
                pass
    return SystemNames(servers or list(dict.fromkeys((*before, NameServer(LOCAL_SERVER)))), search)


class NameServers:
    """The name servers, to which queries are sent over UDP and TCP. `random` must be unpredictable.

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
        self._servers = servers
        self._random = random
        self._silent = silent
        self._wants_dnssec = wants_dnssec

    async def ask(
        self, name: str, kind: answers.RecordType[Record], *, lifetime: float
    ) -> ParsedAnswer[Record]:
        """Send a query to the name servers in turn, and return the first definite answer, or a failure.
        `name` is plain. The status is TIMEOUT after `lifetime` seconds, and if no server is reachable.
        """
        clock = asyncio.get_running_loop().time
        ends = clock() + lifetime
        turns = deque(self._servers)
        failures: list[DnsStatus] = []
        while turns:
            left = ends - clock()
            if left <= 0:
                # A silent server may have an answer, which the failure of another one does not deny.
                failures = [each for each in failures if each is DnsStatus.NO_TCP]
                break
            number = self._random.randrange(IDS)
            query = answers.question(number, name, kind.code, wants_dnssec=self._wants_dnssec)
            packet = await _exchange(turns[0], query, min(TRY_TIMEOUT, left))
            if packet is None:
                self._silent()
                turns.rotate(-1)
                continue
            server = turns.popleft()
            if packet == _UNREACHABLE:
                self._silent()
                continue
            found = read_answer(packet, name, kind)
            is_truncated = found.status is DnsStatus.NO_TCP
            if is_truncated and (whole := await _exchange_by_tcp(server, query, ends - clock())):
                found = read_answer(whole, name, kind)
            if found.status.is_definite:
                return found
            failures.append(found.status)
        status = next((each for each in _GRAVEST if each in failures), DnsStatus.TIMEOUT)
        return ParsedAnswer(status, (), 0.0)


async def _exchange(server: NameServer, packet: bytes, seconds: float) -> bytes | None:
    """Send a query over UDP from a new port. Return the response with its id, an empty packet if the server
    is unreachable, or None after a timeout.
    """
    loop = asyncio.get_running_loop()
    try:
        with _socket(server, socket.SOCK_DGRAM) as sock:
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


async def _exchange_by_tcp(server: NameServer, packet: bytes, seconds: float) -> bytes:
    """Send a query over TCP. Return the response, or an empty packet if there is none in time."""
    loop = asyncio.get_running_loop()
    found = b""
    try:
        with _socket(server, socket.SOCK_STREAM) as sock:
            async with asyncio.timeout(min(TRY_TIMEOUT, max(LEAST_TIME, seconds))):
                await loop.sock_connect(sock, (server.address, server.port))
                await loop.sock_sendall(sock, len(packet).to_bytes(2) + packet)
                while len(found) < 2 or len(found) < 2 + int.from_bytes(found[:2]):
                    part = await loop.sock_recv(sock, LONGEST)
                    if not part:
                        return b""
                    found += part
    except OSError:
        return b""
    return found[2:] if found[2:4] == packet[:2] else b""


def _socket(server: NameServer, kind: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in server.address else socket.AF_INET
    return socket.socket(family, kind | socket.SOCK_NONBLOCK)


def read_answer(packet: bytes, name: str, kind: answers.RecordType[Record]) -> ParsedAnswer[Record]:
    """Parse the answer to the query for `kind` of `name`. Its status is NO_TCP if it is truncated, so that
    TCP is needed.
    """
    if answers.is_truncated(packet):
        return ParsedAnswer(DnsStatus.NO_TCP, (), 0.0)
    try:
        return answers.read_plain(packet, name, kind)
    except (ValueError, IndexError, struct.error):
        if answers.is_too_long(packet):
            return ParsedAnswer(DnsStatus.BAD, (), 0.0)
        from zonerelay.routing.dns import dnspython_reader  # noqa: PLC0415 - most relays never need dnspython

        return dnspython_reader.read(packet, name, kind)


# Names that need no DNS: `localhost` (RFC 6761 6.3) and the names in the machine's hosts file.
#
# Every address look-up consults the file before DNS, as the system's own resolver does by default. The file
# is read again when it has changed.

HOSTS_FILE = Path("/etc/hosts")
MAX_HOSTS_SIZE = 1024 * 1024

_LOOPBACK = ("127.0.0.1", "::1")


class Hosts:
    """The addresses of host names from a hosts file, which is read again when it changes, or from a
    mapping.
    """

    def __init__(self, names: Mapping[str, tuple[str, ...]] | None = None, file: Path | None = None) -> None:
        self._names = names or {}
        self._file = file
        self._state: FileState = ()

    def lookup(self, name: str) -> tuple[str, ...]:
        """Return the addresses of a host name in lower case, or `()` if DNS has to be queried."""
        if self._file is not None and (state := file_state(self._file)) != self._state:
            self._state, self._names = state, _read_hosts(self._file)
        return self._names.get(name, _LOOPBACK if is_localhost(name) else ())


def is_localhost(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")


def _read_hosts(path: Path) -> Mapping[str, tuple[str, ...]]:
    """Read a hosts file, and return the addresses of each name. An unreadable file counts as empty, and a
    malformed line is skipped.
    """
    names: dict[str, tuple[str, ...]] = {}
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(MAX_HOSTS_SIZE)
    except OSError:
        return names
    for line in text.splitlines():
        address, *aliases = line.partition("#")[0].split() or [""]
        try:
            ip = str(ipaddress.ip_address(address))
        except ValueError:
            continue
        for alias in aliases:
            key = alias.lower().removesuffix(".")
            names[key] = (*names.get(key, ()), ip)
    return names


MIN_TTL = 5.0
FAILURE_TTL = 15.0
MAX_RECORDS = 100  # as in Postfix since 3.9: a name with more addresses is an attack, not a mail system
MAX_CONCURRENT = 200
MAX_OF_ONE = MAX_CONCURRENT // 5  # names of one organization, whose name servers may be silent
ANSWERS = 4  # of a domain: MX, A, AAAA, and TXT or TLSA


class Resolver:
    """Resolves DNS names, with a cache. `hosts` has names that need no DNS; by default it is the machine's
    hosts file.

    `random` generates the ids of queries. A predictable id makes answers easier to forge.
    """

    def __init__(
        self,
        settings: DnsSettings,
        clock: Clock,
        *,
        hosts: Hosts | None = None,
        random: Random | None = None,
        observer: Events | None = None,
    ) -> None:
        """Create the resolver. `observer` is notified when no name server answers, and when one
        does again.
        """
        self.settings = settings
        self._clock = clock
        self._hosts = hosts or Hosts(file=HOSTS_FILE)
        self._random = SystemRandom() if random is None else random
        self._observer = observer
        self.watch = NameServerWatch("", self._probe, observer)
        self._resolv_conf: FileState = ()
        self._search: list[str] = []
        self._named: list[NameServer] = []
        if settings.servers:
            self._use([parse_name_server(server) for server in settings.servers])
        else:
            self._notice_changes()
        # The type of a question, which is a type and a name, determines the type of its records.
        self._answers: BoundedDict[tuple[str, str], DnsAnswer[Any]] = BoundedDict(
            max(ANSWERS * settings.cache_size, 1)
        )
        self._asking: dict[tuple[str, str], asyncio.Task[DnsAnswer[Any]]] = {}
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._shares: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def when_restored(self, call: Callable[[float], object]) -> None:
        """Register a function that is called after an outage of the name servers, with the cache time of
        failures.
        """
        self.watch.on_restored = lambda: call(FAILURE_TTL)

    def _use(self, servers: list[NameServer]) -> None:
        self.watch.servers = ", ".join(map(str, servers))
        self._probe_time = TRY_TIMEOUT * len(servers)
        self._named = servers
        self._servers = NameServers(
            servers, self._random, wants_dnssec=self.settings.trust_ad, silent=self.watch.silent
        )

    def _notice_changes(self) -> None:
        """Read resolv.conf again if it has changed."""
        if not self.settings.servers and (state := file_state(RESOLV_CONF)) != self._resolv_conf:
            self._resolv_conf = state
            servers, self._search = system_names(RESOLV_CONF, before=self._named)
            self._use(servers)

    async def mx(self, domain: str) -> DnsAnswer[answers.MxRecord]:
        """Return the MX records of an ASCII domain by preference. The root as a host is `""` (null MX)."""
        if is_localhost(domain):
            return DnsAnswer(DnsStatus.NODATA, (), self._expires(0.0))
        return await self.lookup(domain, answers.MX)

    async def addresses(self, name: str, *, ipv6: bool) -> Addresses:
        """Return the addresses of a host, alternating IPv6 and IPv4, so that one broken protocol costs one
        attempt.

        A failure is a deferral: an MX host without an address is a mistake of its owner, who may correct it.
        """
        if (":" in name or name[-1:].isdigit()) and is_address(name):
            return Addresses((name,))
        local = self._hosts.lookup(name.lower())
        if local:
            return _addresses(name, [ip for ip in local if ipv6 or ":" not in ip], ())
        try:
            name = ascii_domain(name)
        except ValueError as error:
            return _no_address(f"{name}: {error}")
        if not ipv6:
            four = await self.lookup(name, answers.A)
            return _addresses(name, four.records, (four,))
        six, four = await asyncio.gather(self.lookup(name, answers.AAAA), self.lookup(name, answers.A))
        turns = chain.from_iterable(zip_longest(six.records, four.records))
        return _addresses(name, [ip for ip in turns if ip is not None], (six, four))

    async def implicit_mx(self, name: str, denial: DnsStatus, *, local: bool = False) -> DnsStatus:
        """Return whether mail for an ASCII domain without an MX record goes to its own address (RFC 5321
        5.1). The result is OK if it does, the status `denial` of its MX lookup if it has no address, or a
        failure that leaves this open.

        Some name servers deny the whole name when they are queried for a type that they do not know
        (haraka/Haraka#2310). A name counts as nonexistent only if the queries for its addresses agree:
        contradictory answers are as unreliable as a failure. The hosts file is used for a name that exists in
        the DNS, and with `local` for all.
        """
        # Both families, whatever a zone uses: a domain that has only one may get the other tomorrow.
        found = await asyncio.gather(self.lookup(name, answers.A), self.lookup(name, answers.AAAA))
        is_local = local or denial is DnsStatus.NODATA
        if any(each.records for each in found) or (is_local and (await self.addresses(name, ipv6=True)).ips):
            return DnsStatus.OK
        return next((each.status for each in found if each.status is not denial), denial)

    async def close(self) -> None:
        """Cancel the running queries."""
        await self.watch.close()
        await cancel_all(*self._asking.values())

    async def lookup(self, name: str, kind: answers.RecordType[Record]) -> DnsAnswer[Record]:
        """Return the records of an ASCII name from the cache or from DNS, never from the hosts file. Callers
        with the same query wait for one task, so that a caller that is cancelled does not take the answer
        from the others.
        """
        question = kind.name, name
        answer = self._answers.get(question)
        if answer is not None and answer.expires > self._clock.monotonic():
            return answer
        task = self._asking.get(question)
        if task is None:
            task = self._asking[question] = asyncio.create_task(self._fill(name, kind))
        return await asyncio.shield(task)

    async def _fill(self, name: str, kind: answers.RecordType[Record]) -> DnsAnswer[Record]:
        try:
            answer = self._answers[kind.name, name] = await self._ask(name, kind)
        finally:
            del self._asking[kind.name, name]
        return answer

    async def _ask(self, name: str, kind: answers.RecordType[Record]) -> DnsAnswer[Record]:
        share = self._shares.setdefault(organization(name), asyncio.Semaphore(MAX_OF_ONE))
        reading = ParsedAnswer[Record](DnsStatus.TIMEOUT, (), 0.0)
        with contextlib.suppress(TimeoutError):
            # Names of others wait for their slot however long it takes.
            async with asyncio.timeout(self.settings.timeout) as limit, share:
                limit.reschedule(None)
                async with self._slots:
                    reading = await self._read(name, kind, self.settings.timeout)
                self.watch.ended(name, reading.status)
        if self._observer is not None:
            self._observer.dns_asked(reading.status.name.lower())
        status, ttl, longest = reading.status, reading.ttl, self.settings.negative_ttl
        records = tuple(kind.order(reading.records))[:MAX_RECORDS]
        if records:
            longest = self.settings.max_ttl
        elif not status.is_definite:
            ttl = FAILURE_TTL
        # An answer over a path that can be tampered with may have any bit set. Only the operator knows that.
        secure = self.settings.trust_ad and reading.authentic and status.is_definite
        expires = self._expires(min(ttl, longest))
        return DnsAnswer(status, records, expires, secure, reading.canonical if records else "")

    def _expires(self, ttl: float) -> float:
        return self._clock.monotonic() + max(ttl, MIN_TTL)

    async def _probe(self, name: str) -> DnsStatus:
        return (await self._read(name, answers.A, self._probe_time)).status

    async def _read(
        self, name: str, kind: answers.RecordType[Record], lifetime: float
    ) -> ParsedAnswer[Record]:
        self._notice_changes()
        clock = asyncio.get_running_loop().time
        ends = clock() + lifetime
        name = name.lower()  # DKIM selectors may have capitals
        found = ParsedAnswer[Record](DnsStatus.BAD, (), 0.0)
        # libc's search list applies to addresses of names without dots.
        search = self._search if kind in (answers.A, answers.AAAA) and "." not in name else ()
        for each in (*(f"{name}.{suffix}" for suffix in search), name):
            if answers.is_plain_name(each):
                found = await self._servers.ask(each, kind, lifetime=ends - clock())
            if found.status not in (DnsStatus.NXDOMAIN, DnsStatus.BAD):
                break
        return found


def _addresses(name: str, ips: Sequence[str], answers: Sequence[DnsAnswer[str]]) -> Addresses:
    if ips:
        # A failed look-up does not count: otherwise an attacker that breaks it could remove security.
        heard = [answer for answer in answers if answer.status.is_definite]
        secure = bool(heard) and all(answer.secure for answer in heard)
        canonical = next((answer.canonical for answer in heard if answer.canonical), "")
        return Addresses(tuple(ips[:MAX_RECORDS]), secure=secure, canonical=canonical)
    statuses = [answer.status for answer in answers] or [DnsStatus.NODATA]
    doubts = [status for status in statuses if not status.is_definite]
    why = (doubts or statuses)[0]
    return _no_address(f"{name}: {why}", detail=NO_NAMES if doubts else "4.4")


def _no_address(text: str, *, detail: str = "4.4") -> Addresses:
    return Addresses((), Reply(451, detail, f"cannot find an address of {text}"))
