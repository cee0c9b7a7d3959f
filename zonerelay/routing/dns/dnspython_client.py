"""DNS by dnspython: any query, any answer, TCP, search lists and every failure. Only this module uses
dnspython.

The resolver uses it if a query or its answer is not plain (`answers.py`). It never raises: every failure is a
status.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

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

from zonerelay.config.endpoints import NameServer
from zonerelay.config.settings import DnsSettings
from zonerelay.routing.dns import answers
from zonerelay.routing.dns.answers import DnsStatus, ParsedAnswer, Record


class _Tlsa(dns.rdtypes.ANY.TLSA.TLSA):
    """A TLSA record that accepts data of any length, so that a malformed record does not make the others
    unreadable.

    RFC 7671 4.1 calls a malformed record unusable and counts the others. dnspython would drop the whole
    answer.
    """

    _cert_length_by_mtype: dict[int, int] = {}  # noqa: RUF012 - the base class declares it this way


# dnspython has no public way to replace one of its classes.
dns.rdata._rdata_classes[dns.rdataclass.IN, dns.rdatatype.TLSA] = _Tlsa


class DnspythonClient:
    """Queries these name servers, or without any those in `resolv_conf`, which may use other protocols."""

    def __init__(self, settings: DnsSettings, servers: Sequence[NameServer], resolv_conf: str) -> None:
        """Read the search list of the system. Raise ValueError if it names a server in an unknown form."""
        self._backend = dns.asyncbackend.get_backend("asyncio")
        self._dns = resolver = dns.asyncresolver.Resolver(configure=False)
        if not settings.servers:
            with contextlib.suppress(dns.resolver.NoResolverConfiguration):
                resolver.read_resolv_conf(resolv_conf)
        if servers:
            resolver.nameservers = [dns.nameserver.Do53Nameserver(s.address, s.port) for s in servers]
        # Without EDNS, which some servers refuse. An answer that does not fit is then fetched over TCP.
        if settings.trust_ad:
            # AD in a query requests AD in the answer (RFC 6840 5.7). Older resolvers need DO.
            resolver.use_edns(0, dns.flags.DO, answers.EDNS_PAYLOAD)
            resolver.flags = dns.flags.RD | dns.flags.AD
        resolver.timeout = min(answers.TRY_TIMEOUT, settings.timeout)

    async def ask(
        self, name: str, kind: answers.RecordType[Record], *, lifetime: float, tcp: bool, search: bool
    ) -> ParsedAnswer[Record]:
        """Send a query and return the answer. `lifetime` is in seconds. `tcp` disables UDP. `search` applies
        the system's search list.
        """
        try:
            answer = await self._dns.resolve(
                name,
                kind.name,
                raise_on_no_answer=False,
                lifetime=lifetime,
                tcp=tcp,
                search=search,
                backend=self._backend,
            )
        except dns.resolver.NXDOMAIN as error:
            responses = list(error.responses().values())  # type: ignore[no-untyped-call]  # dnspython's
            authentic = bool(responses) and all(map(_is_authentic, responses))
            return ParsedAnswer(DnsStatus.NXDOMAIN, (), _nxdomain_ttl(responses), authentic)
        except dns.resolver.NoNameservers as error:
            return ParsedAnswer(_blame(error), (), 0.0)
        except dns.exception.Timeout:
            return ParsedAnswer(DnsStatus.TIMEOUT, (), 0.0)
        except (dns.exception.DNSException, OSError, ValueError):
            return ParsedAnswer(DnsStatus.BAD, (), 0.0)
        # Records that only a complete DNS library reads, such as a host of other characters, are left out.
        read = (answers.read_data(record.to_wire() or b"", kind) for record in answer.rrset or ())
        return _understand(answer, tuple(record for record in read if record is not None))


def _understand(answer: dns.resolver.Answer, records: tuple[Record, ...]) -> ParsedAnswer[Record]:
    if answer.rrset and not records:
        # Malformed records differ from no records: an implicit MX would be wrong.
        return ParsedAnswer(DnsStatus.BAD, (), 0.0)
    status = DnsStatus.OK if records else DnsStatus.NODATA
    alias = answer.canonical_name if answer.canonical_name != answer.qname else None
    return ParsedAnswer(
        status,
        records,
        float(answer.chaining_result.minimum_ttl),
        _is_authentic(answer.response),
        "" if alias is None else _text(alias),
    )


def _is_authentic(response: dns.message.Message) -> bool:
    return bool(response.flags & dns.flags.AD)


def _text(name: dns.name.Name) -> str:
    return name.to_text(omit_final_dot=True).lower()


def _nxdomain_ttl(responses: Sequence[dns.message.QueryMessage]) -> float:
    """Return the smaller of the SOA's TTL and its minimum (RFC 2308 5), as dnspython computes it."""
    ttls = []
    for response in responses:
        try:
            ttls.append(response.resolve_chaining().minimum_ttl)
        except dns.exception.DNSException:  # a denial without its SOA
            ttls.append(0)
    return float(min(ttls, default=0))


def _blame(error: dns.resolver.NoNameservers) -> DnsStatus:
    """Return the status that distinguishes servers that failed, servers that sent malformed answers, and
    unreachable servers.
    """
    # dnspython's list of (server, tcp, port, error, response).
    failures = [(failure[3], failure[4]) for failure in error.kwargs["errors"]]
    if any(response is not None and not isinstance(what, Exception) for what, response in failures):
        return DnsStatus.SERVFAIL
    if all(isinstance(what, OSError) for what, _ in failures):
        return DnsStatus.TIMEOUT
    return DnsStatus.BAD
