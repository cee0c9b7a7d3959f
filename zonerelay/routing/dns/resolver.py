"""An asynchronous DNS resolver with a bounded cache; failures are returned as values.

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

The relay queries the name servers directly (`name_servers.py`), which costs a fifth of the CPU, and through
dnspython (`dnspython_client.py`) if that returns no plain answer.

Every failure is a value. `destinations/mx.py` decides what it means for mail, and `name_servers.py` whether
it is an outage of the name servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable, Coroutine, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from random import Random, SystemRandom
from typing import TYPE_CHECKING, Generic, TypeVar

from zonerelay.config.endpoints import NameServer, is_address
from zonerelay.config.settings import DnsSettings
from zonerelay.model.bounded import BoundedDict
from zonerelay.model.clock import Clock
from zonerelay.model.reply import NO_NAMES, Reply
from zonerelay.process.files import FileState, file_state
from zonerelay.process.tasks import cancel_all
from zonerelay.routing.dns.answers import Addresses, DnsAnswer, DnsStatus, MxRecord, Record, TlsaRecord
from zonerelay.routing.dns.name_servers import (
    RESOLV_CONF,
    TRY_TIMEOUT,
    DnspythonReason,
    NameServers,
    NameServerWatch,
    servers_of,
)
from zonerelay.routing.dns.packets import (
    AAAA,
    CNAME,
    MX,
    TLSA,
    TXT,
    A,
    ParsedAnswer,
    RecordType,
    is_plain_name,
)
from zonerelay.routing.idna import ascii_domain

if TYPE_CHECKING:
    from zonerelay.routing.dns.dnspython_client import DnspythonClient
    from zonerelay.telemetry.events.events import NameServerEvents


# Names that need no DNS: `localhost` (RFC 6761 6.3) and the names in the machine's hosts file.
#
# Every address look-up consults the file before DNS, as the system's own resolver does by default. The file
# is read again when it has changed.

HOSTS_FILE = Path("/etc/hosts")
MAX_HOSTS_SIZE = 1024 * 1024

_LOOPBACK = ("127.0.0.1", "::1")


class Hosts:
    """The addresses of names: the given ones, and those in a hosts file, which is read again when it has
    changed.
    """

    def __init__(self, names: Mapping[str, tuple[str, ...]] | None = None, file: Path | None = None) -> None:
        self._names = names or {}
        self._file = file
        self._state: FileState = ()

    def lookup(self, name: str) -> tuple[str, ...]:
        """Return the addresses of a name in lower case, or `()` if DNS has to be queried."""
        if self._file is not None and (state := file_state(self._file)) != self._state:
            self._state, self._names = state, _read_hosts(self._file)
        return self._names.get(name, _LOOPBACK if is_localhost(name) else ())


def is_localhost(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")


def _read_hosts(path: Path) -> Mapping[str, tuple[str, ...]]:
    """Return the names in a file. An unreadable file counts as empty, and a malformed line is skipped."""
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


# A bounded cache of answers that joins equal queries.
#
# The oldest entry is dropped for a new one. Callers with the same query wait for one task, so that a caller
# that is cancelled does not take the answer from the others.

Question = tuple[str, str]


class AnswerCache(Generic[Record]):
    """A bounded cache of DNS answers."""

    def __init__(self, limit: int, clock: Clock) -> None:
        self._clock = clock
        self._answers: BoundedDict[Question, DnsAnswer[Record]] = BoundedDict(max(limit, 1))
        self._asking: dict[Question, asyncio.Task[DnsAnswer[Record]]] = {}

    def __len__(self) -> int:
        return len(self._answers)

    async def get(
        self, question: Question, ask: Callable[[], Coroutine[None, None, DnsAnswer[Record]]]
    ) -> DnsAnswer[Record]:
        """Return the cached answer, or the result of `ask`, which must not raise."""
        answer = self._answers.get(question)
        if answer is not None and answer.expires > self._clock.monotonic():
            return answer
        task = self._asking.get(question)
        if task is None:
            task = self._asking[question] = asyncio.get_running_loop().create_task(self._fill(question, ask))
        return await asyncio.shield(task)

    async def close(self) -> None:
        await cancel_all(*self._asking.values())

    async def _fill(
        self, question: Question, ask: Callable[[], Coroutine[None, None, DnsAnswer[Record]]]
    ) -> DnsAnswer[Record]:
        try:
            answer = self._answers[question] = await ask()
        finally:
            del self._asking[question]
        return answer


MIN_TTL = 5.0
FAILURE_TTL = 15.0
MAX_RECORDS = 100  # as in Postfix since 3.9: a name with more addresses is an attack, not a mail system
MAX_CONCURRENT = 200
LEAST_TIME = 0.1  # seconds for a query that is repeated although the time is nearly up
MAX_TEXT = 4096  # bytes of one TXT record; longer ones serve no purpose here and are skipped

Raw = TypeVar("Raw")


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
        observer: NameServerEvents | None = None,
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
        self._thorough: DnspythonClient | None = None
        self._resolv_conf: FileState = file_state(RESOLV_CONF)
        self._servers = self._use(servers_of(settings, RESOLV_CONF))
        self._mx_cache: AnswerCache[MxRecord] = AnswerCache(settings.cache_size, clock)
        self._ip_cache: AnswerCache[str] = AnswerCache(settings.cache_size, clock)
        self._tlsa_cache: AnswerCache[TlsaRecord] = AnswerCache(settings.cache_size, clock)
        self._txt_cache: AnswerCache[str] = AnswerCache(settings.cache_size, clock)
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    def when_restored(self, call: Callable[[float], object]) -> None:
        """Register `call`. It is called when an outage of the name servers is over, with the seconds for
        which failures stay cached.
        """
        self.watch.on_restored = lambda: call(FAILURE_TTL)

    def _use(self, servers: list[NameServer]) -> NameServers:
        """Use the present name servers. Raise ValueError if resolv.conf names a server in an unknown form."""
        self._thorough = None if servers else _thorough(self.settings)
        self.watch.servers = ", ".join(map(str, servers)) or "the system's"
        self._probe_time = TRY_TIMEOUT * max(1, len(servers))
        self._named = servers
        return NameServers(
            servers, self._random, wants_dnssec=self.settings.trust_ad, silent=self.watch.silent
        )

    def _notice_changes(self) -> None:
        """Apply changes of resolv.conf. An invalid file changes nothing."""
        if self.settings.servers:
            return
        state = file_state(RESOLV_CONF)
        if state == self._resolv_conf:
            return
        self._resolv_conf = state
        with contextlib.suppress(ValueError):
            self._servers = self._use(servers_of(self.settings, RESOLV_CONF, before=self._named))

    async def mx(self, domain: str) -> DnsAnswer[MxRecord]:
        """Return the MX records of an ASCII domain by preference. The root as a host is `""` (null MX)."""
        if is_localhost(domain):
            return DnsAnswer(DnsStatus.NODATA, (), self._expires(0.0))
        return await self._mx_cache.get(("MX", domain), lambda: self._ask(domain, MX, _sorted))

    async def addresses(self, name: str, *, ipv6: bool) -> Addresses:
        """Return the addresses of a host, IPv6 and IPv4 alternately, so that a broken family costs only one
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
            four = await self.lookup(name, "A")
            return _addresses(name, four.records, (four,))
        six, four = await asyncio.gather(self.lookup(name, "AAAA"), self.lookup(name, "A"))
        turns = chain.from_iterable(zip_longest(six.records, four.records))
        return _addresses(name, [ip for ip in turns if ip is not None], (six, four))

    async def lookup(self, name: str, kind: str) -> DnsAnswer[str]:
        """Return the A or AAAA records of an ASCII name from DNS or the cache, never from the hosts file."""
        asked = AAAA if kind == "AAAA" else A
        return await self._ip_cache.get((kind, name), lambda: self._ask(name, asked, tuple))

    async def tlsa(self, name: str) -> DnsAnswer[TlsaRecord]:
        """Return the TLSA records of an ASCII name such as `_25._tcp.mx.example.com` (RFC 6698 3)."""
        return await self._tlsa_cache.get(("TLSA", name), lambda: self._ask(name, TLSA, tuple))

    async def alias(self, name: str) -> DnsAnswer[str]:
        """Return the target of an ASCII name's CNAME, one step."""
        return await self._ip_cache.get(("CNAME", name), lambda: self._ask(name, CNAME, tuple))

    async def txt(self, name: str) -> DnsAnswer[str]:
        """Return the TXT records of an ASCII name, each with its character-strings joined, without those over
        `MAX_TEXT` bytes.
        """
        return await self._txt_cache.get(("TXT", name), lambda: self._ask(name, TXT, _texts))

    async def close(self) -> None:
        """Cancel the queries in progress."""
        await self.watch.close()
        for cache in (self._mx_cache, self._ip_cache, self._tlsa_cache, self._txt_cache):
            await cache.close()

    async def _ask(
        self, name: str, kind: RecordType[Raw], finish: Callable[[tuple[Raw, ...]], tuple[Record, ...]]
    ) -> DnsAnswer[Record]:
        async with self._slots:
            reading = await self._read(name, kind, self.settings.timeout)
        self.watch.ended(name, reading.status)
        if self._observer is not None:
            self._observer.asked(reading.status.name.lower())
        status, ttl, longest = reading.status, reading.ttl, self.settings.negative_ttl
        records = finish(reading.records)[:MAX_RECORDS] if status is DnsStatus.OK else ()
        if status is DnsStatus.OK and not records:
            status = DnsStatus.BAD
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
        return (await self._read(name, A, self._probe_time)).status

    async def _read(self, name: str, kind: RecordType[Raw], lifetime: float) -> ParsedAnswer[Raw]:
        self._notice_changes()
        clock = asyncio.get_running_loop().time
        ends = clock() + lifetime
        found: ParsedAnswer[Raw] | DnspythonReason = DnspythonReason.OTHER
        # libc's search list applies to addresses of names without dots.
        search = kind in (A, AAAA) and "." not in name and not self.settings.servers
        if is_plain_name(name) and not search:
            try:
                found = await self._servers.ask(name, kind, lifetime=lifetime)
            except TimeoutError:
                return ParsedAnswer(DnsStatus.TIMEOUT, (), 0.0)
        if not isinstance(found, DnspythonReason):
            return found
        left = max(LEAST_TIME, ends - clock())
        if self._thorough is None:
            self._thorough = _thorough(self.settings)
        truncated = found is DnspythonReason.TRUNCATED
        reading = await self._thorough.ask(name, kind, lifetime=left, tcp=truncated, search=search)
        if truncated and reading.status is DnsStatus.TIMEOUT:
            return ParsedAnswer(DnsStatus.NO_TCP, (), 0.0)
        return reading


def _thorough(settings: DnsSettings) -> DnspythonClient:
    from zonerelay.routing.dns.dnspython_client import (  # noqa: PLC0415 - most relays never need dnspython
        DnspythonClient,
    )

    return DnspythonClient(settings)


def _sorted(records: tuple[MxRecord, ...]) -> tuple[MxRecord, ...]:
    return tuple(sorted(records))


def _texts(records: tuple[tuple[bytes, ...], ...]) -> tuple[str, ...]:
    joined = [b"".join(strings) for strings in records]
    return tuple(text.decode("utf-8", "replace") for text in joined if len(text) <= MAX_TEXT)


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
