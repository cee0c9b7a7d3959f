"""Addresses, next hops, name servers and EHLO names, as an operator writes them."""

from __future__ import annotations

import pytest

from zonerelay.config.endpoints import (
    ListenAddress,
    NameServer,
    NextHop,
    NextHopKind,
    is_domain,
    parse_listen,
    parse_name_server,
    parse_next_hop,
)


@pytest.mark.parametrize(
    ("text", "address", "reason"),
    [
        ("127.0.0.1:2525", ListenAddress("127.0.0.1", 2525), "IPv4"),
        ("[::]:25", ListenAddress("::", 25), "every address"),
        ("[2001:DB8::0:1]:25", ListenAddress("2001:db8::1", 25), "IPv6 in one spelling, so that two compare"),
        ("127.0.0.1:0", ListenAddress("127.0.0.1", 0), "a port that the system chooses"),
        ("unix:/run/zonerelay/smtp.sock", ListenAddress(path="/run/zonerelay/smtp.sock"), "a Unix socket"),
        ("unix:/run/a:b", ListenAddress(path="/run/a:b"), "a path may hold a colon"),
    ],
)
def test_listen_addresses(text: str, address: ListenAddress, reason: str) -> None:
    assert parse_listen(text) == address, reason
    assert parse_listen(str(address)) == address


@pytest.mark.parametrize(
    ("text", "kind", "host", "port", "reason"),
    [
        ("smtp.example.net", NextHopKind.MX, "smtp.example.net", None, "a name: its MX hosts"),
        ("smtp.example.net:587", NextHopKind.MX, "smtp.example.net", 587, "its MX hosts on another port"),
        ("[smtp.example.net]", NextHopKind.HOST, "smtp.example.net", None, "brackets: no MX look-up"),
        ("[SMTP.example.net]:587", NextHopKind.HOST, "smtp.example.net", 587, "names are lower case"),
        ("[smtp_sink]:25", NextHopKind.HOST, "smtp_sink", 25, "container names have underscores"),
        ("192.0.2.1", NextHopKind.ADDRESS, "192.0.2.1", None, "an address"),
        ("192.0.2.1:26", NextHopKind.ADDRESS, "192.0.2.1", 26, "an address and port"),
        ("[192.0.2.1]:26", NextHopKind.ADDRESS, "192.0.2.1", 26, "brackets around IPv4"),
        ("[2001:db8::1]:26", NextHopKind.ADDRESS, "2001:db8::1", 26, "IPv6 and port"),
        ("2001:db8::1", NextHopKind.ADDRESS, "2001:db8::1", None, "IPv6 needs no brackets without a port"),
    ],
)
def test_next_hops(text: str, kind: NextHopKind, host: str, port: int | None, reason: str) -> None:
    assert parse_next_hop(text) == NextHop(kind, host, port), reason


@pytest.mark.parametrize(
    ("text", "server"),
    [
        ("192.0.2.53", NameServer("192.0.2.53", 53)),
        ("127.0.0.1:5353", NameServer("127.0.0.1", 5353)),
        ("::1", NameServer("::1", 53)),
        ("[::1]:5353", NameServer("::1", 5353)),
        ("[fe80::1%eth0]:53", NameServer("fe80::1%eth0", 53)),
    ],
)
def test_name_servers(text: str, server: NameServer) -> None:
    assert parse_name_server(text) == server


@pytest.mark.parametrize(
    ("text", "loopback", "wildcard"),
    [
        ("127.0.0.2:1", True, False),
        ("[::1]:1", True, False),
        ("unix:/x", True, False),
        ("0.0.0.0:1", False, True),
        ("[::]:1", False, True),
        ("192.0.2.1:1", False, False),
    ],
)
def test_who_can_reach_an_address(text: str, loopback: bool, wildcard: bool) -> None:
    address = parse_listen(text)
    assert (address.is_loopback, address.is_wildcard) == (loopback, wildcard)


def test_a_domain_has_at_most_253_characters() -> None:
    longest = ".".join(["a" * 49] * 5) + ".bc"
    assert len(longest) == 252
    assert is_domain(longest + "d")
    assert not is_domain(longest + "de")
