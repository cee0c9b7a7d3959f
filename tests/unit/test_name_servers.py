"""Which name servers the machine has: as dnspython reads /etc/resolv.conf, without dnspython."""

from __future__ import annotations

from pathlib import Path

import dns.resolver
import pytest

from zonerelay.config.endpoints import NameServer
from zonerelay.config.settings import DnsSettings
from zonerelay.routing.dns.resolver import servers_of


@pytest.mark.parametrize(
    "text",
    [
        "nameserver 192.0.2.1\n",
        "# nameserver 192.0.2.9\n; nameserver 192.0.2.8\nsearch example.com\nnameserver 192.0.2.1\n",
        "nameserver\t2001:db8::1  # first\n  nameserver 192.0.2.2\nnameserver\noptions rotate timeout:1\n",
        "nameserver fe80::1%lo\n",
        "nameservers 192.0.2.1\nnameserver 127.0.0.53",
    ],
)
def test_servers_of_the_machine(text: str, tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    file.write_text(text)
    theirs = dns.resolver.Resolver(str(file)).nameservers
    assert servers_of(DnsSettings(), str(file)) == [NameServer(str(each)) for each in theirs]


@pytest.mark.parametrize("text", [None, "", "search example.com\n"])
def test_a_machine_that_names_none_asks_itself(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    if text is not None:
        file.write_text(text)
    assert servers_of(DnsSettings(), str(file)) == [NameServer("127.0.0.1")]


def test_another_protocol_than_dns_is_left_to_dnspython(tmp_path: Path) -> None:
    file = tmp_path / "resolv.conf"
    file.write_text("nameserver 192.0.2.1\nnameserver https://dns.example/query\n")
    assert servers_of(DnsSettings(), str(file)) == []


def test_configured_servers_come_first() -> None:
    assert servers_of(DnsSettings(servers=("[2001:db8::1]:5353",))) == [NameServer("2001:db8::1", 5353)]
