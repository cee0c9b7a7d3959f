"""The terms of a route by the domain's MTA-STS policy, the zone and [[destination]]: who has the say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest

from zonerelay.config.settings import DestinationSettings, TlsMode, ZoneSettings
from zonerelay.model.clock import ManualClock
from zonerelay.model.outcome import Scope, Verdict
from zonerelay.routing.destinations.destination_table import DestinationEntry, DestinationTable, by_policy
from zonerelay.routing.destinations.route import MxHost, Route, TlsDemand, Unroutable
from zonerelay.routing.mta_sts import (
    CachedPolicy,
    PolicyLookup,
    StsMode,
    StsPolicy,
)
from zonerelay.telemetry.events.events import StsEvents

CLOCK = ManualClock()
NOW = CLOCK.now()
HOSTS = ("mx1.example.com", "mx2.example.com", "evil.example.net")
STS = TlsDemand(TlsMode.VERIFY, because="mta-sts")


class Mismatches:
    def __init__(self) -> None:
        self.hosts: list[str] = []

    def mismatch(self, domain: str, hosts: Sequence[str], *, mode: str) -> None:
        self.hosts += hosts


def judged(
    policy: StsPolicy | None,
    *,
    zone: ZoneSettings | None = None,
    entry: DestinationEntry | None = None,
    secure: bool = False,
    expires: float = 100.0,
    mismatches: Mismatches | None = None,
) -> Route | Unroutable:
    hosts = tuple(MxHost(host, 25, at) for at, host in enumerate(HOSTS))
    route = Route("default", "example.com", hosts, NOW + 300, secure=secure)
    held = None if policy is None else CachedPolicy.of("example.com", "7", policy, NOW)
    events = cast(StsEvents, mismatches or Mismatches())
    return by_policy(zone or ZoneSettings(), route, entry, PolicyLookup(held, NOW + expires), events)


def policy(*patterns: str, mode: StsMode = StsMode.ENFORCE) -> StsPolicy:
    return StsPolicy(mode, patterns or ("*.example.com",), 86_400)


def entry(**options: object) -> DestinationEntry:
    table = DestinationTable((DestinationSettings(**options),))  # type: ignore[arg-type]  # options by name
    met = table.find("default", "example.com", ())
    assert met is not None
    return met


def test_the_hosts_of_the_policy_remain_in_their_order_and_must_be_verified() -> None:
    mismatches = Mismatches()
    route = judged(policy(), mismatches=mismatches)
    assert isinstance(route, Route)
    assert [host.name for host in route.hosts] == ["mx1.example.com", "mx2.example.com"]
    assert (route.tls, route.terms, route.limits) == (STS, "mta-sts", None)
    assert mismatches.hosts == ["evil.example.net"]


def test_no_route_outlives_what_is_known_of_the_policy() -> None:
    assert judged(policy()).expires == NOW + 100
    assert judged(None).expires == NOW + 100
    assert judged(policy("other.example")).expires == NOW + 100
    assert judged(policy(), expires=1000).expires == NOW + 300


def test_without_a_host_of_the_policy_mail_waits_and_the_policy_is_named() -> None:
    found = judged(policy("mx.example.org"))
    assert isinstance(found, Unroutable)
    assert (found.outcome.verdict, found.outcome.scope) == (Verdict.DEFERRED, Scope.DOMAIN)
    assert str(found.outcome.reply).startswith(
        "451 4.7.5 the MTA-STS policy 7 of example.com does not include"
    )


@pytest.mark.parametrize("mode", [StsMode.TESTING, StsMode.NONE])
def test_a_policy_that_does_not_enforce_leaves_the_route_as_it_is(mode: StsMode) -> None:
    mismatches = Mismatches()
    route = judged(policy("mx1.example.com", mode=mode), mismatches=mismatches)
    assert isinstance(route, Route)
    assert (len(route.hosts), route.tls, route.terms) == (3, None, "")
    assert mismatches.hosts == (["mx2.example.com", "evil.example.net"] if mode is StsMode.TESTING else [])


@pytest.mark.parametrize(
    ("zone", "secure", "demand", "terms"),
    [
        (ZoneSettings(tls=TlsMode.NONE), False, STS, "mta-sts"),
        (ZoneSettings(tls=TlsMode.REQUIRED), False, STS, "mta-sts"),
        (ZoneSettings(tls=TlsMode.VERIFY), False, None, ""),
        (ZoneSettings(), True, TlsDemand(TlsMode.VERIFY, dane=True, because="mta-sts"), "mta-sts dane"),
        (ZoneSettings(dane=False), True, STS, "mta-sts"),
        (ZoneSettings(tls=TlsMode.DANE), True, TlsDemand(TlsMode.DANE, dane=True), "dane"),
        (ZoneSettings(tls=TlsMode.DANE), False, None, ""),
    ],
)
def test_the_stronger_demand_holds(
    zone: ZoneSettings, *, secure: bool, demand: TlsDemand | None, terms: str
) -> None:
    route = judged(policy(), zone=zone, secure=secure)
    assert isinstance(route, Route)
    assert (route.tls, route.terms, len(route.hosts)) == (demand, terms, 2)


def test_an_entry_with_limits_only_leaves_the_policy_its_say() -> None:
    route = judged(policy(), entry=entry(max_connections=1))
    assert isinstance(route, Route)
    assert (route.tls, route.terms) == (STS, "destination[0] mta-sts")
    assert route.limits is not None
    assert route.limits.max_connections == 1


def test_an_entry_with_tls_takes_no_demand_from_dane() -> None:
    route = judged(None, entry=entry(tls=TlsMode.REQUIRED), secure=True)
    assert isinstance(route, Route)
    assert route.tls == TlsDemand(TlsMode.REQUIRED, because="destination")


def test_an_entry_that_demands_dane_tells_secure_domains_from_others_at_the_same_hosts() -> None:
    """In one line the route of either would have been used for both."""
    dane = entry(tls=TlsMode.DANE)
    secure, forged = (judged(None, entry=dane, secure=secure) for secure in (True, False))
    assert isinstance(secure, Route)
    assert isinstance(forged, Route)
    assert (secure.terms, forged.terms) == ("destination[0] dane", "destination[0]")
    assert secure.site == forged.site
    assert secure.destination != forged.destination
