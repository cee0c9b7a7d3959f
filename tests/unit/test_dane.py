"""DANE: which TLSA records count, and which certificates they vouch for; all of them real ones."""

from __future__ import annotations

import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.support.certificates import DAY, NOW, Made, make
from zonerelay.delivery.peer import UntrustedCertificateError
from zonerelay.delivery.tls.dane import MAX_RECORDS, usable, verify
from zonerelay.routing.dns.answers import TlsaRecord

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
    assert len(usable([TlsaRecord(3, 1, 1, bytes([n]) * 32) for n in range(100)])) == MAX_RECORDS


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


def test_a_bare_rsa_key() -> None:
    authority = make(
        common_name="RSA", authority=True, key=rsa.generate_private_key(public_exponent=65537, key_size=2048)
    )
    assert check((make("mx.example.com", issuer=authority),), record(authority, 2, 1, 0)) == "mx.example.com"
    assert refusal((STRANGER,), record(authority, 2, 1, 0))


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
