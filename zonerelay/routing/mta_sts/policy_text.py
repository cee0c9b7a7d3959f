"""MTA-STS (RFC 8461) as texts and values: the TXT record, the policy, and the hosts that it allows. Pure.

A record or a policy that breaks the RFC's syntax counts as none. The ValueError says why, in words for logs
that quote no more than a few characters. Unknown fields are skipped, as later versions need.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from dataclasses import dataclass

from zonerelay.routing.idna import ascii_domain

VERSION = "STSv1"
MAX_LIFE = 31_557_600
"""Seconds (RFC 8461 3.2); the limit of a longer `max_age`."""
MIN_LIFE = 60.0
"""Seconds for which any policy is used, so that one with `max_age` 0 is not fetched for every message."""
REFRESH_AGE = 86_400.0
MAX_PATTERNS = 50
MAX_POLICY = 64 * 1024
"""Octets of a policy; RFC 8461 3.3 suggests this limit."""

_RECORD = re.compile(r"v=STSv1[ \t]*;")
_RECORD_FIELD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}=[!-:<>-~]+", re.ASCII)
_ID = re.compile(r"[A-Za-z0-9]{1,32}", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,10}", re.ASCII)
_SHOWN = 40


class StsMode(enum.StrEnum):
    ENFORCE = "enforce"
    TESTING = "testing"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class StsPolicy:
    """`patterns` are in lower-case ASCII: `mx.example.com`, `*.example.com` (one label)."""

    mode: StsMode
    patterns: tuple[str, ...]
    max_age: int

    def allows(self, host: str) -> bool:
        """True when an MX host, an ASCII name in lower case, is in the policy (RFC 8461 4.1)."""
        first, _, parent = host.partition(".")
        return host in self.patterns or (bool(first and parent) and f"*.{parent}" in self.patterns)


@dataclass(frozen=True, slots=True)
class HeldPolicy:
    """A domain's policy, fetched at a Unix time; `id` is that of the TXT record at that time."""

    domain: str
    id: str
    policy: StsPolicy
    fetched: float

    @property
    def expires(self) -> float:
        return self.fetched + max(self.policy.max_age, MIN_LIFE)

    @property
    def refresh_from(self) -> float:
        """Returns the Unix time at which the policy is a day old, or half its life (RFC 8461 10.2 suggests
        the day).
        """
        return self.fetched + min(REFRESH_AGE, (self.expires - self.fetched) / 2)


def record_id(texts: Iterable[str]) -> str:
    """Returns the id in the TXT records of `_mta-sts.DOMAIN`, `""` when they say that there is no policy."""
    records = [text for text in texts if _RECORD.match(text)]
    if len(records) != 1:
        return ""  # RFC 8461 3.1: more than one is none
    ids = []
    for part in records[0].split(";")[1:]:
        field = part.strip(" \t")
        if field.startswith("id="):
            ids.append(field.removeprefix("id="))
        elif field and not _RECORD_FIELD.fullmatch(field):
            return ""
    return ids[0] if len(ids) == 1 and _ID.fullmatch(ids[0]) else ""


def parse_policy(body: bytes) -> StsPolicy:
    """Returns the policy in a file's octets. Raises ValueError."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError:
        raise ValueError("the policy is no text in UTF-8") from None
    fields: dict[str, str] = {}
    patterns: list[str] = []
    for line in text.replace("\r\n", "\n").split("\n"):
        key, value = _field(line)
        if key == "mx":
            patterns.append(_pattern(value))
        elif key:
            fields.setdefault(key, value)  # of repeated ones the first counts
    if fields.get("version") != VERSION:
        raise ValueError(f"the policy does not say version: {VERSION}")
    mode = _mode(fields.get("mode", ""))
    if mode is not StsMode.NONE and not patterns:
        raise ValueError("the policy names no mx")
    if len(patterns) > MAX_PATTERNS:
        raise ValueError(f"the policy names more than {MAX_PATTERNS} mx")
    return StsPolicy(mode, tuple(dict.fromkeys(patterns)), _max_age(fields.get("max_age", "")))


def _field(line: str) -> tuple[str, str]:
    """Returns key and value, `("", "")` for an empty line."""
    if not line.strip(" \t"):
        return "", ""
    key, colon, value = line.partition(":")
    if not colon:
        raise ValueError(f"the policy has a line that is no field: {_shown(line)}")
    return key.strip(" \t"), value.strip(" \t")


def _mode(text: str) -> StsMode:
    try:
        return StsMode(text)
    except ValueError:
        raise ValueError(f"the policy has no mode that is known: {_shown(text)}") from None


def _max_age(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"the policy has no max_age: {_shown(text)}")
    return min(int(text), MAX_LIFE)


def _pattern(text: str) -> str:
    try:
        name = ascii_domain(text.removeprefix("*."))
    except ValueError:
        raise ValueError(f"the policy has an mx that is no host: {_shown(text)}") from None
    return f"*.{name}" if text.startswith("*.") else name


def _shown(text: str) -> str:
    return repr(text[:_SHOWN])
