"""Parses a client's address in a PROXY header or XCLIENT into the one spelling used everywhere.

Strict: leading zeros, scopes, missing parts raise ValueError, because what comes out of here decides who may
relay. An IPv4 address that is mapped into IPv6 is an IPv4 address, as it is for clients on a dual-stack
socket.
"""

from __future__ import annotations

import ipaddress


def canonical(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> str:
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        return str(address.ipv4_mapped)
    return str(address)


def ipv4(text: str) -> str:
    return canonical(ipaddress.IPv4Address(text))


def ipv6(text: str) -> str:
    if "%" in text:
        raise ValueError("a scope means nothing outside the machine that it belongs to")
    return canonical(ipaddress.IPv6Address(text))


def port(text: str) -> int:
    """A decimal number up to 65535 without leading zeros."""
    if not (text.isascii() and text.isdigit()) or (len(text) > 1 and text[0] == "0") or len(text) > 5:
        raise ValueError("not a port number")
    number = int(text)
    if number > 65535:
        raise ValueError("not a port number")
    return number
