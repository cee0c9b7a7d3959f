"""The argument of XCLIENT (Postfix's XCLIENT_README): the client in front of a trusted server.

`parse_xclient` checks everything and changes nothing: what the values mean, and whether the peer may use it,
is for the session to decide. A fault anywhere refuses the whole command with 501 5.5.4, so that a client is
never half replaced. Values are xtext (RFC 3461 4), names and keywords in any case. DESTADDR and DESTPORT
(what the client connected to) are checked and dropped: nothing here is decided by them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from zonerelay.smtp.server import proxy_protocol
from zonerelay.smtp.server.paths import command_error

KEYWORDS = "NAME ADDR PORT PROTO HELO LOGIN DESTADDR DESTPORT"
"""What EHLO lists behind the word XCLIENT."""

MAX_VALUE = 255  # characters of NAME and HELO (XCLIENT_README, note 1), here of every value

_XTEXT = re.compile(r"(?:[!-*,-<>-~]|\+[0-9A-Fa-f]{2})+")
_HEX = re.compile(r"\+([0-9A-Fa-f]{2})")
_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(?:\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*")
_UNAVAILABLE = frozenset({"[UNAVAILABLE]", "[TEMPUNAVAIL]"})


@dataclass(frozen=True, slots=True)
class XClient:
    """The attributes of the command. `None` is not named and stays; `""` (port: 0) is unknown."""

    name: str | None = None
    address: str | None = None
    port: int | None = None
    helo: str | None = None
    login: str | None = None
    protocol: str | None = None  # SMTP or ESMTP


@lru_cache(maxsize=1024)
def parse_xclient(argument: str) -> XClient:
    """`NAME=value ADDR=value …`. Raises CommandError."""
    values: dict[str, str] = {}
    for word in argument.split():
        name, _, value = word.partition("=")
        name = name.upper()
        if name not in _CHECKS or name in values:
            raise command_error(501, "5.4", "Unknown or repeated XCLIENT attribute")
        try:
            values[name] = _checked(name, value)
        except ValueError:
            raise command_error(501, "5.4", f"Bad XCLIENT {name} value") from None
    if not values:
        raise command_error(501, "5.4", "Syntax: XCLIENT attribute=value")
    port = values.get("PORT")
    return XClient(
        name=values.get("NAME"),
        address=values.get("ADDR"),
        port=None if port is None else int(port or 0),
        helo=values.get("HELO"),
        login=values.get("LOGIN"),
        protocol=values.get("PROTO"),
    )


def _checked(name: str, value: str) -> str:
    """The value in its final spelling; raises ValueError."""
    if not _XTEXT.fullmatch(value):
        raise ValueError("not xtext")
    if value.upper() in _UNAVAILABLE and name != "PROTO":
        return ""
    octets = _HEX.sub(lambda match: chr(int(match[1], 16)), value).encode("latin-1")
    text = octets.decode("utf-8")  # its error is a ValueError
    # It ends in logs and header fields.
    if len(text) > MAX_VALUE or not text.isprintable():
        raise ValueError("too long, or a control character")
    return _CHECKS[name](text)


def _host(text: str) -> str:
    # A name that reads as an address would be believed to be one.
    if not _HOST.fullmatch(text) or text.rpartition(".")[2].isdigit():
        raise ValueError("not a host name")
    return text


def _address(text: str) -> str:
    if text[:5].upper() == "IPV6:":
        return proxy_protocol.ipv6(text[5:])
    return proxy_protocol.ipv4(text)


def _port(text: str) -> str:
    return str(proxy_protocol.port(text))


def _protocol(text: str) -> str:
    protocol = text.upper()
    if protocol not in ("SMTP", "ESMTP"):
        raise ValueError("neither SMTP nor ESMTP")
    return protocol


def _as_it_is(text: str) -> str:
    return text


_CHECKS: dict[str, Callable[[str], str]] = {
    "NAME": _host,
    "ADDR": _address,
    "PORT": _port,
    "PROTO": _protocol,
    "HELO": _as_it_is,
    "LOGIN": _as_it_is,
    "DESTADDR": _address,
    "DESTPORT": _port,
}
