"""Creates DKIM-Signature fields (RFC 6376, RFC 8301, RFC 8463): relaxed/relaxed, one for each key. No I/O.

The signature covers (RFC 6376 5.4.1) what a reader sees or a program acts on. A field that is named in h=
once more than it occurs cannot be added afterwards, or be put on top of the signed one ("oversigned"):

- always for the fields that every reader shows (`_ALWAYS`), present or not;
- when present for the fields that lists and gateways add where they are missing (`_WHEN_PRESENT`);
- never for the List-* and Resent-* fields, of which a list or a resending person adds one more.

Fields that change in transit are not signed: Received, Return-Path, Authentication-Results, and fields
without an effect. There is no `l=` (RFC 6376 8.2) and no `x=`: a queue may hold mail for days.

All functions are pure and may run in any thread. Their time is linear in the header's length.

Hashes a body in DKIM's relaxed form (RFC 6376 3.4.4) while it arrives. No I/O.

The hash does not depend on how the body is cut into pieces; memory holds one piece. The input has CRLF line
ends only, like everything that is stored. `BodyHash` finds the beginning of the body of an arriving message
for `Message.body_hash`: after the first empty line of the message as it is stored, where signers and
verifiers divide it. A message without a header has an empty line in front (`Header.lead`), so all of it is
body; without an empty line there is no body.

Every message that may be signed is hashed, so no work is done per line: whole pieces go through a few
operations on bytes, and bytes that may be the end of a line, or of the body, are held back.
"""

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import msgspec

from zonerelay.message.header import filled
from zonerelay.model.address_list import read_addresses

_INDENT = b" " * 8  # shortens long runs at once, so that few passes are left
_CRLF = b"\r\n"
_BLANK_LINES = 16 * 1024  # blank lines that are hashed at a time


def single_spaces(data: bytes) -> bytes:
    """Replace every run of spaces and tabs by one space, in linear time."""
    if b"\t" in data:
        data = data.replace(b"\t", b" ")
    if b"  " in data:
        data = data.replace(_INDENT, b" ").replace(b"  ", b" ")
        while b"  " in data:
            data = data.replace(b"  ", b" ")
    return data


class RelaxedBody:
    """Computes the relaxed body hash of a message. Call `feed` with the bytes after the empty line, then
    `digest`.
    """

    __slots__ = ("_blank_lines", "_hash", "_is_empty", "_tail")

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._is_empty = True  # so far, but for line ends
        self._blank_lines = 0  # line ends held back: at the end of the body they do not count
        self._tail = b""  # begins a line end, perhaps: at most a space and a CR

    def feed(self, piece: bytes) -> None:
        data = self._tail + piece if self._tail else piece
        if b" " in data or b"\t" in data:  # base64 has neither
            data = single_spaces(data).replace(b" \r\n", _CRLF)
        kept = data.rstrip(b" \r\n")
        if kept:
            if self._blank_lines:
                self._hash_blank_lines()
            self._hash.update(kept)
            self._is_empty = False
        end = data.rfind(b"\n") + 1
        if end > len(kept):
            self._blank_lines += data.count(b"\n", len(kept))
            self._tail = data[end:]
        else:
            self._tail = data[len(kept) :]

    def digest(self) -> str:
        """Return the SHA-256 hash of the body in base64. More may be fed afterwards, and the digest be taken
        again.
        """
        whole = self._hash.copy()
        if not self._is_empty:
            whole.update(_CRLF)  # the last line may lack its end
        return base64.b64encode(whole.digest()).decode("ascii")

    def _hash_blank_lines(self) -> None:
        whole, rest = divmod(self._blank_lines, _BLANK_LINES)
        for _ in range(whole):
            self._hash.update(_CRLF * _BLANK_LINES)
        self._hash.update(_CRLF * rest)
        self._blank_lines = 0


_EMPTY_LINE = b"\r\n\r\n"


class BodyHash(RelaxedBody):
    """Computes the body hash of a whole message. Feed it what follows our own header fields, `Header.lead`
    first.
    """

    __slots__ = ("_header",)

    def __init__(self) -> None:
        super().__init__()
        self._header: bytes | None = _CRLF  # the end of our last field; None once the body has begun

    def feed(self, piece: bytes) -> None:
        if self._header is None:
            super().feed(piece)
            return
        seen = self._header + piece
        end = seen.find(_EMPTY_LINE)
        if end >= 0:
            self._header = None
            super().feed(seen[end + len(_EMPTY_LINE) :])
        else:
            self._header = seen[1 - len(_EMPTY_LINE) :]


WIDTH = 77  # with the blank in front: 78, as RFC 5322 2.1.1 recommends
# The signature names each field, and mail with more fields of one name is invalid.
MAX_SAME_FIELDS = 50

RSA = "rsa-sha256"
ED25519 = "ed25519-sha256"

_ALWAYS = (b"from", b"to", b"cc", b"reply-to", b"subject", b"date")
_WHEN_PRESENT = (
    *(b"sender", b"message-id", b"in-reply-to", b"references"),
    *(b"mime-version", b"content-type", b"content-transfer-encoding"),
    *(b"list-unsubscribe", b"list-unsubscribe-post"),
)
_NOT_OVERSIGNED = (
    *(b"list-id", b"list-help", b"list-subscribe", b"list-post", b"list-owner", b"list-archive"),
    *(b"resent-from", b"resent-sender", b"resent-to", b"resent-cc", b"resent-date", b"resent-message-id"),
)
_ORDER = (*_ALWAYS, *_WHEN_PRESENT, *_NOT_OVERSIGNED)
_SIGNED = frozenset(_ORDER)
_PIECE = 72  # characters of base64 on a line


@dataclass(frozen=True)
class DkimKey:
    """A DKIM key that signs messages. `domain` is d=. `sign` takes the SHA-256 of the header, 32 bytes, and
    returns the bare signature.

    With `slow`, signing takes so long that it should run in a thread.
    """

    domain: str
    selector: str
    algorithm: str
    sign: Callable[[bytes], bytes] = field(repr=False)
    slow: bool = False


class UnsignedField(msgspec.Struct, frozen=True):
    """A DKIM-Signature field without its signature, and the hash (`digest`) that `key` must sign."""

    key: DkimKey
    digest: bytes
    unsigned: bytes

    def signed(self, signature: bytes) -> bytes:
        text = base64.b64encode(signature)
        lines = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
        return self.unsigned + b"\r\n ".join(lines) + b"\r\n"


def unsigned_fields(
    header: bytes, body_hash: str, keys: Sequence[DkimKey], *, now: float
) -> list[UnsignedField]:
    """Create the DKIM-Signature fields to add before `header`, each with its CRLF, still without signatures.

    `header` is the header as it will be sent, without the empty line at its end; `body_hash` comes from
    `RelaxedBody`.
    """
    names, canonical = _signed_fields(header)
    middle = b"\r\n t=%d; bh=%b;\r\n %b\r\n b=" % (now, body_hash.encode("ascii"), _names_tag(names))
    hashed = hashlib.sha256(canonical)
    drafts = []
    # RSA first, because some verifiers evaluate only the first signature and do not support Ed25519.
    for key in sorted(keys, key=lambda key: key.algorithm != RSA):
        unsigned = _first_tags(key.algorithm, key.domain, key.selector) + middle
        whole = hashed.copy()
        whole.update(b"dkim-signature:" + _relaxed(unsigned).partition(b":")[2].strip(b" "))
        drafts.append(UnsignedField(key, whole.digest(), unsigned))
    return drafts


def _relaxed(header: bytes) -> bytes:
    """Unfold the fields, and reduce white space to single spaces (RFC 6376 3.4.2), except around colons and
    at line ends.
    """
    return single_spaces(header.replace(b"\r\n ", b" ").replace(b"\r\n\t", b" "))


def relaxed_fields(header: bytes, names: frozenset[bytes]) -> dict[bytes, list[bytes]]:
    """Return the values of these fields in relaxed form, from top to bottom."""
    found: dict[bytes, list[bytes]] = {}
    for line in _relaxed(header).split(b"\r\n"):
        name, _, value = line.partition(b":")
        name = name.rstrip(b" ").lower()
        if name in names:
            found.setdefault(name, []).append(value.strip(b" "))
    return found


def _signed_fields(header: bytes) -> tuple[tuple[bytes, ...], bytes]:
    """Return the field names for the h= tag, and the fields in relaxed form, from the bottom up (RFC 6376
    5.4.2).
    """
    found = relaxed_fields(header, _SIGNED)
    names: list[bytes] = []
    lines: list[bytes] = []
    for name in _ORDER:
        values = found.get(name, [])[-MAX_SAME_FIELDS:]
        names += [name] * len(values)
        lines += [b"%b:%b\r\n" % (name, value) for value in reversed(values)]
        if name in _ALWAYS or (values and name in _WHEN_PRESENT):
            names.append(name)
    return tuple(names), b"".join(lines)


@lru_cache(maxsize=256)
def _names_tag(names: tuple[bytes, ...]) -> bytes:
    pieces = [f"{name.decode('ascii')}:" for name in names]
    return "\r\n ".join(filled(["h=", *pieces], WIDTH)).encode("ascii")[:-1] + b";"


@lru_cache(maxsize=1024)
def _first_tags(algorithm: str, domain: str, selector: str) -> bytes:
    tags = (f" a={algorithm};", " c=relaxed/relaxed;", f" d={domain};", f" s={selector};")
    return "\r\n ".join(filled(["DKIM-Signature: v=1;", *tags], WIDTH)).encode("ascii")


# Finds the author's domain in From, as signing needs it. No I/O.
#
# The first address counts. The name before it may be in any encoding, or lack the end of a quote. A header
# with two From fields has no author (RFC 5322 3.6), because readers disagree which one to show. A field
# longer than `MAX_FROM` bytes has no author either.

MAX_FROM = 16 * 1024

_FROM = frozenset((b"from",))
_DOMAIN = r"""[^\s"(),:;<>@\\\[\]\ufffd]++"""
_PLAIN = re.compile(rf"""[^"(),:;<>@\\\x1b\ufffd]*+<[^\s"(),:;<>@\\]++@({_DOMAIN})>""")
_BARE = re.compile(rf"""[^\s"(),:;<>@\\]++@({_DOMAIN})""")
# Of an address that is none because of what is before the @.
_LAST = re.compile(rf"@[ \t]*({_DOMAIN})[ \t]*(?:>[^@]*)?\Z")


def author_domain(header: bytes) -> str:
    """Return the domain in the From field as it is written, perhaps in U-labels, or "" if it cannot be
    determined.
    """
    values = relaxed_fields(header, _FROM).get(b"from", ())
    if len(values) != 1 or len(values[0]) > MAX_FROM:
        return ""
    value = values[0].decode("utf-8", "replace")
    plain = _PLAIN.fullmatch(value) or _BARE.fullmatch(value)
    if plain is not None:
        return plain[1]
    for entry in read_addresses(value).entries:
        domain = _LAST.search(f"@{entry.address.rpartition('@')[2]}" if "@" in entry.address else entry.text)
        if domain is not None:
            return domain[1]
    return ""
