"""check_sender_domain against a name server that can fail in every way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.support.dns import GARBAGE, NXDOMAIN, REFUSED, SERVFAIL, SILENCE, FakeDns, InjectedFaults, OnError
from zonerelay.config.settings import DnsSettings
from zonerelay.inbound.access.networks import NO_DOMAIN, NO_HOST, NULL_MX, UNKNOWN, SenderDomains
from zonerelay.model.clock import ManualClock
from zonerelay.model.reply import Reply
from zonerelay.routing.dns.resolver import Hosts, Resolver

ZONES = {
    "example.com": {"MX": ["10 mx.example.com."]},
    "null.example": {"MX": ["0 ."]},
    "half.example": {"MX": ["0 .", "10 mx.example.com."]},
    "address.example": {"A": ["192.0.2.1"]},
    "six.example": {"AAAA": ["2001:db8::1"]},
    "empty.example": {},
    "alias.example": {"CNAME": ["example.com."]},
    "dangling.example": {"CNAME": ["gone.example."]},
    "xn--bcher-kva.example": {"MX": ["10 mx.example.com."]},
}


@asynccontextmanager
async def checking(faults: InjectedFaults | None = None) -> AsyncIterator[tuple[SenderDomains, FakeDns]]:
    async with FakeDns(ZONES, faults) as dns:
        settings = DnsSettings(servers=(dns.address,), timeout=0.2)
        resolver = Resolver(settings, ManualClock(), hosts=Hosts({"known.example": ("192.0.2.8",)}))
        try:
            yield SenderDomains(resolver), dns
        finally:
            await resolver.close()


@pytest.mark.parametrize(
    ("domain", "expected", "reason"),
    [
        ("", None, "the null sender"),
        ("[192.0.2.1]", None, "an address literal"),
        ("[IPv6:2001:db8::1]", None, "an IPv6 literal"),
        ("example.com", None, "has an MX"),
        ("EXAMPLE.com", None, "in any case"),
        ("bücher.example", None, "a U-label"),
        ("null.example", NULL_MX, "null MX"),
        ("half.example", None, "a null MX beside another is a mistake (RFC 7505 3)"),
        ("address.example", None, "an implicit MX"),
        ("six.example", None, "an implicit MX with IPv6"),
        ("known.example", NO_DOMAIN, "a name of the hosts file that DNS denies"),
        ("empty.example", NO_HOST, "has neither an MX nor an address"),
        ("missing.example", NO_DOMAIN, "no such domain"),
        ("alias.example", None, "an alias of a good one"),
        ("dangling.example", NO_DOMAIN, "an alias of nothing"),
        ("b\u0378.example", NO_DOMAIN, "not a domain"),
    ],
)
async def test_what_dns_says_of_a_domain(domain: str, expected: Reply | None, reason: str) -> None:
    async with checking() as (domains, _):
        assert await domains.check(domain) == expected, reason


def test_replies_are_the_registered_ones() -> None:
    assert [(r.code, r.status) for r in (NULL_MX, NO_DOMAIN, NO_HOST, UNKNOWN)] == [
        (550, "5.7.27"),
        (550, "5.1.8"),
        (550, "5.1.8"),
        (451, "4.4.3"),
    ]


@pytest.mark.parametrize("trouble", [SERVFAIL, REFUSED, SILENCE, GARBAGE])
@pytest.mark.parametrize("kind", ["MX", "A", "AAAA"])
async def test_dns_trouble_is_temporary(trouble: OnError, kind: str) -> None:
    async with checking({("empty.example", kind): trouble}) as (domains, _):
        assert await domains.check("empty.example") == UNKNOWN


@pytest.mark.parametrize("domain", ["address.example", "six.example"])
async def test_a_denied_mx_of_a_domain_with_an_address_is_no_mx(domain: str) -> None:
    async with checking({(domain, "MX"): NXDOMAIN}) as (domains, _):
        assert await domains.check(domain) is None


@pytest.mark.parametrize("kind", ["A", "AAAA"])
async def test_a_domain_that_one_type_denies_and_another_does_not_is_temporary(kind: str) -> None:
    denied: InjectedFaults = {("empty.example", each): NXDOMAIN for each in {"MX", "A", "AAAA"} - {kind}}
    async with checking(denied) as (domains, _):
        assert await domains.check("empty.example") == UNKNOWN
    for trouble in (SERVFAIL, REFUSED, SILENCE, GARBAGE):
        async with checking({**denied, ("empty.example", kind): trouble}) as (domains, _):
            assert await domains.check("empty.example") == UNKNOWN


async def test_one_address_is_enough_whatever_the_other_family_does() -> None:
    async with checking({("address.example", "AAAA"): SERVFAIL}) as (domains, _):
        assert await domains.check("address.example") is None


async def test_a_domain_is_asked_for_once_however_many_ask_and_how_often() -> None:
    async with checking() as (domains, dns):
        assert await asyncio.gather(*(domains.check("null.example") for _ in range(20))) == [NULL_MX] * 20
        assert await domains.check("null.example") == NULL_MX
        assert dns.count("null.example", "MX") == 1


async def test_the_unexpected_is_temporary(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Resolver):
        async def mx(self, domain: str) -> None:  # type: ignore[override]  # a resolver with a bug
            raise RuntimeError("a bug")

    broken = Broken(DnsSettings(), ManualClock(), hosts=Hosts({}))
    assert await SenderDomains(broken).check("example.com") == UNKNOWN
    assert "a bug" in caplog.text
