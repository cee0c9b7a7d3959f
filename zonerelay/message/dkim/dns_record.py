"""Writes and checks the DNS record of a DKIM public key (RFC 6376 3.6.1, RFC 8463 4.2).

No record makes it fail. The domain's owner has to correct the record, so every finding says what is there and
what should be.
"""

from __future__ import annotations

import base64
import binascii
import enum
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zonerelay.message.dkim.keys import PrivateKey
from zonerelay.message.dkim.signature import RSA

MAX_STRING = 255  # RFC 1035 3.3: bytes of one character-string of a TXT record


class RecordStatus(enum.StrEnum):
    """The result of comparing a key with its DNS record."""

    OK = "ok"
    MISSING = "missing"
    MISMATCH = "mismatch"
    REVOKED = "revoked"
    TESTING = "testing"
    SEVERAL = "several"
    MALFORMED = "malformed"
    WILDCARD = "wildcard"
    UNKNOWN = "unknown"


class RecordFinding(NamedTuple):
    """The state of a key's DNS record, with a description of the problem."""

    status: RecordStatus
    detail: str = ""


def record_name(selector: str, domain: str) -> str:
    return f"{selector}._domainkey.{domain}"


def record_text(key: PrivateKey) -> str:
    return f"v=DKIM1; k={_kind(key)}; p={base64.b64encode(key.public).decode('ascii')}"


def strings(record: str) -> list[str]:
    """Split a long TXT record as a zone file needs it. Readers join the strings without a space."""
    return [record[at : at + MAX_STRING] for at in range(0, len(record), MAX_STRING)]


def judge(texts: Sequence[str], key: PrivateKey) -> RecordFinding:
    """Compare the TXT records at the key's name with the key."""
    return next(_findings(texts, key), RecordFinding(RecordStatus.OK))


def _findings(texts: Sequence[str], key: PrivateKey) -> Iterator[RecordFinding]:
    """Yield what is wrong with the records. The first finding is enough."""
    if not texts:
        yield RecordFinding(RecordStatus.MISSING, "there is no TXT record; publish it")
        return
    if len(texts) > 1:
        detail = f"there are {len(texts)} TXT records, and verifiers use any one of them; remove all but one"
        yield RecordFinding(RecordStatus.SEVERAL, detail)
    if (tags := _tags(texts[0])) is None:
        yield RecordFinding(RecordStatus.MALFORMED, "is not a tag list such as v=DKIM1; k=rsa; p=…")
        return
    kind, ours = tags.get("k", "rsa").lower(), _kind(key)
    version_is_first = next(iter(tags)) == "v" or "v" not in tags
    if tags.get("v", "DKIM1") != "DKIM1" or not version_is_first:
        exactly = "v=DKIM1 must be the first tag, in exactly this form"
        yield RecordFinding(RecordStatus.MALFORMED, exactly)
    if "p" not in tags:
        yield RecordFinding(RecordStatus.MALFORMED, "has no p=, the public key")
    if not (public := tags.get("p", "")):
        yield RecordFinding(RecordStatus.REVOKED, "p= is empty: this key has been revoked")
    if kind != ours:
        yield RecordFinding(RecordStatus.MISMATCH, f"k={kind}, but the key is {ours}")
    if _octets(public) != key.public:
        remedy = "publish the public key of this file, or use the file of that key"
        yield RecordFinding(RecordStatus.MISMATCH, f"p= contains another key; {remedy}")
    if "sha256" not in _list(tags.get("h", "sha256")):
        unsuitable = "h= does not allow sha256, which the signatures use"
        yield RecordFinding(RecordStatus.MALFORMED, unsuitable)
    if not {"*", "email"} & set(_list(tags.get("s", "*"))):
        yield RecordFinding(RecordStatus.MALFORMED, "s= does not allow email")
    if "y" in _list(tags.get("t", "")):
        testing = "t=y tells verifiers to treat mail as unsigned; remove it"
        yield RecordFinding(RecordStatus.TESTING, testing)


def _kind(key: PrivateKey) -> str:
    return "rsa" if key.algorithm == RSA else "ed25519"


def _tags(record: str) -> dict[str, str] | None:
    """Parse a tag list (RFC 6376 3.2). Return `None` if it is invalid or repeats a tag."""
    tags: dict[str, str] = {}
    for part in record.rstrip().removesuffix(";").split(";"):
        name, equals, value = part.partition("=")
        name = name.strip()
        if not equals or not name or name in tags:
            return None
        tags[name] = "".join(value.split())
    return tags


def _list(value: str) -> list[str]:
    return [each.lower() for each in value.split(":")]


def _octets(value: str) -> bytes | None:
    try:
        return base64.b64decode(value, validate=True)
    except (ValueError, binascii.Error):
        return None
