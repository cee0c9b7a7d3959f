"""[[destination]]: which entry a route meets, and what comes of it."""

from __future__ import annotations

import time

import pytest

from zonerelay.config.settings import DestinationSettings, TlsMode, ZoneSettings
from zonerelay.config.units import parse_rate
from zonerelay.model.clock import ManualClock
from zonerelay.routing.destinations.destination_table import DestinationTable, on_terms
from zonerelay.routing.destinations.route import DestinationLimits, MxHost, Route, TlsDemand

NOW = ManualClock().now()
OUTLOOK = ("a.mail.protection.outlook.com", "b.mail.protection.outlook.com")


def route(*hosts: str, zone: str = "default", secure: bool = False, literal: bool = False) -> Route:
    found = tuple(MxHost(host, 25, literal=literal) for host in hosts or ("mx.example.com",))
    return Route(zone, "example.com", found, NOW + 300, secure=secure)


def entry(**options: object) -> DestinationSettings:
    return DestinationSettings(**options)  # type: ignore[arg-type]  # options by name


def number(table: tuple[DestinationSettings, ...], domain: str, found: Route) -> int | None:
    met = DestinationTable(table).find(found.zone, domain, found.hosts)
    return None if met is None else met.number


@pytest.mark.parametrize(
    ("conditions", "holds"),
    [
        ({}, True),
        ({"domain": ("example.com",)}, True),
        ({"domain": ("EXAMPLE.com", "example.net")}, True),
        ({"domain": ("*.example.com",)}, False),
        ({"domain": ("*.com",)}, True),
        ({"domain": ("*",)}, True),
        ({"mx": ("*.mail.protection.outlook.com",)}, True),
        ({"mx": ("a.mail.protection.outlook.com",)}, False),  # all hosts, not one of them
        ({"mx": OUTLOOK}, True),
        ({"mx": ("mail.protection.outlook.com",)}, False),
        ({"zone": ("default", "bulk")}, True),
        ({"zone": ("bulk",)}, False),
        ({"domain": ("example.com",), "mx": ("*.example.com",)}, False),
        ({"domain": ("example.com",), "mx": ("*.outlook.com",), "zone": ("default",)}, True),
    ],
)
def test_an_entry_holds_when_all_its_conditions_do(conditions: dict[str, object], *, holds: bool) -> None:
    assert (number((entry(**conditions),), "example.com", route(*OUTLOOK)) == 0) is holds


def test_the_first_entry_that_holds_counts() -> None:
    table = (entry(domain=("other.example",)), entry(mx=("*.example.com",)), entry())
    assert number(table, "example.com", route()) == 1
    assert number(table, "example.net", route("mx.example.net")) == 2
    assert number((), "example.com", route()) is None


def test_a_next_hop_has_hosts_and_no_domain() -> None:
    assert number((entry(domain=("*",)), entry(mx=("smtp.example.net",))), "", route("smtp.example.net")) == 1
    assert number((entry(mx=("[192.0.2.1]",)),), "", route("192.0.2.1", literal=True)) == 0
    assert number((entry(mx=("[ipv6:2001:db8::1]",)),), "", route("2001:db8::1", literal=True)) == 0
    assert number((entry(mx=("*.0.2.1",)),), "", route("192.0.2.1", literal=True)) is None


def test_an_international_domain_is_compared_as_dns_has_it() -> None:
    table = (entry(domain=("bücher.example",)),)
    assert number(table, "xn--bcher-kva.example", route()) == 0
    assert number(table, "BÜCHER.example", route()) == 0


def test_limits_that_are_not_given_are_the_zones() -> None:
    zone = ZoneSettings(max_connections_per_destination=7, max_rate_per_destination=parse_rate("5/1s"))
    met = DestinationTable((entry(max_connections=2),)).find("default", "", route().hosts)
    assert met is not None
    found = on_terms(zone, route(), met)
    assert found.limits == DestinationLimits(2, 50, 1000, parse_rate("5/1s"))
    assert (found.tls, found.terms) == (None, "destination[0]")
    assert found.limits_in(zone) == found.limits


def test_an_entry_that_says_nothing_keeps_later_ones_away() -> None:
    table = DestinationTable((entry(domain=("example.com",)), entry(tls=TlsMode.NONE)))
    met = table.find("default", "example.com", route().hosts)
    assert met is not None
    assert met.changes_nothing
    assert on_terms(ZoneSettings(), route(), met) == route()


@pytest.mark.parametrize(
    ("options", "demand"),
    [
        ({"tls": TlsMode.NONE}, TlsDemand(TlsMode.NONE, because="destination")),
        ({"tls": TlsMode.REQUIRED}, TlsDemand(TlsMode.REQUIRED, because="destination")),
        ({"tls": TlsMode.DANE}, TlsDemand(TlsMode.DANE, dane=True, because="destination")),
        (
            {"tls": TlsMode.VERIFY, "tls_names": ("*.example.com",)},
            TlsDemand(TlsMode.VERIFY, names=("*.example.com",), because="destination"),
        ),
        (
            {"tls": TlsMode.VERIFY, "tls_certificates": ("ab" * 32,)},
            TlsDemand(TlsMode.VERIFY, certificates=("ab" * 32,), because="destination"),
        ),
    ],
)
def test_an_entry_with_tls_of_its_own_stands_alone(options: dict[str, object], demand: TlsDemand) -> None:
    met = DestinationTable((entry(**options),)).find("default", "", route().hosts)
    found = on_terms(ZoneSettings(tls=TlsMode.VERIFY), route(secure=True), met)
    terms = "destination[0] dane" if demand.dane else "destination[0]"
    assert (found.tls, found.limits, found.terms) == (demand, None, terms)


def test_lines_for_the_same_hosts_differ_in_their_terms_and_share_the_site() -> None:
    table = DestinationTable((entry(domain=("strict.example",), tls=TlsMode.VERIFY),))
    zone = ZoneSettings()
    strict = on_terms(zone, route(), table.find("default", "strict.example", route().hosts))
    other = on_terms(zone, route(), table.find("default", "other.example", route().hosts))
    assert strict.site == other.site
    assert strict.destination != other.destination


@pytest.mark.parametrize(
    ("zone", "secure", "demand", "terms"),
    [
        (ZoneSettings(), False, None, ""),
        (ZoneSettings(), True, TlsDemand(dane=True), "dane"),
        (ZoneSettings(dane=False), True, None, ""),
        (ZoneSettings(tls=TlsMode.NONE), True, None, ""),
        (ZoneSettings(tls=TlsMode.VERIFY), True, TlsDemand(TlsMode.VERIFY, dane=True), "dane"),
        (ZoneSettings(tls=TlsMode.DANE, dane=False), True, TlsDemand(TlsMode.DANE, dane=True), "dane"),
        (ZoneSettings(tls=TlsMode.DANE), False, None, ""),
    ],
)
def test_dane_is_demanded_where_dnssec_vouches_for_the_hosts(
    zone: ZoneSettings, *, secure: bool, demand: TlsDemand | None, terms: str
) -> None:
    found = on_terms(zone, route(secure=secure), None)
    assert (found.tls, found.terms) == (demand, terms)


def test_the_cost_of_an_entry_does_not_grow_with_its_patterns() -> None:
    def seconds(count: int) -> float:
        patterns = tuple(f"d{at}.example.net" for at in range(count))
        table = DestinationTable((entry(domain=patterns, mx=("*.example.net", *patterns)),))
        hosts = route("mx.example.com").hosts

        def once() -> float:
            before = time.perf_counter()
            for _ in range(200):
                table.find("default", "example.com", hosts)
            return time.perf_counter() - before

        return min(once() for _ in range(5))

    assert seconds(20_000) < 5 * seconds(10)


def test_a_pattern_that_is_no_domain_is_refused_in_words() -> None:
    with pytest.raises(ValueError, match=r'"ü\.\.example" cannot be matched'):
        DestinationTable((entry(domain=("ü..example",)),))
