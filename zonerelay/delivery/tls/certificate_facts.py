"""Reads a certificate's public key and fingerprint, and matches its names.

Names are compared as RFC 6125 says: without regard to case; a wildcard stands for one whole label on the
left, above a name with two labels at least. The public key is taken out of the DER unchanged, because TLSA
records are about those octets, for any kind of key. Raises ValueError for octets that are no certificate.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable, Mapping
from typing import Any

MAX_NAMES_SHOWN = 5

_SEQUENCE = 0x30
_VERSION = 0xA0


def fingerprint(der: bytes) -> str:
    return hashlib.sha256(der).hexdigest()


def public_key(der: bytes) -> bytes:
    """Returns the SubjectPublicKeyInfo: the seventh field of the signed part (RFC 5280 4.1), if it has a
    version.
    """
    _, start, end = _element(der, 0, len(der), expected=_SEQUENCE)
    _, at, last = _element(der, start, end, expected=_SEQUENCE)
    tag, _, after = _element(der, at, last)
    if tag == _VERSION:
        at = after
    for _ in range(5):  # serial number, signature algorithm, issuer, validity, subject
        _, _, at = _element(der, at, last)
    _, _, after = _element(der, at, last, expected=_SEQUENCE)
    return der[at:after]


def is_sequence(der: bytes) -> bool:
    """True when the octets are exactly one DER SEQUENCE, as keys and certificates are."""
    try:
        _, _, end = _element(der, 0, len(der), expected=_SEQUENCE)
    except ValueError:
        return False
    return end == len(der)


def shown_names(names: Iterable[str]) -> str:
    """Returns the names for a deferral's text."""
    known = list(names)
    if not known:
        return "no name"
    more = f" and {len(known) - MAX_NAMES_SHOWN} more" if len(known) > MAX_NAMES_SHOWN else ""
    return ", ".join(known[:MAX_NAMES_SHOWN]) + more


# `Any` stands for the nested tuples of `ssl.SSLSocket.getpeercert`, which typeshed does not describe either.
def names_in(described: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns DNS names and addresses of a certificate that the `ssl` module has verified and parsed."""
    return tuple(
        value.lower().rstrip(".") if kind == "DNS" else value
        for kind, value in described.get("subjectAltName", ())
        if kind in ("DNS", "IP Address")
    )


def matching_name(wanted: Iterable[str], names: Iterable[str]) -> str | None:
    """Returns the first of the wanted names that the certificate covers. `*.example.com` matches any name
    below it.
    """
    known = list(names)
    for each in wanted:
        if any(_fits(each.lower().rstrip("."), name) for name in known):
            return each
    return None


def _fits(wanted: str, name: str) -> bool:
    if wanted == name:
        return True
    if wanted.startswith("*."):
        return name.endswith(wanted[1:])
    if name.startswith("*."):
        first, _, rest = wanted.partition(".")
        return bool(first) and rest == name[2:] and "." in rest and not rest[-1:].isdigit()  # no address
    return _same_address(wanted, name)


def _same_address(one: str, other: str) -> bool:
    """Compares IPv6 addresses, which OpenSSL writes in full."""
    if ":" not in one or ":" not in other:
        return False
    try:
        return ipaddress.ip_address(one) == ipaddress.ip_address(other)
    except ValueError:
        return False


def _element(der: bytes, at: int, limit: int, *, expected: int | None = None) -> tuple[int, int, int]:
    """Returns the tag, and the start and end of the content, of the DER element at `at`. Raises
    ValueError.
    """
    if at + 2 > limit:
        raise ValueError("the certificate is cut short")
    tag, length, start = der[at], der[at + 1], at + 2
    if length & 0x80:
        octets = length & 0x7F
        if not 1 <= octets <= 4 or start + octets > limit:
            raise ValueError("the certificate is no DER")
        length = int.from_bytes(der[start : start + octets], "big")
        start += octets
    if start + length > limit or expected not in (None, tag):
        raise ValueError("the certificate is no DER")
    return tag, start, start + length
