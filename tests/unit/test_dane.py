"""DANE: which TLSA records count, and which certificates they vouch for; all of them real ones."""

import hashlib
import ssl
import tempfile
from dataclasses import replace
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID
from msgspec import structs

from tests.support.certificates import DAY, NOW, Made, make
from tests.support.mail import ZONE, Names
from zonerelay.config.settings import TlsMode
from zonerelay.delivery.peer import HostFailure, Terms, UntrustedCertificateError
from zonerelay.delivery.tls import chains
from zonerelay.delivery.tls import dane as records_of_dane
from zonerelay.delivery.tls.dane import matching_name, names_in, public_key, shown_names, usable, verify
from zonerelay.delivery.tls.plan import TlsPolicy, TlsRequirements, requirements
from zonerelay.model.clock import ManualClock
from zonerelay.routing.destinations.route import MxHost, Route, TlsDemand
from zonerelay.routing.dns.answers import Addresses, DnsAnswer, DnsStatus, TlsaRecord
from zonerelay.routing.dns.resolver import Resolver

NAMES = ("mx.example.com", "example.com")
ROOT = make(common_name="Test Root", authority=True)
MIDDLE = make(common_name="Test Intermediate", authority=True, issuer=ROOT)
SERVER = make("mx.example.com", issuer=MIDDLE)
STRANGER = make("mx.example.com")
CHAIN = (SERVER, MIDDLE, ROOT)


def record(made: Made, usage: int, selector: int, matching: int) -> TlsaRecord:
    data = made.der if selector == 0 else made.public_key_der
    digest = {0: lambda it: it, 1: lambda it: hashlib.sha256(it).digest(), 2: _sha512}[matching]
    return TlsaRecord(usage, selector, matching, digest(data))


def _sha512(data: bytes) -> bytes:
    return hashlib.sha512(data).digest()


def check(chain: tuple[Made, ...], *records: TlsaRecord, now: float = NOW) -> str:
    """What `verify` says of these records after `usable` has looked at them."""
    return verify([each.der for each in chain], usable(records), NAMES, now=now)


def refusal(chain: tuple[Made, ...], *records: TlsaRecord, now: float = NOW) -> str:
    with pytest.raises(UntrustedCertificateError) as caught:
        check(chain, *records, now=now)
    return str(caught.value)


every_kind = pytest.mark.parametrize(
    ("selector", "matching"), [(selector, matching) for selector in (0, 1) for matching in (0, 1, 2)]
)


# ---- which records count -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("unusable", "why"),
    [
        (record(SERVER, 0, 1, 1), "PKIX-TA is not for SMTP"),
        (record(SERVER, 1, 1, 1), "PKIX-EE is not for SMTP"),
        (TlsaRecord(4, 1, 1, b"x" * 32), "a usage that nobody knows"),
        (TlsaRecord(3, 2, 1, b"x" * 32), "a selector that nobody knows"),
        (TlsaRecord(3, 1, 3, b"x" * 32), "a digest that nobody knows"),
        (TlsaRecord(3, 1, 1, b"x" * 31), "a digest that is too short"),
        (TlsaRecord(3, 1, 2, b"x" * 32), "SHA-256 called SHA-512"),
        (TlsaRecord(3, 1, 1, b""), "nothing"),
        (TlsaRecord(2, 0, 0, b"x" * 300), "no certificate"),
        (TlsaRecord(2, 0, 0, SERVER.public_key_der), "a key where a certificate should be"),
        (TlsaRecord(3, 0, 0, SERVER.der[:-1]), "a certificate cut short"),
        (TlsaRecord(3, 1, 0, SERVER.public_key_der + b"\0"), "a key and more"),
    ],
)
def test_records_that_do_not_count(unusable: TlsaRecord, why: str) -> None:
    assert usable([unusable]) == (), why


@pytest.mark.parametrize("usage", [2, 3])
@every_kind
def test_records_that_count(usage: int, selector: int, matching: int) -> None:
    each = record(SERVER, usage, selector, matching)
    assert usable([each]) == (each,)


def test_of_several_digests_the_strongest_counts() -> None:
    strong, full = record(SERVER, 3, 1, 2), record(SERVER, 3, 1, 0)
    other_selector = record(SERVER, 3, 0, 1)
    assert usable([record(SERVER, 3, 1, 1), strong, other_selector, full]) == (strong, other_selector, full)
    # What is malformed pushes nothing aside.
    assert usable([record(SERVER, 3, 1, 1), TlsaRecord(3, 1, 2, b"x")]) == (record(SERVER, 3, 1, 1),)


def test_no_host_makes_us_look_at_more_than_a_few_records() -> None:
    assert (
        len(usable([TlsaRecord(3, 1, 1, bytes([n]) * 32) for n in range(100)])) == records_of_dane.MAX_RECORDS
    )


# ---- DANE-EE: the server's own -------------------------------------------------------------------


@every_kind
def test_the_servers_own_certificate_or_key(selector: int, matching: int) -> None:
    assert check(CHAIN, record(SERVER, 3, selector, matching)) == ""
    assert check((SERVER,), record(STRANGER, 3, selector, matching), record(SERVER, 3, 1, 0)) == ""
    why = refusal(CHAIN, record(STRANGER, 3, selector, matching))
    assert f"{3} {selector} {matching}" in why
    assert hashlib.sha256(SERVER.public_key_der).hexdigest() in why  # what the record would have to be


@every_kind
def test_of_the_servers_own_nothing_else_counts(selector: int, matching: int) -> None:
    expired = make("another.example", ends=NOW - DAY / 2)
    assert check((expired,), record(expired, 3, selector, matching)) == ""


def test_a_certificate_above_is_not_the_servers_own() -> None:
    assert "none of the TLSA records" in refusal(CHAIN, record(MIDDLE, 3, 1, 1))


def test_other_kinds_of_keys_are_matched_by_their_octets() -> None:
    for key in (
        rsa.generate_private_key(public_exponent=65537, key_size=2048),
        ec.generate_private_key(ec.SECP384R1()),
    ):
        made = make("mx.example.com", key=key)
        assert check((made,), record(made, 3, 1, 1)) == ""


# ---- DANE-TA: an authority -----------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("anchor", [ROOT, MIDDLE], ids=["root", "intermediate"])
def test_an_authority_that_the_server_shows(anchor: Made, selector: int, matching: int) -> None:
    assert check(CHAIN, record(anchor, 2, selector, matching)) == "mx.example.com"


@pytest.mark.parametrize("selector", [0, 1], ids=["certificate", "key"])
def test_an_authority_that_only_the_record_has(selector: int) -> None:
    assert check((SERVER, MIDDLE), record(ROOT, 2, selector, 0)) == "mx.example.com"
    assert check((SERVER,), record(MIDDLE, 2, selector, 0)) == "mx.example.com"
    assert refusal((SERVER,), record(ROOT, 2, selector, 0))  # the one in between is missing


def test_bare_rsa_keys_are_few_and_not_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    authority = make(
        common_name="RSA", authority=True, key=rsa.generate_private_key(public_exponent=65537, key_size=2048)
    )
    shown, key = (make("mx.example.com", issuer=authority),), record(authority, 2, 1, 0)
    others = [record(STRANGER, 2, 1, 0)] * records_of_dane.MAX_KEYS
    assert check(shown, *others[1:], key) == "mx.example.com"
    assert refusal(shown, *others, key)
    assert refusal((STRANGER,), key)
    for limit, most in (("MAX_RSA", 1024), ("MAX_EXPONENT", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(chains, limit, most)
            assert refusal(shown, key)


@pytest.mark.parametrize("matching", [1, 2])
@pytest.mark.parametrize("selector", [0, 1])
def test_an_authority_that_is_not_shown_is_none(selector: int, matching: int) -> None:
    why = refusal((SERVER, MIDDLE), record(ROOT, 2, selector, matching))
    assert "did not present the certificate of the authority" in why


@every_kind
def test_the_wrong_authority(selector: int, matching: int) -> None:
    other = make(common_name="Test Root", authority=True)  # the same name, another key
    assert refusal(CHAIN, record(other, 2, selector, matching))
    why = refusal((*CHAIN, other), record(other, 2, selector, matching))  # showing it does not help
    assert "not issued by the authority" in why or "presented no certificate" in why
    assert refusal((STRANGER, ROOT), record(ROOT, 2, selector, matching))


def test_a_certificate_that_is_no_authority_signs_nothing() -> None:
    clerk = make("clerk.example.com", common_name="Clerk", issuer=ROOT)
    forged = make("mx.example.com", issuer=clerk)
    assert refusal((forged, clerk, ROOT), record(ROOT, 2, 0, 1))


def test_dates_count_below_an_authority() -> None:
    records = [record(ROOT, 2, 0, 1)]
    assert refusal(CHAIN, *records, now=NOW + 100 * DAY).endswith("has expired")
    assert refusal(CHAIN, *records, now=NOW - 2 * DAY).endswith("is not valid yet")
    expired = make("mx.example.com", issuer=MIDDLE, ends=NOW - DAY / 2)
    assert refusal((expired, MIDDLE, ROOT), *records) == "its certificate has expired"
    old = make(common_name="Old", authority=True, issuer=ROOT, ends=NOW - DAY / 2)
    assert "issuer" in refusal((make("mx.example.com", issuer=old), old, ROOT), *records)


@pytest.mark.parametrize(
    ("names", "fitting"),
    [
        (("mx.example.com",), "mx.example.com"),
        (("MX.Example.COM",), "mx.example.com"),
        (("*.example.com",), "mx.example.com"),
        (("example.com",), "example.com"),  # the next hop's, for domains with many hosts
        (("other.example", "example.com"), "example.com"),
    ],
)
def test_names_below_an_authority(names: tuple[str, ...], fitting: str) -> None:
    assert check((make(*names, issuer=ROOT), ROOT), record(ROOT, 2, 0, 1)) == fitting


@pytest.mark.parametrize(
    "names", [("mx2.example.com",), ("*.mx.example.com",), ("*.com",), ("*",), ("m*.example.com",)]
)
def test_other_names_are_refused_and_shown(names: tuple[str, ...]) -> None:
    why = refusal((make(*names, issuer=ROOT), ROOT), record(ROOT, 2, 0, 1))
    assert why == f"its certificate is for {names[0]}, not for mx.example.com or example.com"


def test_the_common_name_counts_where_there_is_no_other() -> None:
    old_fashioned = make(common_name="mx.example.com", issuer=ROOT)
    assert check((old_fashioned, ROOT), record(ROOT, 2, 0, 1)) == "mx.example.com"
    both = make("other.example", common_name="mx.example.com", issuer=ROOT)
    assert refusal((both, ROOT), record(ROOT, 2, 0, 1))


def test_a_clients_certificate_is_no_servers() -> None:
    client = make("mx.example.com", issuer=ROOT, usage=ExtendedKeyUsageOID.CLIENT_AUTH)
    assert "not for servers" in refusal((client, ROOT), record(ROOT, 2, 0, 1))
    server = make("mx.example.com", issuer=ROOT, usage=ExtendedKeyUsageOID.SERVER_AUTH)
    assert check((server, ROOT), record(ROOT, 2, 0, 1)) == "mx.example.com"


def test_one_record_that_fits_is_enough() -> None:
    rollover = (record(STRANGER, 3, 1, 1), record(STRANGER, 2, 0, 1), record(ROOT, 2, 0, 0))
    assert check((SERVER, MIDDLE), *rollover) == "mx.example.com"
    # Both digests are of the same strength: neither hides the other.
    assert check(CHAIN, record(STRANGER, 3, 1, 1), record(SERVER, 3, 1, 1)) == ""


OF_NO_VERSION = SERVER.der.replace(b"\xa0\x03\x02\x01\x02", b"\xa0\x03\x02\x01\x09", 1)


@pytest.mark.parametrize(
    "chain", [[], [b"no certificate"], [b"\x30\x82\xff\xff"], [SERVER.der[:80]], [OF_NO_VERSION]]
)
def test_what_is_no_certificate_is_refused(chain: list[bytes]) -> None:
    for each in (record(STRANGER, 3, 1, 1), record(ROOT, 2, 0, 0), record(MIDDLE, 2, 1, 0)):
        with pytest.raises(UntrustedCertificateError):
            verify(chain, [each], NAMES, now=NOW)


# What a connection to a host must be: the demand, and what DNSSEC vouches for (RFC 7672 2.2)


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
    return await requirements(cast(Resolver, names or Names()), terms, host, found)


async def refusal_of(
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
    assert str(status) in await refusal_of(TlsDemand(mode, dane=True), names)


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
    assert words in await refusal_of(TlsDemand(TlsMode.DANE, dane=dane), names, found=found, host=host)


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


def test_only_so_many_hosts_are_remembered() -> None:
    policy = TlsPolicy(ManualClock(), remember_broken=60.0)
    policy.broken.until.limit = 3
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
    for trusted in (False, True):
        assert policy.context(verify=trusted, small=False).minimum_version >= ssl.TLSVersion.TLSv1_2


# Names in certificates, and the octets of their keys


@pytest.mark.parametrize(
    ("wanted", "name", "fits"),
    [
        ("mx.example.com", "mx.example.com", True),
        ("MX.example.com.", "mx.example.com", True),
        ("mx.example.com", "*.example.com", True),
        ("a.mx.example.com", "*.example.com", False),  # one label, not two
        ("example.com", "*.example.com", False),
        (".example.com", "*.example.com", False),
        ("example.com", "*.com", False),
        ("mx.example.com", "m*.example.com", False),
        ("mx.example.com", "example.com", False),
        ("mx.example.com", "mx.example.com.evil.example", False),
        ("*.example.com", "mx.example.com", True),  # an operator's pattern
        ("*.example.com", "a.mx.example.com", True),
        ("*.example.com", "*.example.com", True),
        ("*.example.com", "example.com", False),
        ("*.example.com", "mx.badexample.com", False),
        ("192.0.2.1", "192.0.2.1", True),
        ("192.0.2.1", "*.0.2.1", False),
        ("2001:db8::1", "2001:DB8:0:0:0:0:0:1", True),
        ("2001:db8::1", "2001:db8::2", False),
        ("2001:db8::1", "mx:example", False),
    ],
)
def test_names_fit_or_not(wanted: str, name: str, fits: bool) -> None:
    assert matching_name([wanted], [name]) == (wanted if fits else None)


def test_the_first_wanted_name_that_fits_is_told() -> None:
    assert matching_name(["a.example", "b.example"], ["c.example", "b.example", "a.example"]) == "a.example"
    assert matching_name([], ["a.example"]) is None
    assert matching_name(["a.example"], []) is None


def test_only_a_few_names_are_shown() -> None:
    assert shown_names([]) == "no name"
    assert shown_names(["a", "b"]) == "a, b"
    assert shown_names("abcdefg") == "a, b, c, d, e and 2 more"


def test_the_key_is_taken_out_as_it_is() -> None:
    for made in (make("a.example"), make("b.example", key=rsa.generate_private_key(65537, 2048))):
        assert public_key(made.der) == made.public_key_der
        assert records_of_dane.fingerprint(made.der) == made.fingerprint


def test_no_octets_make_it_fail_otherwise_than_in_words() -> None:
    der = make("a.example").der
    assert records_of_dane.is_sequence(der)
    for cut in range(len(der)):
        assert not records_of_dane.is_sequence(der[:cut])
        for mangled in (der[:cut], der[:cut] + b"\xff" + der[cut + 1 :]):
            try:
                public_key(mangled)
            except ValueError:
                continue


def test_names_of_a_certificate_that_the_ssl_module_describes() -> None:
    made = make("MX.example.com", "*.example.net")
    with tempfile.NamedTemporaryFile() as file:
        file.write(made.pem)
        file.flush()
        # What `getpeercert` makes, from a file: there is no public way to ask for it.
        described = cast(Any, ssl)._ssl._test_decode_cert(file.name)
    assert names_in(described) == ("mx.example.com", "*.example.net")
    assert names_in({}) == ()
