"""What dnspython makes of a packet: the oracle for our own reader of DNS answers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import dns.exception
import dns.message
import dns.name
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.resolver

from zonerelay.routing.dns.answers import (
    DnsStatus,
    MxRecord,
    ParsedAnswer,
    Record,
    RecordType,
    TlsaRecord,
    read_answer,
)
from zonerelay.routing.dns.dnspython_client import _is_authentic, _nxdomain_ttl, _text, _understand

_HOST = re.compile(r"[a-z0-9_.-]+", re.ASCII)
FAILURES = (dns.rcode.SERVFAIL, dns.rcode.REFUSED)


def read_alike(packet: bytes, name: str, kind: RecordType[Record]) -> ParsedAnswer[Record] | None:
    """Our reading, after it was found to be dnspython's, or `None`, which is never wrong."""
    ours = read_answer(packet, name, kind)
    if ours is not None:
        theirs = _reading(packet, name, kind)
        assert ours == theirs, (ours, theirs)
    return ours


def _reading(packet: bytes, name: str, kind: RecordType[Record]) -> ParsedAnswer[Record]:
    try:
        message = dns.message.from_wire(packet)
    except dns.exception.DNSException:
        # Data of records that nobody asked for may be anything: we do not look into them.
        message = dns.message.from_wire(packet, continue_on_error=True)
    assert isinstance(message, dns.message.QueryMessage)
    if message.rcode() in FAILURES:
        return ParsedAnswer(DnsStatus.SERVFAIL, (), 0.0)
    (question,) = message.question
    qname, rdtype = dns.name.from_text(name), dns.rdatatype.from_text(kind.name)
    assert (question.name, question.rdtype, question.rdclass) == (qname, rdtype, dns.rdataclass.IN)
    if message.rcode() == dns.rcode.NXDOMAIN:
        return ParsedAnswer(DnsStatus.NXDOMAIN, (), _nxdomain_ttl([message]), _is_authentic(message))
    assert message.rcode() == dns.rcode.NOERROR
    answer = dns.resolver.Answer(qname, rdtype, dns.rdataclass.IN, message)
    return _understand(answer, tuple(_READERS[kind.name](answer)))


def _mx_records(answer: dns.resolver.Answer) -> list[MxRecord]:
    records = [
        MxRecord(record.preference, "" if record.exchange == dns.name.root else _text(record.exchange))
        for record in answer.rrset or ()
    ]
    return [record for record in records if not record.host or _HOST.fullmatch(record.host)]


def _ip_records(answer: dns.resolver.Answer) -> list[str]:
    return [record.address for record in answer.rrset or ()]


def _tlsa_records(answer: dns.resolver.Answer) -> list[TlsaRecord]:
    return [
        TlsaRecord(record.usage, record.selector, record.mtype, record.cert) for record in answer.rrset or ()
    ]


def _targets(answer: dns.resolver.Answer) -> list[str]:
    return [_text(record.target) for record in answer.rrset or ()]


def _texts(answer: dns.resolver.Answer) -> list[str]:
    return [b"".join(record.strings).decode("utf-8", "replace") for record in answer.rrset or ()]


# `Any`: each parser has the type of its kind's records, which a dict cannot express.
_READERS: dict[str, Callable[[dns.resolver.Answer], list[Any]]] = {
    "MX": _mx_records,
    "A": _ip_records,
    "AAAA": _ip_records,
    "TLSA": _tlsa_records,
    "CNAME": _targets,
    "TXT": _texts,
}
