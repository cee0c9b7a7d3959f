"""Parses the DNS answers that `answers.py` does not: aliases, denials, rare types, malformed packets.

Only this module uses dnspython, which is imported for the first such answer. A malformed answer is a status.
"""

import contextlib

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdata
import dns.rdataclass
import dns.rdatatype
import dns.rdtypes.ANY.TLSA

from zonerelay.routing.dns.answers import DnsStatus, ParsedAnswer, Record, RecordType


class _Tlsa(dns.rdtypes.ANY.TLSA.TLSA):
    """A TLSA record with data of any length, so that a malformed record does not make the others unreadable.

    RFC 7671 4.1 calls a malformed record unusable and counts the others. dnspython would drop the whole
    answer.
    """

    _cert_length_by_mtype: dict[int, int] = {}  # noqa: RUF012 - the base class declares it this way


# dnspython has no public way to replace one of its classes.
dns.rdata._rdata_classes[dns.rdataclass.IN, dns.rdatatype.TLSA] = _Tlsa


def read(packet: bytes, name: str, kind: RecordType[Record]) -> ParsedAnswer[Record]:
    """Parse the answer to the query for `kind` of `name`."""
    try:
        message = dns.message.from_wire(packet)
        code = message.rcode()
        if code not in (dns.rcode.NOERROR, dns.rcode.NXDOMAIN):
            return ParsedAnswer(DnsStatus.SERVFAIL, (), 0.0)
        (question,) = message.question
        asked = (dns.name.from_text(name), kind.code, dns.rdataclass.IN)
        is_ours = (question.name, question.rdtype, question.rdclass) == asked
        if not (is_ours and isinstance(message, dns.message.QueryMessage)):
            return ParsedAnswer(DnsStatus.BAD, (), 0.0)
        chain = message.resolve_chaining()
    except Exception:  # noqa: BLE001 - whatever dnspython raises for a malformed packet
        return ParsedAnswer(DnsStatus.BAD, (), 0.0)
    ttl, is_authentic = float(chain.minimum_ttl), bool(message.flags & dns.flags.AD)
    if code == dns.rcode.NXDOMAIN:
        return ParsedAnswer(DnsStatus.NXDOMAIN, (), ttl, is_authentic)
    records = []
    for record in chain.answer or ():
        # A record that is not usable, such as a host of other characters, is left out.
        with contextlib.suppress(ValueError):
            records.append(kind.convert(record))
    if chain.answer and not records:
        # Malformed records differ from no records: an implicit MX would be wrong.
        return ParsedAnswer(DnsStatus.BAD, (), 0.0)
    status = DnsStatus.OK if records else DnsStatus.NODATA
    alias = str(chain.canonical_name).removesuffix(".").lower() if chain.cnames else ""
    return ParsedAnswer(status, tuple(records), ttl, is_authentic, alias)
