"""Addresses, next hops, name servers and EHLO names, as an operator writes them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from zonerelay.config.endpoints import (
    ListenAddress,
    NameServer,
    NextHop,
    NextHopKind,
    is_domain,
    is_ehlo_name,
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
    ("parse", "text", "said", "reason"),
    [
        (parse_listen, "25", "has no port", "a port alone says nothing about who can connect"),
        (parse_listen, ":25", '"[::]:25" for all addresses', "the usual way to say every address elsewhere"),
        (parse_listen, "*:25", '"[::]:25" (all addresses)', "so is this"),
        (parse_listen, "localhost:25", "which may resolve to several addresses", "names are not bound to"),
        (parse_listen, "127.0.0.1", "has no port", "which one?"),
        (parse_listen, "::1:25", "has no port", "without brackets this is all address"),
        (parse_listen, "127.0.0.1:65536", "from 0 to 65535", "out of range"),
        (parse_listen, "127.0.0.1:٢٥", "is not a port", "ASCII digits only"),
        (parse_listen, "unix:smtp.sock", "absolute path", "relative to what?"),
        (
            parse_listen,
            f"unix:/{'x' * 107}",
            "a Unix socket requires an absolute path",
            "sockaddr_un holds no more",
        ),
        (
            parse_listen,
            "unix:/" + "é" * 54,
            "a Unix socket requires an absolute path",
            "octets, not characters",
        ),
        (parse_listen, "", "has no host", "empty"),
        (parse_next_hop, "a b", "is not a next hop", "a space"),
        (parse_next_hop, "host:0", "from 1 to 65535", "nobody listens on port 0"),
        (parse_next_hop, "host:", "is not a port", "the port was forgotten"),
        (parse_next_hop, "[host", "is not an address and port", "half a bracket"),
        (parse_next_hop, "192.0.2.256", "is not a next hop", "a mistyped address is no name"),
        (parse_next_hop, "a:b:c", "an IPv6 address must be in brackets", "neither IPv6 nor host and port"),
        (parse_next_hop, "user@example.com", "is not a next hop", "an address of mail"),
        (
            parse_next_hop,
            "fe80::1%eth0:25",
            "an IPv6 address must be in brackets",
            "a scope does not swallow the port",
        ),
        (parse_name_server, "ns.example.com", "expected its address", "a resolver cannot be looked up"),
        (parse_name_server, "192.0.2.53:0", "from 1 to 65535", "nobody listens on port 0"),
    ],
)
def test_what_is_refused_says_what_to_write(
    parse: Callable[[str], object], text: str, said: str, reason: str
) -> None:
    with pytest.raises(ValueError) as error:
        parse(text)
    assert said in str(error.value), reason


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


@pytest.mark.parametrize(
    ("name", "valid", "reason"),
    [
        ("relay.example.org", True, "a full name"),
        ("relay", True, "one label is valid, if not wise"),
        ("[192.0.2.1]", True, "an address literal"),
        ("[IPv6:2001:db8::1]", True, "an IPv6 literal has its tag (RFC 5321 4.1.3)"),
        ("[2001:db8::1]", False, "and is none without it"),
        ("192.0.2.1", False, "an address needs brackets"),
        ("relay.example.org.", False, "no final dot in SMTP"),
        ("my_relay.example.org", False, "no underscore in a host name"),
        ("-a.example.org", False, "no leading dash"),
        ("a..b", False, "no empty label"),
        ("x" * 64 + ".org", False, "a label has at most 63 octets"),
        ("bücher.example", False, "xn-- form only"),
        ("xn--bcher-kva.example", True, "like this"),
        ("", False, "nothing"),
    ],
)
def test_ehlo_names(name: str, valid: bool, reason: str) -> None:
    assert is_ehlo_name(name) is valid, reason


def test_a_domain_has_at_most_253_characters() -> None:
    longest = ".".join(["a" * 49] * 5) + ".bc"
    assert len(longest) == 252
    assert is_domain(longest + "d")
    assert not is_domain(longest + "de")
