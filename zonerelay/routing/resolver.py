"""DNS: asynchronous, cached within bounds, and never an exception (dnspython lives here only).

Answers are cached by their TTL, between `MIN_TTL` and `dns.max_ttl`; "no such name" and "no data" by the
zone's negative TTL up to `dns.negative_ttl`; failures only for `FAILURE_TTL`, so that a name server's
bad minute is not remembered. Questions that are being asked already are joined, not repeated, and a
caller that gives up does not take the answer from the others. Names are asked for as they are
(no search list), except that a name without dots follows the system's search list for addresses: that is
how a container finds `mailhog`.

An answer is `secure` when the resolver says that it has validated it (the AD bit) and `dns.trust_ad` says
that we believe it; without that option DNSSEC is not asked about at all.

Every failure is a value. What it means for mail is decided in `mx`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
from collections.abc import Callable, Sequence
from itertools import chain, zip_longest

import dns.asyncbackend
import dns.asyncresolver
import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.nameserver
import dns.rdata
import dns.rdataclass
import dns.rdatatype
import dns.rdtypes.ANY.TLSA
import dns.resolver

from zonerelay.config.endpoints import parse_name_server
from zonerelay.config.models import DnsSettings
from zonerelay.model.clock import Clock
from zonerelay.model.outcome import Outcome, Scope, Verdict
from zonerelay.model.reply import Reply
from zonerelay.routing.answers import DnsAnswer, DnsStatus, MxRecord, Record, TlsaRecord
from zonerelay.routing.cache import AnswerCache
from zonerelay.routing.hosts import Hosts, is_localhost, read_hosts
from zonerelay.routing.idna import ascii_domain
from zonerelay.routing.nexthop import Addresses

MIN_TTL = 5.0
FAILURE_TTL = 15.0
MAX_RECORDS = 100  # as Postfix since 3.9: a name with more is an attack, not a mail system
MAX_CONCURRENT = 200
TRY_TIMEOUT = 2.0  # one name server's time to answer, of the `dns.timeout` for all of them
EDNS_PAYLOAD = 1232  # avoids fragments (DNS flag day 2020)
MAX_TEXT = 4096  # octets of one TXT record; longer ones are nothing that we look for, and are left out

_HOST = re.compile(r"[a-z0-9_.-]+", re.ASCII)


class _Tlsa(dns.rdtypes.ANY.TLSA.TLSA):
    """With data of any length: one record that is malformed must not make its good neighbours unreadable.

    RFC 7671 4.1 has it unusable, and the others count; dnspython would give the whole answer up.
    """

    _cert_length_by_mtype: dict[int, int] = {}  # noqa: RUF012 - the base class has it so


# There is no public way to put another class in the place of one that dnspython knows.
dns.rdata._rdata_classes[dns.rdataclass.IN, dns.rdatatype.TLSA] = _Tlsa


class Resolver:
    """One per worker. `hosts` is what needs no DNS; by default the machine's hosts file."""

    def __init__(self, settings: DnsSettings, clock: Clock, *, hosts: Hosts | None = None) -> None:
        self._settings = settings
        self._clock = clock
        self._hosts = read_hosts() if hosts is None else hosts
        self._backend = dns.asyncbackend.get_backend("asyncio")
        self._dns = _dns_resolver(settings)
        self._mx_cache: AnswerCache[MxRecord] = AnswerCache(settings.cache_size, clock)
        self._ip_cache: AnswerCache[str] = AnswerCache(settings.cache_size, clock)
        self._tlsa_cache: AnswerCache[TlsaRecord] = AnswerCache(settings.cache_size, clock)
        self._txt_cache: AnswerCache[str] = AnswerCache(settings.cache_size, clock)
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)

    @property
    def trusts_ad(self) -> bool:
        """Whether an answer can be `secure` at all."""
        return self._settings.trust_ad

    async def mx(self, domain: str) -> DnsAnswer[MxRecord]:
        """The MX records of an ASCII domain, by preference. The root as a host is `""` (null MX)."""
        if is_localhost(domain):
            return self._negative(DnsStatus.NODATA, 0.0)
        return await self._mx_cache.get(("MX", domain), lambda: self._ask(domain, "MX", _mx_records))

    async def addresses(self, name: str, *, ipv6: bool) -> Addresses:
        """The addresses of a host, IPv6 and IPv4 in turn, so that one broken family costs one attempt.

        A failure is a deferral: an MX host without an address is its owner's mistake of today.
        """
        if _is_ip(name):
            return Addresses((name,))
        local = self._hosts.lookup(name.lower())
        if local:
            return _addresses(name, [ip for ip in local if ipv6 or ":" not in ip], ())
        try:
            name = ascii_domain(name)
        except ValueError as error:
            return Addresses((), _no_address(f"{name}: {error}"))
        if not ipv6:
            four = await self.lookup(name, "A")
            return _addresses(name, four.records, (four,))
        six, four = await asyncio.gather(self.lookup(name, "AAAA"), self.lookup(name, "A"))
        turns = chain.from_iterable(zip_longest(six.records, four.records))
        return _addresses(name, [ip for ip in turns if ip is not None], (six, four))

    async def lookup(self, name: str, kind: str) -> DnsAnswer[str]:
        """The A or AAAA records of an ASCII name from DNS or the cache, never from the hosts file."""
        return await self._ip_cache.get((kind, name), lambda: self._ask(name, kind, _ip_records))

    async def tlsa(self, name: str) -> DnsAnswer[TlsaRecord]:
        """The TLSA records of an ASCII name such as `_25._tcp.mx.example.com` (RFC 6698 3)."""
        return await self._tlsa_cache.get(("TLSA", name), lambda: self._ask(name, "TLSA", _tlsa_records))

    async def alias(self, name: str) -> DnsAnswer[str]:
        """What an ASCII name is an alias for, one step (CNAME)."""
        return await self._ip_cache.get(("CNAME", name), lambda: self._ask(name, "CNAME", _targets))

    async def txt(self, name: str) -> DnsAnswer[str]:
        """The TXT records of an ASCII name, each one's character-strings joined; none over `MAX_TEXT`."""
        return await self._txt_cache.get(("TXT", name), lambda: self._ask(name, "TXT", _texts))

    async def close(self) -> None:
        """Give up what is being asked."""
        await self._mx_cache.close()
        await self._ip_cache.close()
        await self._tlsa_cache.close()
        await self._txt_cache.close()

    async def _ask(
        self, name: str, kind: str, read: Callable[[dns.resolver.Answer], list[Record]]
    ) -> DnsAnswer[Record]:
        try:
            answer = await self._query(name, kind)
        except dns.resolver.NXDOMAIN as error:
            responses = _responses(error)
            secure = bool(responses) and all(self._vouched_for(response) for response in responses)
            return self._negative(DnsStatus.NXDOMAIN, _nxdomain_ttl(responses), secure=secure)
        except dns.resolver.NoNameservers as error:
            return self._failure(_blame(error))
        except dns.exception.Timeout:
            return self._failure(DnsStatus.TIMEOUT)
        except (dns.exception.DNSException, OSError, ValueError):
            return self._failure(DnsStatus.BAD)
        return self._understand(answer, tuple(read(answer)[:MAX_RECORDS]))

    async def _query(self, name: str, kind: str) -> dns.resolver.Answer:
        async with self._slots:
            return await self._dns.resolve(
                name,
                kind,
                raise_on_no_answer=False,
                lifetime=self._settings.timeout,
                search=kind in ("A", "AAAA") and "." not in name and not self._settings.servers,
                backend=self._backend,
            )

    def _understand(self, answer: dns.resolver.Answer, records: tuple[Record, ...]) -> DnsAnswer[Record]:
        ttl = float(answer.chaining_result.minimum_ttl)
        secure = self._vouched_for(answer.response)
        alias = answer.canonical_name if answer.canonical_name != answer.qname else None
        canonical = "" if alias is None else _text(alias)
        if records:
            ttl = min(ttl, self._settings.max_ttl)
            return self._answer(DnsStatus.OK, records, ttl, secure=secure, canonical=canonical)
        if answer.rrset:
            # Records that all made no sense are not the same as no records: an implicit MX would be wrong.
            return self._failure(DnsStatus.BAD)
        return self._negative(DnsStatus.NODATA, ttl, secure=secure)

    def _vouched_for(self, response: dns.message.Message) -> bool:
        # An answer over a path that can be tampered with may have any bit set: only the operator knows.
        return self._settings.trust_ad and bool(response.flags & dns.flags.AD)

    def _negative(self, status: DnsStatus, ttl: float, *, secure: bool = False) -> DnsAnswer[Record]:
        return self._answer(status, (), min(ttl, self._settings.negative_ttl), secure=secure)

    def _failure(self, status: DnsStatus) -> DnsAnswer[Record]:
        return self._answer(status, (), min(FAILURE_TTL, self._settings.negative_ttl))

    def _answer(
        self,
        status: DnsStatus,
        records: tuple[Record, ...],
        ttl: float,
        *,
        secure: bool = False,
        canonical: str = "",
    ) -> DnsAnswer[Record]:
        expires = self._clock.monotonic() + max(ttl, MIN_TTL)
        return DnsAnswer(status, records, expires, secure, canonical)


def _dns_resolver(settings: DnsSettings) -> dns.asyncresolver.Resolver:
    """The configured servers, or the system's; without either, one on this machine, as libc has it."""
    resolver = dns.asyncresolver.Resolver(configure=False)
    if settings.servers:
        servers = [parse_name_server(server) for server in settings.servers]
        resolver.nameservers = [dns.nameserver.Do53Nameserver(s.address, s.port) for s in servers]
    else:
        try:
            resolver.read_resolv_conf("/etc/resolv.conf")
        except dns.resolver.NoResolverConfiguration:
            resolver.nameservers = ["127.0.0.1"]
    # AD in a query asks for AD in the answer (RFC 6840 5.7); resolvers older than that want DO.
    resolver.use_edns(0, dns.flags.DO if settings.trust_ad else 0, EDNS_PAYLOAD)
    if settings.trust_ad:
        resolver.flags = dns.flags.RD | dns.flags.AD
    resolver.timeout = min(TRY_TIMEOUT, settings.timeout)
    return resolver


def _mx_records(answer: dns.resolver.Answer) -> list[MxRecord]:
    records = [
        MxRecord(record.preference, "" if record.exchange == dns.name.root else _text(record.exchange))
        for record in answer.rrset or ()
    ]
    return sorted(record for record in records if not record.host or _HOST.fullmatch(record.host))


def _ip_records(answer: dns.resolver.Answer) -> list[str]:
    return [record.address for record in answer.rrset or ()]


def _tlsa_records(answer: dns.resolver.Answer) -> list[TlsaRecord]:
    return [
        TlsaRecord(record.usage, record.selector, record.mtype, record.cert) for record in answer.rrset or ()
    ]


def _targets(answer: dns.resolver.Answer) -> list[str]:
    return [_text(record.target) for record in answer.rrset or ()]


def _texts(answer: dns.resolver.Answer) -> list[str]:
    joined = [b"".join(record.strings) for record in answer.rrset or ()]
    return [text.decode("utf-8", "replace") for text in joined if len(text) <= MAX_TEXT]


def _text(name: dns.name.Name) -> str:
    return name.to_text(omit_final_dot=True).lower()


def _responses(error: dns.resolver.NXDOMAIN) -> list[dns.message.QueryMessage]:
    responses = error.responses()  # type: ignore[no-untyped-call]  # dnspython left it untyped
    return list(responses.values())


def _nxdomain_ttl(responses: Sequence[dns.message.QueryMessage]) -> float:
    """RFC 2308 5: the smaller of the SOA's TTL and its minimum, as dnspython works it out."""
    ttls = []
    for response in responses:
        try:
            ttls.append(response.resolve_chaining().minimum_ttl)
        except dns.exception.DNSException:  # a denial without its SOA
            ttls.append(0)
    return float(min(ttls, default=0))


def _blame(error: dns.resolver.NoNameservers) -> DnsStatus:
    """Servers that answered with a failure code, or nonsense, or could not be reached at all."""
    # dnspython's list of (server, tcp, port, error, response).
    failures = [(failure[3], failure[4]) for failure in error.kwargs["errors"]]
    if any(response is not None and not isinstance(what, Exception) for what, response in failures):
        return DnsStatus.SERVFAIL
    if all(isinstance(what, OSError) for what, _ in failures):
        return DnsStatus.TIMEOUT
    return DnsStatus.BAD


def _addresses(name: str, ips: Sequence[str], answers: Sequence[DnsAnswer[str]]) -> Addresses:
    if ips:
        # A family whose look-up failed says nothing: else whoever can break it could take security away.
        heard = [answer for answer in answers if answer.status.is_definite]
        secure = bool(heard) and all(answer.secure for answer in heard)
        canonical = next((answer.canonical for answer in heard if answer.canonical), "")
        return Addresses(tuple(ips[:MAX_RECORDS]), secure=secure, canonical=canonical)
    statuses = [answer.status for answer in answers] or [DnsStatus.NODATA]
    doubts = [status for status in statuses if not status.is_definite]
    why = (doubts or statuses)[0]
    return Addresses((), _no_address(f"{name}: {why}", detail="4.3" if doubts else "4.4"))


def _no_address(text: str, *, detail: str = "4.4") -> Outcome:
    return Outcome(
        Verdict.DEFERRED,
        Reply(451, detail, f"cannot find an address of {text}"),
        scope=Scope.HOST,
        local=True,
    )


def _is_ip(name: str) -> bool:
    if not (":" in name or name[-1:].isdigit()):
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
