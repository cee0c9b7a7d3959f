"""Parses a server's EHLO extensions, and writes the LIMITS and FUTURERELEASE lines of the relay's own EHLO
reply.

Unknown keywords are ignored, and so are values that break the syntax of their RFC: a limit that cannot be
read is no limit.
"""

import re
from datetime import UTC, datetime

import msgspec

from zonerelay.smtp.server.params import MAX_HOLD_FOR

MAX_LIMIT = 999_999  # RFC 9422 4: six digits

_LIMIT = re.compile(r"[1-9][0-9]{0,5}", re.ASCII)
# RFC 9422 3: one wrong word makes the whole parameter void.
_LIMITS = re.compile(r"[A-Z0-9_-]+(?:=[!-:<-~]+)?(?: +[A-Z0-9_-]+(?:=[!-:<-~]+)?)*", re.ASCII | re.IGNORECASE)


class PeerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits on recipients, messages and recipient domains that a server announces with LIMITS (RFC 9422
    4).
    """

    rcptmax: int | None = None
    mailmax: int | None = None
    rcptdomainmax: int | None = None


NO_LIMITS = PeerLimits()
NO_AUTH: frozenset[str] = frozenset()


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The service extensions that a server offers and the relay supports. A server with HELO only has none:
    `Capabilities()`.

    `size` is the largest message in bytes, `None` when the server sets no fixed limit (RFC 1870 4: no SIZE
    keyword, no number, or zero).
    """

    pipelining: bool = False
    size_offered: bool = False
    size: int | None = None
    eight_bit_mime: bool = False
    smtputf8: bool = False
    starttls: bool = False
    chunking: bool = False
    dsn: bool = False
    require_tls: bool = False
    limits: PeerLimits = NO_LIMITS
    auth: frozenset[str] = NO_AUTH
    few_parameters: bool = False
    """True when MAIL and RCPT get only the parameters that the message cannot do without."""


def parse_ehlo(text: str) -> Capabilities:
    """Parse the text of an EHLO reply, whose lines are separated by `\\n`; the first line is the greeting."""
    offered: dict[str, list[str]] = {}
    """The words behind each keyword; those of a keyword on several lines are one list."""
    for line in text.upper().split("\n")[1:]:
        for keyword in (words := line.split())[:1]:
            offered.setdefault(keyword, []).extend(words[1:])
    return Capabilities(
        pipelining="PIPELINING" in offered,
        size_offered="SIZE" in offered,
        size=min(filter(None, map(_size, offered.get("SIZE", ()))), default=None),
        eight_bit_mime="8BITMIME" in offered,
        smtputf8="SMTPUTF8" in offered,
        starttls="STARTTLS" in offered,
        chunking="CHUNKING" in offered,
        dsn="DSN" in offered,
        require_tls="REQUIRETLS" in offered,
        limits=_limits(" ".join(offered["LIMITS"])) if "LIMITS" in offered else NO_LIMITS,
        auth=_mechanisms(offered),
    )


def _mechanisms(offered: dict[str, list[str]]) -> frozenset[str]:
    """Return the SASL mechanisms in the EHLO reply, also in the form of older servers, "AUTH=PLAIN LOGIN"."""
    found = set(offered.get("AUTH", ()))
    for keyword, words in offered.items():
        if keyword.startswith("AUTH="):
            found.update((keyword.removeprefix("AUTH="), *words))
    return frozenset(found - {""})


def _size(parameter: str) -> int | None:
    # RFC 1870 3: at most 20 digits; anything else is no limit that we could honour.
    if not (parameter.isascii() and parameter.isdigit() and len(parameter) <= 20):
        return None
    return int(parameter) or None


def _limits(parameters: str) -> PeerLimits:
    if not _LIMITS.fullmatch(parameters):
        return NO_LIMITS
    least: dict[str, int] = {}
    for word in parameters.split():
        name, _, value = word.partition("=")
        # Of two values the stricter one counts: it does no harm.
        if _LIMIT.fullmatch(value):
            least[name] = min(int(value), least.get(name, MAX_LIMIT))
    return PeerLimits(
        rcptmax=least.get("RCPTMAX"), mailmax=least.get("MAILMAX"), rcptdomainmax=least.get("RCPTDOMAINMAX")
    )


def limits_line(rcpt_max: int) -> str:
    """Return the LIMITS line of the EHLO reply, such as `LIMITS RCPTMAX=1000`."""
    return f"LIMITS RCPTMAX={min(rcpt_max, MAX_LIMIT)}"


def future_release_line(max_hold_seconds: float, now: float) -> str:
    """Return the FUTURERELEASE line of the EHLO reply, `FUTURERELEASE 604800 2030-01-31T09:00:00Z` (RFC 4865
    3): the longest interval and the latest time.

    It is for submission only: RFC 4865 4.2 does not want it offered to other servers. `now` is Unix time.
    """
    interval = min(int(max_hold_seconds), MAX_HOLD_FOR)
    latest = datetime.fromtimestamp(int(now) + interval, UTC)
    return f"FUTURERELEASE {interval} {latest:%Y-%m-%dT%H:%M:%SZ}"
