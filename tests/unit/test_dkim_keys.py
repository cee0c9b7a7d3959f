"""Which keys sign whose mail, and when; keys that cannot be used."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from tests.support.dkim import NOW, ed25519_pem, entry, keys_of, read, rsa_pem
from zonerelay.message.dkim.keys import DkimKeys, load_private_key
from zonerelay.routing.idna import ascii_domain

DAY = 86_400.0


def chosen(keys: DkimKeys, domain: str, now: float = NOW) -> list[tuple[str, str]]:
    return [(key.domain, key.selector) for key in keys.for_author(domain, now)]


def test_both_algorithms_sign_rsa_first() -> None:
    keys = keys_of(entry("example.com", "ed", "ed.pem"), entry("example.com", "rsa"))
    assert chosen(keys, "example.com") == [("example.com", "rsa"), ("example.com", "ed")]


def test_nothing_signs_for_other_domains() -> None:
    keys = keys_of(entry("example.com", "s"))
    for domain in ("example.net", "a.example.com", "com", "notexample.com", "", "..", "a b", "[192.0.2.1]"):
        assert chosen(keys, domain) == []


def test_a_wildcard_signs_for_the_names_below_with_their_own_domain() -> None:
    keys = keys_of(entry("*.example.com", "s"))
    assert chosen(keys, "a.example.com") == [("a.example.com", "s")]
    assert chosen(keys, "b.a.example.com") == [("b.a.example.com", "s")]
    assert chosen(keys, "example.com") == []


def test_a_signing_domain_stands_for_all_names_below_a_wildcard() -> None:
    keys = keys_of(entry("*.example.com", "s", signing_domain="example.com"))
    assert chosen(keys, "b.a.example.com") == [("example.com", "s")]


def test_the_very_name_goes_before_wildcards_and_the_nearest_wildcard_before_others() -> None:
    keys = keys_of(
        entry("*.example.com", "far"), entry("*.a.example.com", "near"), entry("b.a.example.com", "exact")
    )
    assert chosen(keys, "b.a.example.com") == [("b.a.example.com", "exact")]
    assert chosen(keys, "c.a.example.com") == [("c.a.example.com", "near")]
    assert chosen(keys, "d.example.com") == [("d.example.com", "far")]


def test_a_wildcard_signs_while_no_key_of_the_very_name_fits() -> None:
    keys = keys_of(entry("*.example.com", "far"), entry("a.example.com", "exact", not_before=NOW + 1))
    assert chosen(keys, "a.example.com") == [("a.example.com", "far")]
    assert chosen(keys, "a.example.com", NOW + 1) == [("a.example.com", "exact")]


def test_names_are_compared_as_a_labels_without_case() -> None:
    keys = keys_of(entry("bücher.example", "s"), entry("example.com", "t"))
    for domain in ("bücher.example", "BÜCHER.example", "xn--bcher-kva.example", "XN--BCHER-KVA.Example."):
        assert chosen(keys, domain) == [("xn--bcher-kva.example", "s")]
    assert chosen(keys, "EXAMPLE.com") == [("example.com", "t")]


# Rotation.


def test_one_key_follows_the_other_at_the_very_second() -> None:
    keys = keys_of(
        entry("example.com", "old", "rsa.pem", not_after=NOW),
        entry("example.com", "new", "rsa2.pem", not_before=NOW),
    )
    assert chosen(keys, "example.com", NOW - 0.001) == [("example.com", "old")]
    assert chosen(keys, "example.com", NOW) == [("example.com", "new")]


def test_of_two_that_overlap_the_later_one_signs() -> None:
    old = entry("example.com", "old", "rsa.pem", not_after=NOW + DAY)
    new = entry("example.com", "new", "rsa2.pem", not_before=NOW)
    for entries in ((old, new), (new, old)):
        keys = keys_of(*entries)
        assert chosen(keys, "example.com", NOW - 1) == [("example.com", "old")]
        assert chosen(keys, "example.com", NOW) == [("example.com", "new")]
        assert chosen(keys, "example.com", NOW + 2 * DAY) == [("example.com", "new")]


def test_each_algorithm_is_rotated_by_itself() -> None:
    keys = keys_of(
        entry("example.com", "rsa-old", "rsa.pem"),
        entry("example.com", "ed-old", "ed.pem"),
        entry("example.com", "rsa-new", "rsa2.pem", not_before=NOW),
    )
    assert chosen(keys, "example.com", NOW - 1) == [("example.com", "rsa-old"), ("example.com", "ed-old")]
    assert chosen(keys, "example.com", NOW) == [("example.com", "rsa-new"), ("example.com", "ed-old")]


def test_each_signing_domain_has_its_own_signature() -> None:
    keys = keys_of(entry("example.com", "s"), entry("example.com", "s", signing_domain="host.example"))
    assert chosen(keys, "example.com") == [("example.com", "s"), ("host.example", "s")]


def test_after_the_last_key_nothing_signs() -> None:
    keys = keys_of(entry("example.com", "s", not_after=NOW))
    assert chosen(keys, "example.com", NOW) == []


def test_ten_thousand_domains_are_found_as_fast_as_one() -> None:
    keys = keys_of(*(entry(f"d{number}.example", "s", "ed.pem") for number in range(10_000)))
    few = keys_of(entry("d9999.example", "s", "ed.pem"))

    def cost(of: DkimKeys) -> float:
        began = time.process_time()
        for _ in range(2000):
            of.for_author("d9999.example", NOW)
        return time.process_time() - began

    assert min(cost(keys) for _ in range(3)) < 5 * min(cost(few) for _ in range(3))


# Advice.

ADVICE = [
    ("a weak key", [entry("example.com", "s", "weak.pem")], "dkim[0].key_file: RSA with 1024 bits is weak"),
    (
        "all over",
        [entry("example.com", "s", not_after=NOW)],
        "dkim[0]: nothing signs mail of example.com now: the validity of its last key ended on 2026-05-28",
    ),
    (
        "not begun",
        [entry("example.com", "s", not_before=NOW + DAY)],
        "dkim[0]: nothing signs mail of example.com now: the validity of its next key begins on 2026-05-29",
    ),
    (
        "ends soon",
        [entry("example.com", "s", not_after=NOW + 13 * DAY)],
        "dkim[0].not_after: this key ends on 2026-06-10",
    ),
    (
        "ends soon, and only another algorithm goes on",
        [entry("example.com", "s", not_after=NOW + 13 * DAY), entry("example.com", "e", "ed.pem")],
        "no other rsa-sha256 key for example.com takes its place",
    ),
    (
        "its successor comes too late",
        [
            entry("example.com", "s", not_after=NOW + 13 * DAY),
            entry("example.com", "t", "rsa2.pem", not_before=NOW + 14 * DAY),
        ],
        "dkim[0].not_after",
    ),
]


@pytest.mark.parametrize(("why", "entries", "advice"), ADVICE, ids=[case[0] for case in ADVICE])
def test_what_an_operator_should_see_to(why: str, entries: list[object], advice: str) -> None:
    (found,) = keys_of(*entries).advice(NOW)  # type: ignore[arg-type]  # a table of one type would be wider
    assert advice in found


def test_keys_that_are_in_order_are_not_spoken_of() -> None:
    keys = keys_of(
        entry("example.com", "s", not_after=NOW + 13 * DAY),
        entry("example.com", "t", "rsa2.pem", not_before=NOW + 12 * DAY),
        entry("example.com", "e", "ed.pem", not_after=NOW + 15 * DAY),
    )
    assert list(keys.advice(NOW)) == []


# Keys that cannot be used.


def other_pem(kind: str) -> bytes:
    if kind == "encrypted":
        key = load_pem_private_key(rsa_pem(), None)
        return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    if kind == "elliptic":
        curve = ec.generate_private_key(ec.SECP256R1())
        return curve.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    small = rsa.generate_private_key(public_exponent=65537, key_size=1024)
    numbers = small.private_numbers()
    broken = rsa.RSAPrivateNumbers(
        numbers.p,
        numbers.q,
        numbers.d + 2,
        numbers.dmp1 + 2,
        numbers.dmq1,
        numbers.iqmp,
        numbers.public_numbers,
    )
    key = broken.private_key(unsafe_skip_rsa_key_validation=True)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def pem_of_size(bits: int) -> bytes:
    """Its factors are no primes, which take their time to find; nobody will sign with it."""
    p, q = (1 << bits // 2) - 1, (1 << bits // 2) - 3
    public = rsa.RSAPublicNumbers(65537, p * q)
    numbers = rsa.RSAPrivateNumbers(p, q, 65537, 65537, 65537, 65537, public)
    key = numbers.private_key(unsafe_skip_rsa_key_validation=True)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


UNUSABLE = [
    ("nothing in it", b"", "is not a private key in PEM"),
    ("no PEM", b"hello", "is not a private key in PEM"),
    ("encrypted", other_pem("encrypted"), "is encrypted"),
    ("an elliptic curve", other_pem("elliptic"), "is neither an RSA nor an Ed25519 key"),
    ("broken numbers", other_pem("broken"), "has an RSA key with inconsistent numbers"),
    ("cut off", rsa_pem()[:800], "is not a private key in PEM"),
]


@pytest.mark.parametrize(("why", "pem", "problem"), UNUSABLE, ids=[case[0] for case in UNUSABLE])
def test_a_key_that_cannot_be_used_is_refused(why: str, pem: bytes, problem: str) -> None:
    entries = [entry("example.com", "s"), entry("example.com", "t", "bad.pem")]
    with pytest.raises(ValueError, match=r"dkim\[1\]\.key_file: bad\.pem .*" + problem) as caught:
        DkimKeys(
            entries,
            read=lambda path: pem if path == Path("bad.pem") else read(path),
            ascii_domain=ascii_domain,
        )
    assert not any(line in str(caught.value) for line in pem.decode().split("\n") if len(line) > 8)


def test_keys_of_sizes_that_verifiers_refuse_are_refused() -> None:
    for bits in (512, 5120):
        with pytest.raises(ValueError, match=f"has an RSA key of {bits} bits; 1024 to 4096"):
            load_private_key(pem_of_size(bits))


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"^dkim\[0\]\.key_file: gone\.pem cannot be read: No such file"):
        keys_of(entry("example.com", "s", "gone.pem"))


def test_a_domain_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match=r"^dkim\[0\]\.domain: "):
        keys_of(entry("bü cher.example", "s"))


def test_no_key_shows_in_a_repr() -> None:
    keys = keys_of(entry("example.com", "e", "ed.pem"))
    assert "sign" not in repr(keys.for_author("example.com", NOW))
    assert "sign=" not in repr(load_private_key(ed25519_pem()))
