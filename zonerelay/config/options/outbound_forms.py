"""How the values of the sending side's options are written: secrets, keys, addresses, header fields.

Each reader takes one line of text and raises ValueError with what to write instead.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from zonerelay.config.options import endpoints
from zonerelay.config.options.wording import did_you_mean, in_words, quoted

PRIORITIES = ("high", "normal", "bulk")
MAX_FIELD = 998  # RFC 5322 2.1.1

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_SELECTOR = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*", re.ASCII)
_REFERENCE = re.compile(r"(?:env|credential):[A-Za-z0-9._-]+", re.ASCII)
_REPLACEMENT = re.compile(r"[^\s<>@,;]*@[^\s<>@,;]+")
_FIELD = re.compile(r"([!-9;-~]{1,70}):[ \t]*([!-~][\t -~]*)")  # its value goes out as it is
_FIELD_NAME = re.compile(r"[!-9;-~]{1,70}", re.ASCII)
# What the relay itself is answerable for, and what cannot be missing.
_OURS = frozenset(("received", "dkim-signature", "from", "date", "return-path"))


def source_name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise ValueError(f"{quoted(text)} is not a name: 1 to 64 letters, digits, dots, dashes, underscores")
    return text


def ip_address(text: str) -> str:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise ValueError(f'{quoted(text)} is not an address: write "192.0.2.7" or "2001:db8::7"') from None
    if address.is_unspecified or address.is_multicast:
        raise ValueError(f"{quoted(text)} is no address that mail can be sent from")
    return str(address)


def next_hops(text: str) -> str:
    for hop in endpoints.split_next_hops(text):
        endpoints.parse_next_hop(hop)
    return text


def secret(text: str) -> str:
    """A reference; see `secrets.read_secret`."""
    if text and not (text.startswith("/") or _REFERENCE.fullmatch(text)):
        # It may be the secret itself, so it is not repeated.
        raise ValueError(
            'does not say where the secret is: write a file ("/etc/zonerelay/name.secret"), "env:NAME" or '
            '"credential:NAME"; a secret itself does not belong into this file'
        )
    return text


def url(text: str) -> str:
    if not text:
        return text
    parts = urlsplit(text)
    loopback = parts.hostname in {"127.0.0.1", "::1", "localhost"}
    if not parts.hostname or parts.scheme not in ({"https", "http"} if loopback else {"https"}):
        raise ValueError(f'{quoted(text)} is not an address for secrets: write "https://…"')
    return text


def selector(text: str) -> str:
    if not _SELECTOR.fullmatch(text):
        raise ValueError(f'{quoted(text)} is not a selector: write what is before "._domainkey": "s2026"')
    return text


def replacement(text: str) -> str:
    if not _REPLACEMENT.fullmatch(text):
        raise ValueError(f'{quoted(text)} is no address: write "user@example.com", or "@example.com"')
    return text


def new_field(text: str) -> str:
    """`Name: value`."""
    found = _FIELD.fullmatch(text)
    if not found or len(text) > MAX_FIELD:
        raise ValueError(f'{quoted(text)} is not a header field: write "Name: value", in ASCII, on one line')
    _not_ours(found[1])
    return text


def field_name(text: str) -> str:
    if not _FIELD_NAME.fullmatch(text):
        raise ValueError(f'{quoted(text)} is not the name of a header field: write "X-Mailer"')
    _not_ours(text)
    return text


def priority(text: str) -> str:
    if text not in PRIORITIES:
        near = did_you_mean(text, PRIORITIES)
        raise ValueError(f"must be {in_words(PRIORITIES, 'or')}, not {quoted(text)}{near}")
    return text


def date(value: object) -> float:
    """A TOML date or date with time and zone; Unix time."""
    if isinstance(value, datetime.datetime):
        if value.tzinfo is None:
            raise ValueError(f"{value} has no time zone: write {value.isoformat()}Z for UTC")
        return value.timestamp()
    if isinstance(value, datetime.date):
        return datetime.datetime(value.year, value.month, value.day, tzinfo=datetime.UTC).timestamp()
    if value == "":
        return 0.0
    raise ValueError("expected a date without quotes, such as 2026-03-01 or 2026-03-01T12:00:00Z")


def date_text(when: float) -> str:
    """As it is written in the file."""
    return datetime.datetime.fromtimestamp(when, datetime.UTC).isoformat() if when else '""'


def _not_ours(name: str, ours: Sequence[str] | frozenset[str] = _OURS) -> None:
    if name.lower() in ours:
        raise ValueError(f"{quoted(name)} is not for a rule to change: the relay or the standard needs it")
