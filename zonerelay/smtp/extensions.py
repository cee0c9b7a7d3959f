"""What a server offers, from the text of its EHLO reply. Unknown keywords are ignored."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The service extensions we know. A server that only knows HELO has none: `Capabilities()`.

    `size` is the largest message in octets, `None` when the server sets no fixed limit
    (RFC 1870 4: no SIZE keyword, no number, or zero).
    """

    pipelining: bool = False
    size_offered: bool = False
    size: int | None = None
    eight_bit_mime: bool = False
    smtputf8: bool = False
    starttls: bool = False
    chunking: bool = False
    dsn: bool = False
    enhanced_status_codes: bool = False


def parse_ehlo(text: str) -> Capabilities:
    """`text` is the reply's text, lines separated by `\\n`; the first is the greeting, not a keyword."""
    offered: dict[str, str] = {}
    for line in text.split("\n")[1:]:
        keyword, _, parameters = line.strip().partition(" ")
        offered[keyword.upper()] = parameters.strip()
    return Capabilities(
        pipelining="PIPELINING" in offered,
        size_offered="SIZE" in offered,
        size=_size(offered.get("SIZE", "")),
        eight_bit_mime="8BITMIME" in offered,
        smtputf8="SMTPUTF8" in offered,
        starttls="STARTTLS" in offered,
        chunking="CHUNKING" in offered,
        dsn="DSN" in offered,
        enhanced_status_codes="ENHANCEDSTATUSCODES" in offered,
    )


def _size(parameter: str) -> int | None:
    # RFC 1870 3: at most 20 digits; anything else is no limit that we could honour.
    if not (parameter.isascii() and parameter.isdigit() and len(parameter) <= 20):
        return None
    return int(parameter) or None
