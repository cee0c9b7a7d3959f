"""Domains, addresses and hosts files: tables without DNS."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import pytest

from zonerelay.config.endpoints import parse_listen
from zonerelay.routing.addresses import OwnAddresses, is_address_of_this_machine, is_private
from zonerelay.routing.dns.resolver import Hosts
from zonerelay.routing.idna import ascii_domain, is_literal
from zonerelay.smtp.server.paths import literal_address


@pytest.mark.parametrize(
    ("domain", "ascii_form"),
    [
        ("Example.COM", "example.com"),
        ("example.com.", "example.com"),
        ("Bücher.example", "xn--bcher-kva.example"),
        ("XN--BCHER-KVA.example", "xn--bcher-kva.example"),
        ("faß.example", "xn--fa-hia.example"),  # IDNA 2003 made this fass.example
        ("日本。example", "xn--wgv71a.example"),  # UTS 46: an ideographic full stop is a dot
        ("_dmarc.my_host.example", "_dmarc.my_host.example"),
        ("localhost", "localhost"),
        ("1.example", "1.example"),
    ],
)
def test_a_domain_has_one_ascii_form(domain: str, ascii_form: str) -> None:
    assert ascii_domain(domain) == ascii_form


@pytest.mark.parametrize(
    "domain",
    [
        "",
        ".",
        "a..b",
        "-a.example",
        "a-.example",
        "a b.example",
        "a" * 64 + ".example",
        "a." * 127 + "ab",
        "ü" * 80,
        "\u200b.example",
        "a/b.example",
        "*.example.com",
    ],
)
def test_what_is_no_domain_is_refused(domain: str) -> None:
    with pytest.raises(ValueError):
        ascii_domain(domain)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("[192.0.2.1]", "192.0.2.1"),
        ("[IPv6:2001:db8::1]", "2001:db8::1"),
        ("[ipv6:::1]", "::1"),
        ("[2001:db8::1]", None),
        ("[192.0.2.256]", None),
        ("[IPv6:fe80::1%eth0]", None),
        ("[192.0.2.1", None),
        ("[]", None),
        ("192.0.2.1", None),
    ],
)
def test_address_literals_are_read_strictly(text: str, address: str | None) -> None:
    assert literal_address(text) == address
    assert is_literal(text) is text.startswith("[")


@pytest.mark.parametrize(
    "ip",
    [
        "127.0.0.1",
        "127.255.255.254",
        "10.0.0.1",
        "172.16.0.1",
        "172.31.255.255",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "255.255.255.255",
        "224.0.0.1",
        "192.0.2.1",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%eth0",
        "fd00:ec2::254",
        "ff02::1",
        "2001:db8::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "::127.0.0.1",
        "64:ff9b::10.0.0.1",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::1",
        "::ffff:0:127.0.0.1",
        "::ffff:0:169.254.169.254",
        "::ffff:0:8.8.8.8",
        "::8.8.8.8",
        "64:ff9b:1::10.0.0.1",
        "64:ff9b:1:fffe::8.8.8.8",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "2001::7f00:1",
        "4000::1",
        "100::1",
        "fec0::1",
        "192.88.99.1",
        "not an address",
    ],
)
def test_addresses_that_the_internet_must_not_lead_to_are_private(ip: str) -> None:
    assert is_private(ip)


@pytest.mark.parametrize(
    "ip",
    [
        "8.8.8.8",
        "172.32.0.1",
        "100.128.0.1",
        "2a00:1450:4001::1",
        "::ffff:8.8.8.8",
        "64:ff9b::8.8.8.8",
        "2002:808:808::",
    ],
)
def test_public_addresses_are_not_private(ip: str) -> None:
    assert not is_private(ip)


def test_a_listener_with_an_address_is_ours_at_its_port_only() -> None:
    own = OwnAddresses([parse_listen("192.0.2.1:25"), parse_listen("unix:/run/zonerelay.sock")])
    assert own.includes("192.0.2.1", 25)
    assert own.includes("::ffff:192.0.2.1", 25)
    assert not own.includes("192.0.2.1", 2525)
    assert not own.includes("192.0.2.2", 25)
    assert not own.includes("nonsense", 25)
    assert own.has_port(25)
    assert not own.has_port(2525)


def test_a_wildcard_listener_is_ours_on_every_address_of_the_machine() -> None:
    own = OwnAddresses([parse_listen("0.0.0.0:25")])
    assert own.includes("127.0.0.1", 25)
    assert not own.includes("192.0.2.1", 25)
    assert not own.includes("127.0.0.1", 26)
    assert not is_address_of_this_machine(ipaddress.ip_address("2001:db8::1"))


def test_a_hosts_file_names_hosts_in_any_case_and_its_mistakes_are_skipped(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(
        "# comment\n10.0.0.1 MailHog mailhog.test # sink\n::1 mailhog\nbroken line\n\n300.1.1.1 x\n"
    )
    hosts = Hosts(file=file)
    assert hosts.lookup("mailhog") == ("10.0.0.1", "::1")
    assert hosts.lookup("mailhog.test") == ("10.0.0.1",)
    assert hosts.lookup("x") == ()
    assert hosts.lookup("example.com") == ()


def test_localhost_needs_neither_dns_nor_a_hosts_file(tmp_path: Path) -> None:
    hosts = Hosts(file=tmp_path / "absent")
    assert set(hosts.lookup("localhost")) == {"127.0.0.1", "::1"}
    assert hosts.lookup("sink.localhost") == hosts.lookup("localhost")
    assert hosts.lookup("notlocalhost") == ()
