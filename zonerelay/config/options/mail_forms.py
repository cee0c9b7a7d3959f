"""How the words of mail are written in the configuration: domains, header fields, address patterns, replies.

Each reader takes one line of text, which is not empty, and raises ValueError with what to write instead.
"""

from __future__ import annotations

import ipaddress
import re

from zonerelay.config.options import endpoints
from zonerelay.config.options.wording import quoted

_HEADER = re.compile(r"[!-9;-~]+(?::.*)?", re.ASCII)  # RFC 5322 2.2: a field name is printable ASCII but ":"
_PATTERN = re.compile(r"[^\s<>@]*@[^\s<>@]+|<>", re.ASCII)
_STATUS = r"[0-9]{1,3}\.[0-9]{1,3}"
# A status of another class than the code's (RFC 3463 2), or one without a text, is no text.
_REPLY = re.compile(rf"([45])[0-9][0-9] (?:\1\.{_STATUS} )?(?![245]\.{_STATUS}(?: |$))[!-~][ -~]*", re.ASCII)

# RFC 5322 3.6, and what signs or proves.
_NEEDED = frozenset(
    (
        *("from", "sender", "reply-to", "to", "cc", "bcc", "subject", "date", "comments", "keywords"),
        *("message-id", "in-reply-to", "references", "received", "return-path", "delivered-to"),
        *("mime-version", "authentication-results", "dkim-signature"),
    )
)
_NEEDED_STARTS = ("resent-", "content-", "list-", "arc-")

MAX_FIELD_NAME = 70
MAX_REPLY = 400  # RFC 5321 4.5.3.1.5 gives a reply line 512 octets


def domain(text: str) -> str:
    """`example.com`, `*.example.com` or `*`. Names beyond ASCII are the router's to convert."""
    text = text.lower()
    name = text.removeprefix("*.")
    if "@" in text:
        raise ValueError(
            f"{quoted(text)} is an address: write the domain alone, {quoted(text.rpartition('@')[2])}"
        )
    if text != "*" and name.isascii() and not endpoints.is_ehlo_name(name):
        raise ValueError(_no_domain(text))
    return text


def _no_domain(text: str) -> str:
    try:
        literal = endpoints.address_literal(ipaddress.ip_address(text))
    except ValueError:
        return f'{quoted(text)} is not a domain: write "example.com", or "*.example.com" for all below it'
    return f"{quoted(text)} is not a domain: an address goes in brackets, {quoted(literal)}"


def header(text: str) -> str:
    if not _HEADER.fullmatch(text):
        raise ValueError(
            f'{quoted(text)} is not a header condition: write "Name" or "Name: part of its value"'
        )
    return text


def field_name(text: str) -> str:
    """A field that the relay takes out of messages: one that nobody else needs."""
    if ":" in text or len(text) > MAX_FIELD_NAME or not _HEADER.fullmatch(text):
        raise ValueError(f'{quoted(text)} is not the name of a header field: write "X-Sending-Zone"')
    if text.lower() in _NEEDED or text.lower().startswith(_NEEDED_STARTS):
        raise ValueError(
            f'{quoted(text)} is a field that mail needs, and it would be removed: write "X-Sending-Zone"'
        )
    return text


def address_pattern(text: str) -> str:
    if "@" not in text and text != "<>":
        return domain(text)
    if not _PATTERN.fullmatch(text):
        raise ValueError(
            f'{quoted(text)} is not an address pattern: write "user@example.com", "example.com", '
            '"*.example.com", "bounce-*@example.com" or "<>"'
        )
    return text


def reply(text: str) -> str:
    if len(text) > MAX_REPLY:
        raise ValueError(f"a reply has at most {MAX_REPLY} characters, this one {len(text)}")
    if not _REPLY.fullmatch(text):
        raise ValueError(
            f"{quoted(text)} is not a refusal: write a code from 400 to 599, a status of the same class (or "
            'none) and a text in ASCII, as in "550 5.7.1 Ask postmaster@example.org"'
        )
    return text
