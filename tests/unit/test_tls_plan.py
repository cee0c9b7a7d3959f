"""What a connection to a host must be: the demand, and what DNSSEC vouches for (RFC 7672 2.2)."""

from __future__ import annotations

import ssl
from dataclasses import replace
from typing import cast

import pytest
from msgspec import structs

from tests.support.mail import ZONE, Names
from zonerelay.config.settings import TlsMode
from zonerelay.delivery import peer as expiring_set
from zonerelay.delivery.peer import HostFailure, Terms
from zonerelay.delivery.tls.plan import TlsPlanner, TlsPolicy, TlsRequirements
from zonerelay.model.clock import ManualClock
from zonerelay.routing.destinations.route import MxHost, Route, TlsDemand
from zonerelay.routing.dns.answers import Addresses, DnsAnswer, DnsStatus, TlsaRecord
from zonerelay.routing.dns.resolver import Resolver

HOST = MxHost("mx.example.com", 25)
SECURE = Addresses(("192.0.2.1",), secure=True)
INSECURE = Addresses(("192.0.2.1",))
GOOD = TlsaRecord(3, 1, 1, b"x" * 32)
USELESS = TlsaRecord(1, 1, 1, b"x" * 32)
DEMANDS = [mode for mode in TlsMode if mode not in (TlsMode.NONE, TlsMode.DANE)]


def answer(
    *records: TlsaRecord, secure: bool = True, status: DnsStatus = DnsStatus.OK
) -> DnsAnswer[TlsaRecord]:
    return DnsAnswer(status, records, 1e12, secure)


async def plan(
    demand: TlsDemand,
    names: Names | None = None,
    *,
    found: Addresses = SECURE,
    host: MxHost = HOST,
    name: str = "example.com",
    on_connect: bool = False,
) -> TlsRequirements:
    route = Route("default", name, (host,), 1e12, tls=demand, terms="destination[1]")
    terms = Terms(replace(ZONE, tls_on_connect=on_connect), route)
    return await TlsPlanner(cast(Resolver, names or Names())).plan(terms, host, found)


async def refusal(
    demand: TlsDemand, names: Names | None = None, *, found: Addresses = SECURE, host: MxHost = HOST
) -> str:
    with pytest.raises(HostFailure) as caught:
        await plan(demand, names, found=found, host=host)
    assert (caught.value.reply.status, caught.value.asked) == ("4.7.5", False)
    return caught.value.reply.text


def published(*records: TlsaRecord, at: str = "_25._tcp.mx.example.com", secure: bool = True) -> Names:
    return Names(records={at: answer(*records, secure=secure)})


@pytest.mark.parametrize("mode", [mode for mode in TlsMode if mode is not TlsMode.DANE])
async def test_without_secure_mx_records_nothing_is_asked(mode: TlsMode) -> None:
    names = published(GOOD)
    found = await plan(TlsDemand(mode), names)
    assert (found.level, found.tlsa, names.asked) == (mode, (), [])
    assert found.may_fall_back is (mode is TlsMode.OPPORTUNISTIC)
    assert found.verify is (mode is TlsMode.VERIFY)


@pytest.mark.parametrize("mode", [*DEMANDS, TlsMode.DANE])
async def test_usable_records_are_held_to_whatever_was_demanded(mode: TlsMode) -> None:
    found = await plan(TlsDemand(mode, dane=True), published(USELESS, GOOD))
    assert (found.level, found.tlsa, found.name) == ("dane", (GOOD,), "mx.example.com")
    assert not found.may_fall_back
    assert found.tlsa_names == ("mx.example.com", "example.com")


async def test_dane_decides_where_mta_sts_applies_too_and_an_operators_verify_holds_as_well() -> None:
    demand = TlsDemand(TlsMode.VERIFY, dane=True, because="mta-sts")
    assert not (await plan(demand, published(GOOD))).verify
    assert (await plan(demand)).level == "mta-sts"
    assert (await plan(demand)).verify
    assert (await plan(structs.replace(demand, because="zone"), published(GOOD))).verify


@pytest.mark.parametrize("mode", DEMANDS)
async def test_records_of_which_none_can_be_used_ask_for_encryption(mode: TlsMode) -> None:
    found = await plan(TlsDemand(mode, dane=True), published(USELESS))
    assert found.level == (TlsMode.REQUIRED if mode is TlsMode.OPPORTUNISTIC else mode)
    assert (found.tlsa, found.may_fall_back) == ((), False)


@pytest.mark.parametrize("status", [DnsStatus.SERVFAIL, DnsStatus.TIMEOUT, DnsStatus.BAD])
@pytest.mark.parametrize("mode", [*DEMANDS, TlsMode.DANE])
async def test_a_failed_look_up_is_never_a_downgrade(mode: TlsMode, status: DnsStatus) -> None:
    names = Names(records={"_25._tcp.mx.example.com": answer(status=status, secure=False)})
    assert str(status) in await refusal(TlsDemand(mode, dane=True), names)


@pytest.mark.parametrize("mode", DEMANDS)
@pytest.mark.parametrize("status", [DnsStatus.NXDOMAIN, DnsStatus.NODATA])
async def test_a_denial_leaves_the_demand_as_it_is(mode: TlsMode, status: DnsStatus) -> None:
    for secure in (True, False):
        names = Names(records={"_25._tcp.mx.example.com": answer(status=status, secure=secure)})
        assert (await plan(TlsDemand(mode, dane=True), names)).level == mode
    assert (await plan(TlsDemand(mode, dane=True), published(GOOD, secure=False))).level == mode


async def test_records_are_not_asked_for_where_the_addresses_are_not_secure() -> None:
    names = published(GOOD)
    assert (await plan(TlsDemand(dane=True), names, found=INSECURE)).level == TlsMode.OPPORTUNISTIC
    assert names.asked == []


async def test_the_port_is_part_of_the_question() -> None:
    found = await plan(
        TlsDemand(dane=True),
        published(GOOD, at="_587._tcp.mx.example.com"),
        host=MxHost("mx.example.com", 587),
        name="[mx.example.com]:587",
    )
    assert (found.tlsa, found.tlsa_names, found.next_hop) == ((GOOD,), ("mx.example.com",), "")


# ---- aliases -------------------------------------------------------------------------------------


async def test_the_end_of_secure_aliases_is_asked_first_and_then_the_name() -> None:
    aliased = structs.replace(SECURE, canonical="host.example.net")
    there = published(GOOD, at="_25._tcp.host.example.net")
    found = await plan(TlsDemand(dane=True), there, found=aliased)
    assert (found.name, found.tlsa_names) == (
        "host.example.net",
        ("host.example.net", "mx.example.com", "example.com"),
    )
    here = published(GOOD)
    assert (await plan(TlsDemand(dane=True), here, found=aliased)).name == "mx.example.com"
    assert here.asked == ["_25._tcp.host.example.net", "_25._tcp.mx.example.com"]


async def test_an_alias_in_a_secure_zone_to_elsewhere_keeps_its_own_records() -> None:
    aliased = structs.replace(INSECURE, canonical="host.example.net")
    names = replace(published(GOOD), canonical={"mx.example.com": "host.example.net"})
    assert (await plan(TlsDemand(dane=True), names, found=aliased)).tlsa == ()
    names.secure = ["alias mx.example.com"]
    assert (await plan(TlsDemand(dane=True), names, found=aliased)).tlsa == (GOOD,)


# ---- tls = dane ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "found", "host", "dane", "words"),
    [
        (Names(), SECURE, HOST, True, "has no TLSA records"),
        (published(GOOD, secure=False), SECURE, HOST, True, "has no TLSA records"),
        (published(USELESS), SECURE, HOST, True, "has no usable TLSA record"),
        (published(GOOD), INSECURE, HOST, True, "has addresses that are not secured by DNSSEC"),
        (published(GOOD), SECURE, HOST, False, "was found through MX records of"),
        (Names(), INSECURE, MxHost("192.0.2.1", 25, literal=True), True, "but DANE requires a host name"),
    ],
)
async def test_mandatory_dane_uses_no_host_without_it(
    names: Names, found: Addresses, host: MxHost, dane: bool, words: str
) -> None:
    assert words in await refusal(TlsDemand(TlsMode.DANE, dane=dane), names, found=found, host=host)


# ---- the rest ------------------------------------------------------------------------------------


async def test_none_is_none() -> None:
    names = published(GOOD)
    found = await plan(TlsDemand(TlsMode.NONE, dane=True), names, on_connect=True)
    assert (found.encrypts, found.on_connect, names.asked) == (False, False, [])


async def test_tls_from_the_first_octet_never_falls_back() -> None:
    found = await plan(TlsDemand(), on_connect=True)
    assert (found.on_connect, found.may_fall_back, found.encrypts) == (True, False, True)


async def test_names_and_fingerprints_take_the_place_of_the_hosts_name() -> None:
    verify = TlsMode.VERIFY
    assert (await plan(TlsDemand(verify))).names == ("mx.example.com",)
    named = await plan(TlsDemand(verify, names=("*.example.net",)))
    assert (named.verify, named.names) == (True, ("*.example.net",))
    pinned = await plan(TlsDemand(verify, certificates=("ab" * 32,)))
    assert (pinned.verify, pinned.certificates) == (False, ("ab" * 32,))


@pytest.mark.parametrize(
    ("demand", "words"),
    [
        (TlsDemand(TlsMode.REQUIRED), "zone default requires TLS"),
        (TlsDemand(TlsMode.VERIFY), "zone default requires a valid certificate"),
        (TlsDemand(TlsMode.VERIFY, because="destination"), "destination[1] requires a valid certificate"),
        (
            TlsDemand(TlsMode.VERIFY, because="mta-sts"),
            "the MTA-STS policy of example.com requires a valid certificate",
        ),
    ],
)
async def test_the_reason_names_what_requires_tls(demand: TlsDemand, words: str) -> None:
    assert (await plan(demand)).why == words


# The memory of hosts whose TLS is broken: it fades, and it is bounded


def test_broken_host_is_tried_again_after_a_while() -> None:
    clock = ManualClock()
    policy = TlsPolicy(clock, remember_broken=60.0)
    policy.broken.add("mx:25")
    assert "mx:25" in policy.broken
    assert "another:25" not in policy.broken
    clock.step(-3600.0)  # the wall clock does not matter
    clock.advance(59.0)
    assert "mx:25" in policy.broken
    clock.advance(1.0)
    assert "mx:25" not in policy.broken


def test_only_so_many_hosts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expiring_set, "MAX_REMEMBERED", 3)
    policy = TlsPolicy(ManualClock(), remember_broken=60.0)
    for name in ("a", "b", "c", "a", "d"):
        policy.broken.add(name)
    assert [name in policy.broken for name in "abcd"] == [True, False, True, True]


def test_only_verify_looks_at_certificates() -> None:
    policy = TlsPolicy(ManualClock(), remember_broken=60.0)
    assert policy.context(verify=False, small=False).verify_mode is ssl.CERT_NONE
    verifying = policy.context(verify=True, small=False)
    assert verifying.verify_mode is ssl.CERT_REQUIRED
    assert policy.context(verify=True, small=False) is verifying


def test_old_versions_of_tls_are_not_spoken() -> None:
    policy = TlsPolicy(ManualClock(), remember_broken=60.0)
    for verify in (False, True):
        assert policy.context(verify=verify, small=False).minimum_version >= ssl.TLSVersion.TLSv1_2
