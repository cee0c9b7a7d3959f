"""Implements DANE for SMTP (RFC 7672 3): selects TLSA records and compares them with a server's certificate.

DANE-TA(2) and DANE-EE(3) are used. The usages that need public authorities are not for SMTP (3.1.3), and
malformed records are ignored. Of several digests of the same kind only the strongest is used (RFC 7671 9).

- DANE-EE: the server's own certificate or key is the one in the record. Its names and dates do not matter
  (3.1.1).
- DANE-TA: the certificate chain leads to the authority in the record, which the server has to send unless the
  record holds the complete certificate. Dates are checked, and one of the names must match (3.2.2).

No I/O, no clock. `verify` raises UntrustedCertificateError with the reason for an operator.
"""

import hashlib
import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zonerelay.delivery.peer import UntrustedCertificateError
from zonerelay.routing.dns.answers import TlsaRecord

# Reads a certificate's public key and fingerprint, and matches its names.
#
# Names are compared as in RFC 6125: case-insensitively, and a wildcard stands for one whole label on the
# left, above a name with at least two labels. The public key is copied from the DER unchanged, because TLSA
# records are about those bytes, for any kind of key. ValueError is raised for bytes that are not a
# certificate.

MAX_NAMES_SHOWN = 5

_SEQUENCE = 0x30
_VERSION = 0xA0


def fingerprint(der: bytes) -> str:
    return hashlib.sha256(der).hexdigest()


def public_key(der: bytes) -> bytes:
    """Return the SubjectPublicKeyInfo of a certificate in DER (RFC 5280 4.1)."""
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
    """Return whether the bytes are exactly one DER SEQUENCE, as keys and certificates are."""
    try:
        _, _, end = _element(der, 0, len(der), expected=_SEQUENCE)
    except ValueError:
        return False
    return end == len(der)


def shown_names(names: Iterable[str]) -> str:
    """Format host names for the reply of a deferral, with at most `MAX_NAMES_SHOWN` of them."""
    known = list(names)
    if not known:
        return "no name"
    more = f" and {len(known) - MAX_NAMES_SHOWN} more" if len(known) > MAX_NAMES_SHOWN else ""
    return ", ".join(known[:MAX_NAMES_SHOWN]) + more


# `Any` stands for the nested tuples of `ssl.SSLSocket.getpeercert`, which typeshed does not describe either.
def names_in(described: Mapping[str, Any]) -> tuple[str, ...]:
    """Return DNS names and addresses of a certificate that the `ssl` module has verified and parsed."""
    return tuple(
        value.lower().rstrip(".") if kind == "DNS" else value
        for kind, value in described.get("subjectAltName", ())
        if kind in ("DNS", "IP Address")
    )


def matching_name(wanted: Iterable[str], names: Iterable[str]) -> str | None:
    """Return the first of the wanted names that the certificate covers. `*.example.com` matches any name one
    label below it.
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
    """Return whether two strings are the same IPv6 address, although they may be written differently."""
    if ":" not in one or ":" not in other:
        return False
    try:
        return ipaddress.ip_address(one) == ipaddress.ip_address(other)
    except ValueError:
        return False


def _element(der: bytes, at: int, limit: int, *, expected: int | None = None) -> tuple[int, int, int]:
    """Return the tag, and the start and end of the content, of the DER element at `at`. Raise ValueError."""
    if at + 2 > limit:
        raise ValueError("the certificate is truncated")
    tag, length, start = der[at], der[at + 1], at + 2
    if length & 0x80:
        octets = length & 0x7F
        if not 1 <= octets <= 4 or start + octets > limit:
            raise ValueError("the certificate is not valid DER")
        length = int.from_bytes(der[start : start + octets], "big")
        start += octets
    if start + length > limit or expected not in (None, tag):
        raise ValueError("the certificate is not valid DER")
    return tag, start, start + length


MAX_CHAIN = 16
"""Certificates of a server's chain that are examined."""
MAX_RECORDS = 32
"""Usable records of one host that are examined."""
MAX_KEYS = 4
"""Complete keys of authorities that are examined, each with all certificates of the chain."""

DANE_TA, DANE_EE = 2, 3
_CERTIFICATE, _KEY = 0, 1
_FULL, _SHA256, _SHA512 = 0, 1, 2
_DIGEST_SIZES = {_SHA256: 32, _SHA512: 64}


def usable(records: Sequence[TlsaRecord]) -> tuple[TlsaRecord, ...]:
    """Return the TLSA records to compare with a certificate: usable ones with full data or the strongest
    digest.
    """
    sound = [record for record in records if _is_usable(record)]
    strongest: dict[tuple[int, int], int] = {}
    for record in sound:
        kind = (record.usage, record.selector)
        strongest[kind] = max(record.matching, strongest.get(kind, _FULL))
    counting = [r for r in sound if r.matching in (_FULL, strongest[r.usage, r.selector])]
    return tuple(counting[:MAX_RECORDS])


def verify(chain: Sequence[bytes], records: Sequence[TlsaRecord], names: Sequence[str], *, now: float) -> str:
    """Verify a certificate chain with TLSA records, and return which of `names` matched, or `""` if none is
    required.

    `chain` is DER, the server's own certificate first. `records` are usable ones. Raise
    UntrustedCertificateError.
    """
    if not chain:
        raise UntrustedCertificateError("the server presented no certificate")
    chain = chain[:MAX_CHAIN]
    if any(record.usage == DANE_EE and _matches(chain[0], record) for record in records):
        return ""
    authorities = [record for record in records if record.usage == DANE_TA]
    if not authorities:
        raise UntrustedCertificateError(_mismatch(chain[0], records))
    return _verify_by_authority(chain, authorities, names, now=now)


def _verify_by_authority(
    chain: Sequence[bytes], records: Sequence[TlsaRecord], names: Sequence[str], *, now: float
) -> str:
    # Its libraries take 9 MB, which only a relay with such peers should need.
    from zonerelay.delivery.tls import chains  # noqa: PLC0415

    anchors = [each for record in records for each in _anchors(chain, record)]
    # The server need not send the authority: a certificate that its key has signed is sufficient proof.
    keys = [each.data for each in records if (each.selector, each.matching) == (_KEY, _FULL)]
    anchors += [der for key in keys[:MAX_KEYS] for der in chain if chains.is_signed_by(der, key)]
    if not anchors:
        raise UntrustedCertificateError(
            "the server did not present the certificate of the authority in the TLSA records "
            f"({_shown(records)})"
        )
    chains.verify(chain, list(dict.fromkeys(anchors)), now=now)
    presented = chains.names(chain[0])
    fitting = matching_name(names, presented)
    if fitting is None:
        raise UntrustedCertificateError(
            f"its certificate is for {shown_names(presented)}, not for {' or '.join(dict.fromkeys(names))}"
        )
    return fitting


def _anchors(chain: Sequence[bytes], record: TlsaRecord) -> list[bytes]:
    """Return the certificates that a DANE-TA record designates as trust anchors."""
    if (record.selector, record.matching) == (_CERTIFICATE, _FULL):
        return [record.data]  # the server need not send it
    return [der for der in chain if _matches(der, record)]


def _is_usable(record: TlsaRecord) -> bool:
    if record.usage not in (DANE_TA, DANE_EE) or record.selector not in (_CERTIFICATE, _KEY):
        return False
    if record.matching != _FULL:
        return len(record.data) == _DIGEST_SIZES.get(record.matching, -1)
    is_readable = record.selector == _KEY or _association(record.data, _KEY, _FULL) is not None
    return is_readable and is_sequence(record.data)


def _matches(der: bytes, record: TlsaRecord) -> bool:
    return _association(der, record.selector, record.matching) == record.data


def _association(der: bytes, selector: int, matching: int) -> bytes | None:
    """Return the association data of a certificate for a TLSA selector and matching type, or None if it is
    invalid.
    """
    try:
        selected = der if selector == _CERTIFICATE else public_key(der)
    except ValueError:
        return None
    if matching == _FULL:
        return selected
    return hashlib.new("sha256" if matching == _SHA256 else "sha512", selected).digest()


def _mismatch(leaf: bytes, records: Sequence[TlsaRecord]) -> str:
    ours = _association(leaf, _KEY, _SHA256)
    should = f': "3 1 1 {ours.hex()}" would' if ours else ""
    return f"none of the TLSA records ({_shown(records)}) matches the server's certificate{should}"


def _shown(records: Sequence[TlsaRecord]) -> str:
    kinds = dict.fromkeys(f"{record.usage} {record.selector} {record.matching}" for record in records)
    return ", ".join(kinds)
