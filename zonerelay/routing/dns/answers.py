"""DNS answers as values that distinguish kinds of failure, and the encoding of queries and answers. Pure.

`destinations/mx.py` decides which of them bounce mail: that a name does not exist is stated by the domain
itself, while a silent name server is a temporary failure.

The caches hold tens of thousands of these values. They contain only strings and numbers, so they are in no
reference cycle and the garbage collector need not inspect them (`gc=False`).

Bytes (RFC 1035 4, RFC 6891 6.1): a relay sends the same few kinds of queries all day, each about a new
domain. A complete DNS library costs as much CPU for that as the rest of a delivery. So `read_plain` parses
the forms that most answers have, and dnspython parses all others (`dnspython_reader.py`). Both interpret
answers in the same way; the tests compare them.

An answer is plain if it has only MX, A or AAAA records of the name itself and their signatures, or if it is
a denial with only the zone's SOA record (RFC 2308 5). What follows these records is not parsed.
"""

import enum
import re
import socket
from collections.abc import Callable, Sequence
from operator import attrgetter
from struct import Struct
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from zonerelay.model.reply import Reply

Record = TypeVar("Record")


class DnsStatus(enum.StrEnum):
    """The status of a DNS answer, with a description of the failure."""

    OK = "ok"
    NXDOMAIN = "the name does not exist"
    NODATA = "the name has no record of this type"
    SERVFAIL = "the name server returned a failure"
    TIMEOUT = "no name server responded in time"
    NO_TCP = "the response is too long for UDP, and no name server responded over TCP (port 53)"
    BAD = "the name server returned an invalid response"

    @property
    def is_definite(self) -> bool:
        """Whether the status comes from the domain's own data, and not from a failure. Any other status may
        be different in a minute.
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
    """The addresses of one host, most preferred first. If there are none, `failure` is the reason, as a
    deferral.

    `secure` means that DNSSEC validates all of them and the aliases before them. `canonical` is the name at
    the end of the aliases.
    """

    ips: tuple[str, ...]
    failure: Reply | None = None
    secure: bool = False
    canonical: str = ""


# The types of DNS records that mail needs, each with converters of its data. Pure.

_PREFERENCE = Struct("!H")
_POINTER = 0xC0
_MAX_LABEL, _MAX_NAME = 63, 253
MAX_TEXT = 4096
"""Bytes of one TXT record. Longer text serves no purpose here."""
_PLAIN_NAME = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*", re.ASCII)
_PLAIN_LABEL = re.compile(rb"[a-zA-Z0-9_-]*")


class RecordType(NamedTuple, Generic[Record]):
    """A DNS record type. `convert` converts a record of dnspython, which is of the class for the type, and
    raises ValueError if the record is not usable. `read` parses the data of a record in a packet, between two
    offsets. It raises ValueError, IndexError or struct.error for rare or malformed data. `order` brings the
    records of an answer into their order.
    """

    name: str
    code: int
    convert: Callable[[Any], Record]
    read: Callable[[bytes, int, int], Record] | None = None
    order: Callable[[tuple[Record, ...]], Sequence[Record]] = tuple


def need(condition: bool) -> None:
    """Raise ValueError if the condition is false."""
    if not condition:
        raise ValueError


def is_plain_name(name: str) -> bool:
    """Return whether a name has only lower-case letters, digits, hyphens and underscores, and no final
    dot.
    """
    return len(name) <= _MAX_NAME and _PLAIN_NAME.fullmatch(name) is not None


def plain_host(name: object) -> str:
    """Convert a dnspython name to lower case without the final dot. Raise ValueError if it is neither plain
    nor the root.
    """
    text = str(name).removesuffix(".").lower()
    need(not text or is_plain_name(text))
    return text


def _name(packet: bytes, at: int, end: int) -> str:
    """Parse a domain name that fills these bytes exactly, and return it in lower case without the final dot.

    Pointers lead backwards (RFC 1035 4.1.4).
    """
    labels: list[bytes] = []
    after = 0
    least = at
    size = 0
    while length := packet[at]:
        if length >= _POINTER:
            after = after or at + 2
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
    need((after or at + 1) == end)
    return b".".join(labels).decode("ascii").lower()


def _mx(packet: bytes, start: int, end: int) -> MxRecord:
    (preference,) = _PREFERENCE.unpack_from(packet, start)
    return MxRecord(preference, _name(packet, start + _PREFERENCE.size, end))


def _ip(packet: bytes, start: int, end: int) -> str:
    """Parse the bytes of an IPv4 or IPv6 address. Raise ValueError unless it has the length of one."""
    return socket.inet_ntop(socket.AF_INET if end - start == 4 else socket.AF_INET6, packet[start:end])


def _text(record: Any) -> str:
    text = b"".join(record.strings)
    need(len(text) <= MAX_TEXT)
    return text.decode("utf-8", "replace")


MX = RecordType("MX", 15, lambda mx: MxRecord(mx.preference, plain_host(mx.exchange)), _mx, sorted)
CNAME = RecordType("CNAME", 5, lambda alias: plain_host(alias.target))
A = RecordType[str]("A", 1, attrgetter("address"), _ip)
AAAA = RecordType[str]("AAAA", 28, attrgetter("address"), _ip)
TLSA = RecordType("TLSA", 52, lambda tlsa: TlsaRecord(tlsa.usage, tlsa.selector, tlsa.mtype, tlsa.cert))
TXT = RecordType("TXT", 16, _text)


MAX_TTL = 2**31 - 1
MAX_RECORDS = 200
"""Records of all kinds in an answer. With names of many labels, those of one packet take a second to read."""
TRY_TIMEOUT = 2.0
"""Seconds for one name server, out of the `dns.timeout` for all of them."""
EDNS_PAYLOAD = 1232
"""The maximum payload in bytes that avoids fragments (DNS flag day 2020)."""

_HEADER = Struct("!HHHHHH")
_TYPE_AND_CLASS = Struct("!HH")
_RECORD = Struct("!HHHIH")
_OPT = Struct("!BHHIH")
_IN = 1
_SOA, _OPT_TYPE, _RRSIG = 6, 41, 46
_SOA_SIZE = 22  # two names of a byte, and five numbers
_RESPONSE, _TRUNCATED, _RECURSION_DESIRED, _AUTHENTIC = 0x8000, 0x0200, 0x0100, 0x0020
_OPCODE, _RCODE = 0x7800, 0x000F
_NO_ERROR, _NO_SUCH_NAME = 0, 3
_DNSSEC_OK = 0x8000
_TO_THE_QUESTION = 0xC00C
"""A pointer to the name in the question."""


class ParsedAnswer(msgspec.Struct, Generic[Record], frozen=True, gc=False):
    """The parsed content of a DNS answer. `ttl` is in seconds and unbounded. `authentic` is its AD bit.

    `canonical` is the name at the end of the aliases, if there are any.
    """

    status: DnsStatus
    records: tuple[Record, ...]
    ttl: float
    authentic: bool = False
    canonical: str = ""


def question(number: int, name: str, code: int, *, wants_dnssec: bool) -> bytes:
    """Encode a query packet. `name` is plain, and `number` is the query's id.

    With `wants_dnssec`, AD and DO are set: AD requests AD in the answer (RFC 6840 5.7), and older resolvers
    need DO, which is in the OPT record.
    """
    flags = _RECURSION_DESIRED | (_AUTHENTIC if wants_dnssec else 0)
    option = _OPT.pack(0, _OPT_TYPE, EDNS_PAYLOAD, _DNSSEC_OK, 0) if wants_dnssec else b""
    return _HEADER.pack(number, flags, 1, 0, 0, int(wants_dnssec)) + _asked(name, code) + option


def _asked(name: str, code: int) -> bytes:
    labels = b"".join(len(label).to_bytes() + label for label in name.encode("ascii").split(b"."))
    return labels + b"\0" + _TYPE_AND_CLASS.pack(code, _IN)


def is_truncated(packet: bytes) -> bool:
    """Return whether the answer is truncated, so that the query must be repeated over TCP."""
    return len(packet) >= _HEADER.size and bool(_HEADER.unpack_from(packet)[1] & _TRUNCATED)


def is_too_long(packet: bytes) -> bool:
    """Return whether the packet has so many records that only the fast parser (`read_plain`) may parse it."""
    return len(packet) >= _HEADER.size and sum(_HEADER.unpack_from(packet)[2:]) > MAX_RECORDS


def read_plain(packet: bytes, name: str, kind: RecordType[Record]) -> ParsedAnswer[Record]:
    """Parse the answer to the query for `kind` of `name`, if it has the form that most answers have. Raise
    ValueError, IndexError or struct.error if it is not plain.
    """
    _, flags, questions, answers, denials, _ = _HEADER.unpack_from(packet)
    asked, code, is_authentic = _asked(name, kind.code), flags & _RCODE, bool(flags & _AUTHENTIC)
    at = _HEADER.size + len(asked)
    need(flags & (_RESPONSE | _OPCODE | _TRUNCATED) == _RESPONSE and questions == 1)
    need(packet[_HEADER.size : at].lower() == asked)
    if not answers:
        need(code in (_NO_ERROR, _NO_SUCH_NAME) and denials == 1)
        owner, *of, seconds, length = _RECORD.unpack_from(packet, at)
        end = at + _RECORD.size + length
        # The owner is the name or a name above it.
        need(of == [_SOA, _IN] and 0 <= owner - _TO_THE_QUESTION <= len(name))
        need(length >= _SOA_SIZE and end <= len(packet))
        status = DnsStatus.NODATA if code == _NO_ERROR else DnsStatus.NXDOMAIN
        ttl = min(_ttl(seconds), int.from_bytes(packet[end - 4 : end]))
        return ParsedAnswer(status, (), float(ttl), is_authentic)
    need(code == _NO_ERROR)
    ttl, records = MAX_TTL, dict[Record, None]()
    for _ in range(min(answers, MAX_RECORDS)):
        *of, seconds, length = _RECORD.unpack_from(packet, at)
        start = at + _RECORD.size
        at = start + length
        need(at <= len(packet))
        if records and of == [_TO_THE_QUESTION, _RRSIG, _IN]:
            continue
        if kind.read is None or of != [_TO_THE_QUESTION, kind.code, _IN]:
            raise ValueError
        # A record that occurs twice counts as one record.
        records[kind.read(packet, start, at)] = None
        ttl = min(ttl, _ttl(seconds))
    return ParsedAnswer(DnsStatus.OK, tuple(records), float(ttl), is_authentic)


def _ttl(seconds: int) -> int:
    """Return a TTL that is limited as RFC 2181 8 requires. A TTL with the first bit set counts as 0."""
    return seconds if seconds <= MAX_TTL else 0
