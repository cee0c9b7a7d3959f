"""Parses the header of HAProxy's PROXY protocol (versions 1 and 2), which a load balancer sends before a
client's first byte. Sans-IO.

Owns the bytes until the header is whole; what follows it is `rest`, and may be TLS already. Anything that is
not exactly a header is a `ProxyFault`, with a text for the operator: the connection is to be closed without a
word, since the client at its other end is unknown.

Policy, where the specification leaves room:

- A header that names no client is good: LOCAL (the balancer's own health check), UNKNOWN, UNSPEC, a Unix
  socket. Its `address` is `""`: such a client is not known, so it may nothing that its address would have to
  allow. Above all the balancer's own address must not stand in for it.
- Datagrams are refused: SMTP does not come in them.
- What follows the addresses (TLVs, the checksum among them) is skipped.

Memory: at most `MAX_HEADER` bytes plus what one `feed` brought.
"""

import ipaddress
import re
import struct
from collections.abc import Callable
from functools import lru_cache

import msgspec

from zonerelay.smtp.server.commands import TLS_HELLO
from zonerelay.smtp.server.paths import command_error

# Parses a client's address in a PROXY header or XCLIENT into the one spelling used everywhere.
#
# Strict: leading zeros, scopes, missing parts raise ValueError, because what comes out of here decides who
# may relay. An IPv4 address that is mapped into IPv6 is an IPv4 address, as it is for clients on a
# dual-stack socket.

_PORT = re.compile(r"0|[1-9][0-9]{0,4}", re.ASCII)


def canonical(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(address)


def ipv4(text: str) -> str:
    return canonical(ipaddress.IPv4Address(text))


def ipv6(text: str) -> str:
    if "%" in text:
        raise ValueError("an IPv6 scope id is valid only on its own machine")
    return canonical(ipaddress.IPv6Address(text))


def port(text: str) -> int:
    """Parse a port number of at most 65535, which must not have leading zeros."""
    if not _PORT.fullmatch(text) or int(text) > 65535:
        raise ValueError("not a port number")
    return int(text)


MAX_LINE = 107  # bytes with CRLF, version 1
MAX_HEADER = 2048  # bytes, version 2: addresses need 232, a balancer's notes on TLS a few hundred

SIGNATURE = b"\r\n\r\n\0\r\nQUIT\n"
_BEGINNING = b"PROXY "
_VERBS = frozenset((b"EHLO", b"HELO", b"MAIL", b"RCPT", b"DATA", b"RSET", b"NOOP", b"QUIT", b"AUTH"))
_FIXED = 16  # bytes of version 2 up to the addresses

_LOCAL, _PROXY = 0x0, 0x1
_STREAM = 0x1
# By family (unspecified, IPv4, IPv6, Unix): source and destination address, source and destination port.
_ADDRESSES = [struct.Struct(form) for form in ("", "!4s4sHH", "!16s16sHH", "216x")]


class ProxyFault(Exception):
    """The bytes at the beginning of a connection are not a valid PROXY header."""


class ProxyHeader(msgspec.Struct, frozen=True):
    """The client named by a PROXY header, or `("", 0)` if the header names none."""

    address: str
    port: int


_NOBODY = ProxyHeader("", 0)


def looks_like_proxy(data: bytes) -> bool:
    """Return whether the first bytes of a connection are a PROXY header; from an unlisted peer this is
    spoofing.
    """
    return data.startswith((_BEGINNING, SIGNATURE))


class ProxyReader:
    """Reads a PROXY header incrementally. Call `feed` until it returns a header; then `rest` has the bytes
    after it.
    """

    __slots__ = ("_buffer", "rest")

    def __init__(self) -> None:
        self._buffer = b""
        self.rest = b""

    def feed(self, data: bytes) -> ProxyHeader | None:
        """Process received bytes, and return the header when it is complete. Raise ProxyFault if the bytes
        are not a header.
        """
        buffer = self._buffer = self._buffer + data
        if _agree(buffer, _BEGINNING):
            return self._read_line(buffer)
        if _agree(buffer, SIGNATURE):
            return self._read_binary(buffer)
        raise ProxyFault(f"no PROXY header: the connection begins with {_kind_of(buffer)}")

    def _read_line(self, buffer: bytes) -> ProxyHeader | None:
        end = buffer.find(b"\r\n", 0, MAX_LINE)
        line = buffer[:MAX_LINE] if end < 0 else buffer[:end]
        # The last byte may be the CR of a line end that is still on its way.
        if b"\n" in line or b"\r" in (line if end >= 0 else line[:-1]):
            raise ProxyFault("PROXY header: a bare CR or LF in the line")
        if end < 0:
            if len(buffer) >= MAX_LINE:
                raise ProxyFault(f"PROXY header: the line is longer than {MAX_LINE} bytes")
            return None
        return self._done(_parse_line(line), end + 2)

    def _read_binary(self, buffer: bytes) -> ProxyHeader | None:
        end = _binary_end(buffer)
        if end is None or len(buffer) < end:
            return None
        return self._done(_parse_binary(buffer[:end]), end)

    def _done(self, header: ProxyHeader, end: int) -> ProxyHeader:
        self.rest = self._buffer[end:]
        self._buffer = b""
        return header


def _kind_of(buffer: bytes) -> str:
    """Describe the first bytes of a connection that are not a PROXY header, without quoting the client's
    text.
    """
    verb = buffer[:8].split(maxsplit=1)[:1]
    if buffer.startswith(TLS_HELLO):
        return "a TLS handshake"
    if verb and verb[0].upper() in _VERBS:
        return f"{verb[0].upper().decode()}, an SMTP command"
    return "something else"


def _agree(buffer: bytes, beginning: bytes) -> bool:
    """Return whether the bytes received so far may be the beginning of a header."""
    return buffer.startswith(beginning) or beginning.startswith(buffer)


# ---- version 1 ----------------------------------------------------------------------------------


def _parse_line(line: bytes) -> ProxyHeader:
    """Parse a version 1 header, `PROXY TCP4 source destination port port`."""
    _, family, *words = line.decode("ascii", "replace").split(" ")
    if family == "UNKNOWN":
        return _NOBODY  # whatever comes behind it
    address = {"TCP4": ipv4, "TCP6": ipv6}.get(family)
    if address is None:
        raise ProxyFault("PROXY header: neither TCP4, TCP6 nor UNKNOWN")
    if len(words) != 4:
        raise ProxyFault(f"PROXY header: expected two addresses and two ports, found {len(words)} words")
    source, destination, source_port, destination_port = words
    try:
        address(destination)
        port(destination_port)
        return ProxyHeader(address(source), port(source_port))
    except ValueError as error:
        raise ProxyFault(f"PROXY header: bad {family} address or port: {error}") from None


# ---- version 2 ----------------------------------------------------------------------------------


def _binary_end(buffer: bytes) -> int | None:
    """Return the length of a version 2 header, or `None` if too few bytes were received."""
    if len(buffer) > 12 and (buffer[12] >> 4 != 2 or buffer[12] & 0xF not in (_LOCAL, _PROXY)):
        raise ProxyFault(f"PROXY header: unknown version or command 0x{buffer[12]:02x}")
    if len(buffer) < _FIXED:
        return None
    (length,) = struct.unpack_from("!H", buffer, 14)
    end = _FIXED + int(length)
    if end > MAX_HEADER:
        raise ProxyFault(f"PROXY header: {end} bytes, more than {MAX_HEADER}")
    return end


def _parse_binary(header: bytes) -> ProxyHeader:
    if header[12] & 0xF == _LOCAL:
        return _NOBODY  # its family is to be ignored
    family, transport = header[13] >> 4, header[13] & 0xF
    if family >= len(_ADDRESSES) or transport > _STREAM:
        raise ProxyFault(f"PROXY header: family or transport 0x{header[13]:02x} is not supported")
    if len(header) < _FIXED + _ADDRESSES[family].size:
        raise ProxyFault(f"PROXY header: {len(header)} bytes are too few for its addresses")
    named = _ADDRESSES[family].unpack_from(header, _FIXED)
    if transport != _STREAM or not named:
        return _NOBODY
    source, _, port, _ = named
    return ProxyHeader(canonical(ipaddress.ip_address(source)), port)


# The argument of XCLIENT (Postfix's XCLIENT_README): the client in front of a trusted server.
#
# `parse_xclient` checks everything and changes nothing: what the values mean, and whether the peer may use
# it, is for the session to decide. A fault anywhere refuses the whole command with 501 5.5.4, so that a
# client is never half replaced. Values are xtext (RFC 3461 4), names and keywords in any case. DESTADDR and
# DESTPORT (what the client connected to) are checked and dropped: nothing here is decided by them.

KEYWORDS = "NAME ADDR PORT PROTO HELO LOGIN DESTADDR DESTPORT"
"""What EHLO lists behind the word XCLIENT."""

MAX_VALUE = 255  # characters of NAME and HELO (XCLIENT_README, note 1), here of every value

_XTEXT = re.compile(r"(?:[!-*,-<>-~]|\+[0-9A-Fa-f]{2})+")
_HEX = re.compile(r"\+([0-9A-Fa-f]{2})")
_HOST = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(?:\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*")
_UNAVAILABLE = frozenset({"[UNAVAILABLE]", "[TEMPUNAVAIL]"})


def _attribute(field: str) -> str:
    return {"address": "ADDR", "protocol": "PROTO"}.get(field, field.upper())


class XClient(msgspec.Struct, frozen=True, rename=_attribute):
    """The attributes of an XCLIENT command. `None` means that an attribute is not named and stays; `""` (0
    for the port) means that it is unknown.
    """

    name: str | None = None
    address: str | None = None
    port: int | None = None
    helo: str | None = None
    login: str | None = None
    protocol: str | None = None  # SMTP or ESMTP


@lru_cache(maxsize=1024)
def parse_xclient(argument: str) -> XClient:
    """Parse the argument of XCLIENT, `NAME=value ADDR=value …`. Raise CommandError if it is invalid."""
    values: dict[str, str | int] = {}
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
    return msgspec.convert(values, XClient)


def _checked(name: str, value: str) -> str | int:
    """Decode and check the value of an XCLIENT attribute."""
    if not _XTEXT.fullmatch(value):
        raise ValueError("not xtext")
    if value.upper() in _UNAVAILABLE and name != "PROTO":
        return 0 if name == "PORT" else ""
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
        return ipv6(text[5:])
    return ipv4(text)


def _protocol(text: str) -> str:
    protocol = text.upper()
    if protocol not in ("SMTP", "ESMTP"):
        raise ValueError("neither SMTP nor ESMTP")
    return protocol


_CHECKS: dict[str, Callable[[str], str | int]] = {
    "NAME": _host,
    "ADDR": _address,
    "PORT": port,
    "PROTO": _protocol,
    "HELO": str,
    "LOGIN": str,
    "DESTADDR": _address,
    "DESTPORT": port,
}
