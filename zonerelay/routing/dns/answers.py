"""DNS answers as values that distinguish the kinds of failure, and queries and plain answers as bytes. Pure.

`destinations/mx.py` decides which of them bounce mail: that a name does not exist is stated by the domain
itself, while a silent name server is a temporary failure.

The caches hold tens of thousands of these values. They contain only strings and numbers, so they are in no
reference cycle and the garbage collector need not inspect them (`gc=False`).

Bytes (RFC 1035 4, RFC 6891 6.1, RFC 2308 5): a relay sends the same few kinds of queries all day, each about
a new domain. A complete DNS library (any type, any class, every flag) costs as much CPU for that as the rest
of a delivery. `read_answer` parses only the form that nearly every answer has, and returns None for all
others, which dnspython handles (`dnspython_client.py`). It interprets answers as dnspython does; the tests
compare the two.

An answer is plain if the server reports a failure, or if it is one complete answer to one query in class IN,
with the code "no error" or "no such name", names of letters, digits, hyphens and underscores, aliases that
form a chain, and records of the length that their type has. The rest of the packet has to be well-formed too.
"""

from __future__ import annotations

import enum
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from struct import Struct, error
from typing import Generic, NamedTuple, TypeVar

import msgspec

from zonerelay.model.reply import Reply

Record = TypeVar("Record")


class DnsStatus(enum.StrEnum):
    """The status of a DNS answer, by kind of failure."""

    OK = "ok"
    NXDOMAIN = "the name does not exist"
    NODATA = "the name has no record of this type"
    SERVFAIL = "the name server returned a failure"
    TIMEOUT = "no name server responded in time"
    NO_TCP = "the response is too long for UDP, and no name server responded over TCP (port 53)"
    BAD = "the name server returned an invalid response"

    @property
    def is_definite(self) -> bool:
        """Whether the domain's own data determined the status. Any other status may be
        different in a minute.
        """
        return self in (DnsStatus.OK, DnsStatus.NXDOMAIN, DnsStatus.NODATA)


class MxRecord(msgspec.Struct, frozen=True, order=True, gc=False):
    """An MX record. `host` is an ASCII name in lower case without a final dot; `""` is the root
    (RFC 7505).
    """

    preference: int
    host: str


class TlsaRecord(msgspec.Struct, frozen=True, gc=False):
    """A TLSA record with the fields of RFC 6698 2.1, unchecked. `delivery/tls/dane.py` decides which records
    are usable.
    """

    usage: int
    selector: int
    matching: int
    data: bytes


class DnsAnswer(msgspec.Struct, Generic[Record], frozen=True, gc=False):
    """The answer to a DNS query. `records` is empty unless the status is OK. `expires` is on the monotonic
    clock.

    `secure` means that DNSSEC validates the answer, including denials, and the resolver is trusted
    (`trust_ad`). `canonical` is the name at the end of the aliases, if there are any.
    """

    status: DnsStatus
    records: tuple[Record, ...]
    expires: float
    secure: bool = False
    canonical: str = ""


class Addresses(msgspec.Struct, frozen=True):
    """The addresses of one host, most preferred first. Without any, `failure` says why, as a deferral.

    `secure` means that DNSSEC validates all of them and the aliases before them. `canonical` is the name at
    the end of the aliases.
    """

    ips: tuple[str, ...]
    failure: Reply | None = None
    secure: bool = False
    canonical: str = ""


# The types of DNS records that mail needs, each with a parser of its data, and names in packets. Pure.
#
# The parsers raise `ComplexAnswerError` for rare or malformed data. Then dnspython parses the whole answer.

_PREFERENCE = Struct("!H")
_POINTER = 0xC0
_MAX_LABEL, _MAX_NAME = 63, 253
MAX_TEXT = 4096
"""Bytes of the data of one TXT record."""
_PLAIN_NAME = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*", re.ASCII)
_PLAIN_LABEL = re.compile(rb"[a-zA-Z0-9_-]*")


class ComplexAnswerError(Exception):
    """The answer needs a complete DNS library."""


def need(is_plain: bool) -> None:
    """Raise ComplexAnswerError unless the condition holds."""
    if not is_plain:
        raise ComplexAnswerError


class RecordType(NamedTuple, Generic[Record]):
    """A DNS record type. `read` parses its data in a packet, between two offsets, and `order` brings the
    records of an answer into their order.

    `read` raises ComplexAnswerError, IndexError and struct.error.
    """

    name: str
    code: int
    read: Callable[[bytes, int, int], Record]
    order: Callable[[tuple[Record, ...]], Sequence[Record]] = tuple


# --- names


def is_plain_name(name: str) -> bool:
    """Return whether a name consists of lower-case letters, digits, hyphens and underscores, without a final
    dot.
    """
    return len(name) <= _MAX_NAME and _PLAIN_NAME.fullmatch(name) is not None


def scan_name(packet: bytes, at: int) -> tuple[str, int]:
    """Return the name in lower case without the final dot, and the offset after it.

    Pointers lead backwards (RFC 1035 4.1.4).
    """
    labels: list[bytes] = []
    end = 0
    least = at
    size = 0
    while length := packet[at]:
        if length >= _POINTER:
            end = end or at + 2
            at = (length - _POINTER) << 8 | packet[at + 1]
            need(at < least)
            least = at
            continue
        need(length <= _MAX_LABEL)
        label = packet[at + 1 : at + 1 + length]
        size += length + 1
        need(len(label) == length and size <= _MAX_NAME + 1 and _PLAIN_LABEL.fullmatch(label) is not None)
        labels.append(label)
        at += 1 + length
    return b".".join(labels).decode("ascii").lower(), end or at + 1


def read_name(packet: bytes, start: int, end: int) -> str:
    """Return the name that consists of all of the bytes."""
    name, at = scan_name(packet, start)
    need(at == end)
    return name


# --- data


def _mx(packet: bytes, start: int, end: int) -> MxRecord:
    (preference,) = _PREFERENCE.unpack_from(packet, start)
    return MxRecord(preference, read_name(packet, start + _PREFERENCE.size, end))


def _ipv4(packet: bytes, start: int, end: int) -> str:
    need(end - start == 4)
    return socket.inet_ntop(socket.AF_INET, packet[start:end])


def _ipv6(packet: bytes, start: int, end: int) -> str:
    need(end - start == 16)
    return socket.inet_ntop(socket.AF_INET6, packet[start:end])


def _tlsa(packet: bytes, start: int, end: int) -> TlsaRecord:
    need(end - start >= 3)
    usage, selector, matching = packet[start : start + 3]
    return TlsaRecord(usage, selector, matching, packet[start + 3 : end])


def _text(packet: bytes, start: int, end: int) -> str:
    """Return the character-strings (RFC 1035 3.3.14), joined. Longer text than `MAX_TEXT` serves no purpose
    here.
    """
    need(start < end <= start + MAX_TEXT)
    strings = []
    while start < end:
        after = start + 1 + packet[start]
        strings.append(packet[start + 1 : after])
        start = after
    need(start == end)
    return b"".join(strings).decode("utf-8", "replace")


MX = RecordType("MX", 15, _mx, sorted)
CNAME = RecordType("CNAME", 5, read_name)
A = RecordType("A", 1, _ipv4)
AAAA = RecordType("AAAA", 28, _ipv6)
TLSA = RecordType("TLSA", 52, _tlsa)
TXT = RecordType("TXT", 16, _text)


MAX_ALIASES = 15
NO_SOA_TTL = 300
"""Seconds for which a denial without an SOA record is cached, as in dnspython."""
MAX_TTL = 2**31 - 1
TRY_TIMEOUT = 2.0
"""Seconds for one name server, out of the `dns.timeout` for all of them."""
EDNS_PAYLOAD = 1232
"""The maximum payload in bytes that avoids fragments (DNS flag day 2020)."""

_HEADER = Struct("!HHHHHH")
_TYPE_AND_CLASS = Struct("!HH")
_RECORD = Struct("!HHIH")
_OPT = Struct("!BHHIH")
_MINIMUM = Struct("!I")
_IN = 1
_SOA, _OPT_TYPE, _TSIG = 6, 41, 250
_RESPONSE, _TRUNCATED, _RECURSION_DESIRED, _AUTHENTIC = 0x8000, 0x0200, 0x0100, 0x0020
_OPCODE, _RCODE = 0x7800, 0x000F
_NO_ERROR, _FAILED, _NO_SUCH_NAME, _REFUSED = 0, 2, 3, 5
_DNSSEC_OK = 0x8000
_SOA_NUMBERS = 20
_SOA_MINIMUM = 16


class ParsedAnswer(msgspec.Struct, Generic[Record], frozen=True, gc=False):
    """The parsed content of a DNS answer. `ttl` is in seconds and unbounded. `authentic` is its AD bit.

    `canonical` is the name at the end of the aliases, if there are any.
    """

    status: DnsStatus
    records: tuple[Record, ...]
    ttl: float
    authentic: bool = False
    canonical: str = ""


def question(number: int, name: str, code: int, *, wants_dnssec: bool, edns: bool = True) -> bytes:
    """Return a query packet. `name` is plain, and `number` is the query's id.

    With `wants_dnssec`, AD and DO are set: AD requests AD in the answer (RFC 6840 5.7), and older resolvers
    need DO. Without `edns` the packet has no OPT record.
    """
    flags = _RECURSION_DESIRED | (_AUTHENTIC if wants_dnssec else 0)
    labels = b"".join(len(label).to_bytes() + label for label in name.encode("ascii").split(b"."))
    option = _OPT.pack(0, _OPT_TYPE, EDNS_PAYLOAD, _DNSSEC_OK if wants_dnssec else 0, 0) if edns else b""
    header = _HEADER.pack(number, flags, 1, 0, 0, 1 if edns else 0)
    return header + labels + b"\0" + _TYPE_AND_CLASS.pack(code, _IN) + option


def read_answer(packet: bytes, name: str, kind: RecordType[Record]) -> ParsedAnswer[Record] | None:
    """Return the answer to the query for `kind` of `name`, or None if it is not plain."""
    try:
        return _read(packet, name, kind)
    except (ComplexAnswerError, error, IndexError):
        return None


def read_data(data: bytes, kind: RecordType[Record]) -> Record | None:
    """Return the record with this data, in which no name is compressed, or None if it is not plain."""
    try:
        return kind.read(data, 0, len(data))
    except (ComplexAnswerError, error, IndexError):
        return None


def is_truncated(packet: bytes) -> bool:
    """Return whether the answer does not fit into a packet, so that TCP is needed."""
    return len(packet) >= _HEADER.size and bool(_HEADER.unpack_from(packet)[1] & _TRUNCATED)


def _read(packet: bytes, name: str, kind: RecordType[Record]) -> ParsedAnswer[Record]:
    _, flags, questions, answers, denials, more = _HEADER.unpack_from(packet)
    rcode = flags & _RCODE
    need(flags & (_RESPONSE | _OPCODE | _TRUNCATED) == _RESPONSE)
    is_failed = rcode in (_FAILED, _REFUSED)
    need(is_failed or rcode in (_NO_ERROR, _NO_SUCH_NAME))
    records = _RecordReader(packet, _pass_question(packet, name, kind.code) if questions else _HEADER.size)
    # Some servers that fail omit the question.
    need(questions == 1 or (is_failed and not questions))
    found, aliases = _sort(packet, records.take(answers), kind)
    soas = {
        row.owner: min(row.ttl, _soa_minimum(packet, row))
        for row in records.take(denials, once=_SOA)
        if row.code == _SOA
    }
    records.pass_additional(more)
    need(records.at == len(packet))
    if is_failed:
        return ParsedAnswer(DnsStatus.SERVFAIL, (), 0.0)

    canonical, ttl = _follow(name, found, aliases)
    authentic = bool(flags & _AUTHENTIC)
    alias = canonical if canonical != name else ""
    here = found.get(canonical)
    if here is None:
        status = DnsStatus.NODATA if rcode == _NO_ERROR else DnsStatus.NXDOMAIN
        ttl = min(ttl, _denial_ttl(canonical, soas))
        return ParsedAnswer(status, (), float(ttl), authentic, "" if rcode else alias)
    need(rcode == _NO_ERROR)
    ttl = min(ttl, *(row.ttl for row in here))
    # A record that occurs twice counts as one record.
    distinct = dict.fromkeys(kind.read(packet, row.start, row.end) for row in here)
    return ParsedAnswer(DnsStatus.OK, tuple(distinct), float(ttl), authentic, alias)


def _pass_question(packet: bytes, name: str, code: int) -> int:
    asked, at = scan_name(packet, _HEADER.size)
    need(asked == name and _TYPE_AND_CLASS.unpack_from(packet, at) == (code, _IN))
    return at + _TYPE_AND_CLASS.size


# --- records


class _ResourceRecord(NamedTuple):
    """One DNS record."""

    owner: str
    code: int
    ttl: int
    start: int
    end: int


class _RecordReader:
    """The sections after the question, in order."""

    def __init__(self, packet: bytes, at: int) -> None:
        self._packet = packet
        self.at = at

    def take(self, count: int, once: int = CNAME.code) -> Iterator[_ResourceRecord]:
        """Yield the records of a section in class IN. An owner may have the type `once` only once."""
        owners = set()
        for _ in range(count):
            owner, code, class_, ttl, start = self._header()
            need(code not in (_OPT_TYPE, _TSIG))
            if class_ != _IN:
                continue
            if code == once:
                need(owner not in owners)
                owners.add(owner)
            # RFC 2181 8: a TTL with the first bit set is 0.
            yield _ResourceRecord(owner, code, ttl if ttl <= MAX_TTL else 0, start, self.at)

    def pass_additional(self, count: int) -> None:
        """Check the section. It is used only for the upper bits of the code (RFC 6891 6.1.3)."""
        options = 0
        for _ in range(count):
            owner, code, _, ttl, start = self._header()
            need(code != _TSIG)
            if code == _OPT_TYPE:
                options += 1
                need(not owner and options == 1 and not ttl >> 24)
                self._pass_options(start)

    def _header(self) -> tuple[str, int, int, int, int]:
        owner, at = scan_name(self._packet, self.at)
        code, class_, ttl, length = _RECORD.unpack_from(self._packet, at)
        start = at + _RECORD.size
        self.at = start + length
        need(self.at <= len(self._packet))
        return owner, code, class_, ttl, start

    def _pass_options(self, at: int) -> None:
        while at < self.at:
            _, length = _TYPE_AND_CLASS.unpack_from(self._packet, at)
            at += _TYPE_AND_CLASS.size + length
        need(at == self.at)


def _sort(
    packet: bytes, rows: Iterator[_ResourceRecord], kind: RecordType[Record]
) -> tuple[dict[str, list[_ResourceRecord]], dict[str, tuple[str, int]]]:
    """Return the records of the kind by owner, and the target of each alias with its TTL."""
    found: dict[str, list[_ResourceRecord]] = {}
    aliases: dict[str, tuple[str, int]] = {}
    for row in rows:
        if row.code == kind.code:
            found.setdefault(row.owner, []).append(row)
        elif row.code == CNAME.code:
            aliases[row.owner] = read_name(packet, row.start, row.end), row.ttl
    return found, aliases


def _follow(
    name: str, found: dict[str, list[_ResourceRecord]], aliases: dict[str, tuple[str, int]]
) -> tuple[str, int]:
    """Return the end of the aliases and the smallest of their TTLs."""
    ttl = MAX_TTL
    for _ in range(MAX_ALIASES + 1):
        alias = None if name in found else aliases.get(name)
        if alias is None:
            return name, ttl
        name, ttl = alias[0], min(ttl, alias[1])
    raise ComplexAnswerError


def _denial_ttl(name: str, soas: dict[str, int]) -> int:
    """Return the TTL in the zone's SOA (RFC 2308 5), whose owner is the name or one above it."""
    while True:
        ttl = soas.get(name)
        if ttl is not None:
            return ttl
        if not name:
            return NO_SOA_TTL
        name = name.partition(".")[2]


def _soa_minimum(packet: bytes, row: _ResourceRecord) -> int:
    at = scan_name(packet, scan_name(packet, row.start)[1])[1]
    need(at + _SOA_NUMBERS == row.end)
    return int(_MINIMUM.unpack_from(packet, at + _SOA_MINIMUM)[0])
