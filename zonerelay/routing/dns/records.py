"""The types of DNS records that mail needs, each with a reader of its data, and names in packets. Pure.

The readers raise `NotPlainError` for rare or malformed data; then dnspython reads the whole answer
(`packets.py` has the reasons).
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from struct import Struct
from typing import Generic, NamedTuple

from zonerelay.routing.dns.answers import MxRecord, Record, TlsaRecord

_PREFERENCE = Struct("!H")
_POINTER = 0xC0
_MAX_LABEL, _MAX_NAME = 63, 253
_PLAIN_NAME = re.compile(r"[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*", re.ASCII)
_PLAIN_LABEL = re.compile(rb"[a-zA-Z0-9_-]*")


class NotPlainError(Exception):
    """The answer needs a complete DNS library."""


def need(is_plain: bool) -> None:
    """Raises NotPlainError unless the condition holds."""
    if not is_plain:
        raise NotPlainError


class Kind(NamedTuple, Generic[Record]):
    """A type of record. `read` reads its data from a packet, between two offsets.

    `read` raises NotPlainError, IndexError and struct.error.
    """

    name: str
    code: int
    read: Callable[[bytes, int, int], Record]


# --- names


def is_plain_name(name: str) -> bool:
    """True for a name in lower case of letters, digits, hyphens and underscores, without a final dot."""
    return len(name) <= _MAX_NAME and _PLAIN_NAME.fullmatch(name) is not None


def scan_name(packet: bytes, at: int) -> tuple[str, int]:
    """Returns the name in lower case without the final dot, and the offset after it.

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
    """Reads a name that takes up all of the octets."""
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


def _strings(packet: bytes, start: int, end: int) -> tuple[bytes, ...]:
    """Returns the character-strings (RFC 1035 3.3.14)."""
    need(start < end)
    strings = []
    while start < end:
        after = start + 1 + packet[start]
        strings.append(packet[start + 1 : after])
        start = after
    need(start == end)
    return tuple(strings)


MX = Kind("MX", 15, _mx)
CNAME = Kind("CNAME", 5, read_name)
A = Kind("A", 1, _ipv4)
AAAA = Kind("AAAA", 28, _ipv6)
TLSA = Kind("TLSA", 52, _tlsa)
TXT = Kind("TXT", 16, _strings)
