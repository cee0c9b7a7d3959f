"""DKIM: whose mail it is, which keys sign it, what is signed and hashed, and where signatures are made."""

import asyncio
import base64
import hashlib
import re
import threading
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from dkim.canonicalization import Relaxed
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.dkim import NOW, ed25519_pem, entry, keys_of, read, records, rsa_pem, sign, verified
from zonerelay.config.settings import DkimSettings
from zonerelay.delivery.rewrite.rendering import DkimSigner
from zonerelay.message.dkim import signature
from zonerelay.message.dkim.keys import DkimKeys, load_private_key
from zonerelay.message.dkim.signature import ED25519, RSA, DkimKey, RelaxedBody, author_domain
from zonerelay.routing.addresses import ascii_domain

# How addresses are read is in test_address_list.
AUTHORS = [
    ("an address alone", "ann@example.com", "example.com"),
    ("no space between", "Ann<ann@example.com>", "example.com"),
    ("as it is written", "<ann@Example.COM>", "Example.COM"),
    ("a U-label", "Änn <änn@bücher.example>", "bücher.example"),
    ("the first of several", "ann@example.com, bob@example.net", "example.com"),
    ("an address in a quoted name", '"eve@evil.example, x" <ann@example.com>', "example.com"),
    ("a quote in a quoted name", r'"a \" <eve@evil.example> " <ann@example.com>', "example.com"),
    ("an address in a comment", "(eve@evil.example) ann@example.com", "example.com"),
    ("a comma in a name that is not quoted", "Smith, Ann <ann@example.com>", "example.com"),
    ("an empty group", "undisclosed:;", ""),
    ("nothing", "", ""),
    ("a name alone", "ann", ""),
    ("the null address", "<>", ""),
    ("an address literal", "ann@[192.0.2.1]", ""),
]


@pytest.mark.parametrize(("why", "value", "domain"), AUTHORS, ids=[case[0] for case in AUTHORS])
def test_the_domain_of_the_first_address(why: str, value: str, domain: str) -> None:
    header = f"To: x@y.example\r\nFrom: {value}\r\nSubject: z\r\n".encode()
    assert author_domain(header) == domain


AUTHOR_FIELDS = [
    ("folded", b"From: Ann\r\n\t<ann@example.com>\r\n", "example.com"),
    ("on the next line", b"From:\r\n ann@example.com\r\n", "example.com"),
    ("in other letters", b"X: y\r\nfRoM :ann@example.com\r\n", "example.com"),
    ("without a line end", b"From: ann@example.com", "example.com"),
    ("two fields", b"From: ann@example.com\r\nFrom: ann@example.com\r\n", ""),
    ("none", b"Subject: From: ann@example.com\r\n", ""),
    ("in a continuation", b"Subject: x\r\n From: ann@example.com\r\n", ""),
    ("octets that are no UTF-8", b"From: \xff <ann@example.com>\r\n", "example.com"),
    ("before the @", b"From: j\xfcrgen@example.com\r\n", "example.com"),
    ("in the domain", b"From: ann@b\xfccher.example\r\n", ""),
    ("too long", b"From: " + b"x" * 70_000 + b" <ann@example.com>\r\n", ""),
    ("no header", b"", ""),
]


@pytest.mark.parametrize(("why", "header", "domain"), AUTHOR_FIELDS, ids=[case[0] for case in AUTHOR_FIELDS])
def test_the_field_is_found_as_signing_finds_it(why: str, header: bytes, domain: str) -> None:
    assert author_domain(header) == domain


ENCODINGS = [
    ("latin-1", "Jürgen Müß, Straße"),
    ("cp1251", "Иван Петров"),
    ("koi8-r", "Иван Петров"),
    ("gbk", "丂丂 中文乗亅乣"),
    ("gb18030", "㐀 中文"),
    ("big5", "功能 許蓋"),
    ("shift-jis", "表示 ソース 構能"),
    ("euc-jp", "日本語"),
    ("euc-kr", "한국어"),
    ("iso-2022-jp", "日本語 表示 ソース 三日"),
    ("utf-8", "日本語"),
]


@pytest.mark.parametrize(("encoding", "name"), ENCODINGS, ids=[case[0] for case in ENCODINGS])
@pytest.mark.parametrize("value", ["{} <ann@example.com>", '"{}" <ann@example.com>', "ann@example.com ({})"])
def test_a_name_in_any_encoding(encoding: str, name: str, value: str) -> None:
    for shown in (name, *name):
        written = shown if value[0] == '"' else shown.replace(",", "")
        header = f"From: {value.format(written)}\r\n".encode(encoding)
        assert author_domain(header) == "example.com", header


# ---- The relaxed body hash (RFC 6376 3.4.4) ------------------------------------------------------


BODIES = [
    ("the empty body", b"", b""),
    ("one empty line", b"\r\n", b""),
    ("empty lines only", b"\r\n\r\n\r\n", b""),
    ("blanks only, and no line end", b" \t ", b""),
    ("lines of blanks only", b" \r\n\t\r\n \t", b""),
    ("the example of RFC 6376 3.4.5", b" C \r\nD \t E\r\n\r\n\r\n", b" C\r\nD E\r\n"),
    ("no final line end", b"text", b"text\r\n"),
    ("blanks at the end, and no line end", b"text \t", b"text\r\n"),
    ("empty lines within", b"a\r\n\r\n\r\nb\r\n", b"a\r\n\r\n\r\nb\r\n"),
    ("lines of blanks within", b"a\r\n \t\r\n\t\r\nb\r\n", b"a\r\n\r\n\r\nb\r\n"),
    ("lines of blanks at the end", b"a\r\n  \r\n \r\n", b"a\r\n"),
    ("a run of blanks of every kind", b"a \t \t b\r\n", b"a b\r\n"),
    ("a blank before the first word", b"  \ta\r\n", b" a\r\n"),
    ("an indented line after empty ones", b"a\r\n\r\n  b\r\n", b"a\r\n\r\n b\r\n"),
    ("other white space is text", b"a\x0b\x0c \xa0\r\n\x0c\r\n", b"a\x0b\x0c \xa0\r\n\x0c\r\n"),
    ("a long run of blanks", b"a" + b" " * 1000 + b"b\r\n", b"a b\r\n"),
]


def base64_sha256(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def digest(*pieces: bytes) -> str:
    body = RelaxedBody()
    for piece in pieces:
        body.feed(piece)
    return body.digest()


@pytest.mark.parametrize(("why", "body", "canonical"), BODIES, ids=[case[0] for case in BODIES])
def test_the_canonical_body_is_hashed(why: str, body: bytes, canonical: bytes) -> None:
    expected = base64_sha256(canonical)
    assert digest(body) == expected
    assert digest(*(body[at : at + 1] for at in range(len(body)))) == expected
    for at in range(min(len(body), 64)):
        assert digest(body[:at], body[at:]) == expected


def test_the_hash_may_be_asked_for_in_between() -> None:
    body = RelaxedBody()
    body.feed(b"a \r\n\r")
    assert body.digest() == base64_sha256(b"a\r\n")
    body.feed(b"\n b")
    assert body.digest() == base64_sha256(b"a\r\n\r\n b\r\n")


ANY_LINE = st.text(alphabet="ab \t\x0b\xa0", max_size=8).map(lambda text: text.encode("latin-1"))
ANY_BODIES = st.lists(ANY_LINE | st.just(b" " * 40), max_size=12).map(b"\r\n".join)


@settings(max_examples=100, deadline=None)
@given(body=ANY_BODIES, cuts=st.lists(st.integers(0, 120), max_size=8))
def test_it_is_what_dkimpy_hashes(body: bytes, cuts: list[int]) -> None:
    """dkimpy keeps blanks at the end of a body that lacks its last line end; none is sent like that."""
    sent = body if body.endswith(b"\r\n") or not body else body + b"\r\n"
    places = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    pieces = [body[begin:end] for begin, end in pairwise(places)]
    assert digest(*pieces) == base64_sha256(Relaxed.canonicalize_body(sent))


def test_empty_lines_that_are_kept_back_take_no_memory() -> None:
    lines = b"\r\n" * 32_000
    body = RelaxedBody()
    body.feed(b"a\r\n")
    tracemalloc.start()
    try:
        for _ in range(100):
            body.feed(lines)
        body.feed(b"b")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000
    assert body.digest() == base64_sha256(b"a\r\n" + lines * 100 + b"b\r\n")


def test_blanks_without_end_are_one_space() -> None:
    assert signature.single_spaces(b"a" + b" \t" * 100_000 + b"b") == b"a b"
    assert digest(*[b" " * 1000] * 100, b"a") == base64_sha256(b" a\r\n")


# ---- Which keys sign whose mail, and when --------------------------------------------------------


DAY = 86_400.0


def key(
    selector: str, file: str = "rsa.pem", *, not_before: float = 0.0, not_after: float = 0.0
) -> DkimSettings:
    return entry("example.com", selector, file, not_before=not_before, not_after=not_after)


OTHER_DOMAINS = ("example.net", "a.example.com", "com", "notexample.com", "", "..", "a b", "[192.0.2.1]")
BOOKS = ("bücher.example", "BÜCHER.example", "xn--bcher-kva.example", "XN--BCHER-KVA.Example.")
OLD, NEW = key("old", not_after=NOW + DAY), key("new", "rsa2.pem", not_before=NOW)
# Keys, and which of them sign as selector@domain for an author's domain so many seconds from now.
CHOICES: list[tuple[str, list[DkimSettings], dict[tuple[str, float], str]]] = [
    ("both algorithms, RSA first", [key("e", "ed.pem"), key("r")],
     {("example.com", 0): "r@example.com e@example.com"}),
    ("no other domain", [key("s")],
     {(other, 0): "" for other in OTHER_DOMAINS}),
    ("a wildcard for the names below it", [entry("*.example.com", "s")],
     {("a.example.com", 0): "s@a.example.com", ("b.a.example.com", 0): "s@b.a.example.com",
      ("example.com", 0): ""}),
    ("one domain for all of them", [entry("*.example.com", "s", signing_domain="example.com")],
     {("b.a.example.com", 0): "s@example.com"}),
    ("the very name, then the nearest wildcard",
     [entry("*.example.com", "far"), entry("*.a.example.com", "near"), entry("b.a.example.com", "exact")],
     {("b.a.example.com", 0): "exact@b.a.example.com", ("c.a.example.com", 0): "near@c.a.example.com",
      ("d.example.com", 0): "far@d.example.com"}),
    ("a wildcard while no key of the very name fits",
     [entry("*.example.com", "far"), entry("a.example.com", "exact", not_before=NOW + 1)],
     {("a.example.com", 0): "far@a.example.com", ("a.example.com", 1): "exact@a.example.com"}),
    ("A-labels, in any case", [entry("bücher.example", "s"), key("t")],
     {("EXAMPLE.com", 0): "t@example.com", **{(name, 0): "s@xn--bcher-kva.example" for name in BOOKS}}),
    ("one follows the other at the very second", [key("old", not_after=NOW), NEW],
     {("example.com", -0.001): "old@example.com", ("example.com", 0): "new@example.com"}),
    *(("of two that overlap the later one", keys,
       {("example.com", -1): "old@example.com", ("example.com", 0): "new@example.com",
        ("example.com", 2 * DAY): "new@example.com"}) for keys in ([OLD, NEW], [NEW, OLD])),
    ("each algorithm is rotated by itself", [key("old"), key("e", "ed.pem"), NEW],
     {("example.com", -1): "old@example.com e@example.com",
      ("example.com", 0): "new@example.com e@example.com"}),
    ("each signing domain has its own", [key("s"), entry("example.com", "s", signing_domain="host.example")],
     {("example.com", 0): "s@example.com s@host.example"}),
    ("nothing after the last", [key("s", not_after=NOW)], {("example.com", 0): ""}),
]  # fmt: skip


@pytest.mark.parametrize(("why", "entries", "wanted"), CHOICES, ids=[case[0] for case in CHOICES])
def test_who_signs(why: str, entries: list[DkimSettings], wanted: dict[tuple[str, float], str]) -> None:
    keys = keys_of(*entries)
    for (domain, later), signers in wanted.items():
        found = [f"{each.selector}@{each.domain}" for each in keys.for_author(domain, NOW + later)]
        assert found == signers.split(), domain


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
        "dkim[0]: no key signs mail of example.com now: its last key expired on 2026-05-28",
    ),
    (
        "not begun",
        [entry("example.com", "s", not_before=NOW + DAY)],
        "dkim[0]: no key signs mail of example.com now: its next key is valid from 2026-05-29",
    ),
    (
        "ends soon",
        [entry("example.com", "s", not_after=NOW + 13 * DAY)],
        "dkim[0].not_after: this key expires on 2026-06-10",
    ),
    (
        "ends soon, and only another algorithm goes on",
        [entry("example.com", "s", not_after=NOW + 13 * DAY), entry("example.com", "e", "ed.pem")],
        "no other rsa-sha256 key for example.com replaces it",
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
def test_what_an_operator_should_see_to(why: str, entries: list[DkimSettings], advice: str) -> None:
    (found,) = keys_of(*entries).advice(NOW)
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
        key = serialization.load_pem_private_key(rsa_pem(), None)
        return key.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
        )
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
    ("broken numbers", other_pem("broken"), "contains a damaged RSA key"),
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
        with pytest.raises(ValueError, match=f"has an RSA key of {bits} bits; use 2048"):
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


# ---- DKIM-Signature fields -----------------------------------------------------------------------


ENTRIES = (entry("example.com", "ed", "ed.pem"), entry("example.com", "rsa"))
PUBLISHED = records(ENTRIES)
KEYS = keys_of(*ENTRIES).for_author("example.com", NOW)

SIGNED_HEADER = (
    b"Received: from somewhere\r\n"
    b"From: Ann <ann@example.com>\r\n"
    b"To: bob@example.net,\r\n\tcarl@example.net\r\n"
    b"Subject:  Hello   there \r\n"
    b"Date: Sat, 21 Nov 2026 10:00:00 +0000\r\n"
    b"Message-ID: <1@example.com>\r\n"
)
BODY = b"Hello  Bob, \r\n\r\nhow are you?\r\n"


def signed(header: bytes, body: bytes, keys: tuple[DkimKey, ...] = KEYS) -> bytes:
    """As it is sent: the last line has its end."""
    relaxed = RelaxedBody()
    relaxed.feed(body)
    head = sign(header, relaxed.digest(), keys, now=NOW) + header
    return head + b"\r\n" + body + (b"" if body.endswith(b"\r\n") or not body else b"\r\n")


def names(message: bytes) -> list[str]:
    """The names in h= of the first signature."""
    unfolded = re.sub(rb"\r\n ", b" ", message)
    found = re.search(rb" h=([^;]*);", unfolded)
    assert found is not None
    return found[1].replace(b" ", b"").decode().split(":")


def test_rsa_is_first_whatever_the_order_of_the_keys() -> None:
    for keys in (KEYS, KEYS[::-1]):
        message = signed(SIGNED_HEADER, BODY, keys)
        assert re.findall(rb"a=([a-z0-9-]+);", message) == [b"rsa-sha256", b"ed25519-sha256"]


def test_without_keys_there_is_no_field() -> None:
    assert sign(SIGNED_HEADER, "", (), now=NOW) == b""


def test_the_fields_of_a_signature() -> None:
    field = re.sub(rb"\r\n ", b" ", sign(SIGNED_HEADER, "aGFzaA==", KEYS[:1], now=NOW)).decode()
    assert field.startswith(
        "DKIM-Signature: v=1; a=rsa-sha256; c=relaxed/relaxed; d=example.com; s=rsa; "
        f"t={NOW:.0f}; bh=aGFzaA==; h=from:from:to:to:cc:reply-to:subject:subject:"
    )
    assert field.endswith("\r\n")
    assert " l=" not in field
    assert " x=" not in field


def test_lines_are_not_longer_than_78_octets() -> None:
    header = SIGNED_HEADER + b"".join(
        b"%b: x\r\n" % name
        for name in (b"Sender", b"References", b"In-Reply-To", b"MIME-Version", b"List-Id")
    )
    lines = sign(header, "a" * 44, KEYS, now=NOW).split(b"\r\n")
    assert max(map(len, lines)) <= 78
    assert all(line[:1] in b" D" for line in lines)


def test_names_too_long_for_a_line_stand_alone() -> None:
    domain = ".".join(["x" * 60] * 4)
    key = DkimKey(domain, "s" * 63, KEYS[1].algorithm, KEYS[1].sign)
    message = signed(SIGNED_HEADER, BODY, (key,))
    published = {f"{key.selector}._domainkey.{domain}": PUBLISHED["ed._domainkey.example.com"]}
    assert verified(message, published) == [True]
    assert max(map(len, message.split(b"\r\n"))) == len(f" d={domain};")


SIGNED = [
    ("what every reader shows, there or not", b"", ["from", "to", "cc", "reply-to", "subject", "date"]),
    ("a field that is there, and one more of it", b"Sender: a@b\r\n", ["sender", "sender"]),
    ("a message's type", b"Content-Type: text/html\r\n", ["content-type", "content-type"]),
    ("one-click", b"List-Unsubscribe-Post: x\r\n", ["list-unsubscribe-post", "list-unsubscribe-post"]),
    ("a list's fields, as many as there are", b"List-Id: x\r\n", ["list-id"]),
    ("who sent it on", b"Resent-From: a\r\nResent-From: b\r\n", ["resent-from", "resent-from"]),
    ("no trace", b"Received: x\r\nReturn-Path: y\r\nAuthentication-Results: z\r\nX-Own: a\r\n", []),
]


@pytest.mark.parametrize(("why", "fields", "expected"), SIGNED, ids=[case[0] for case in SIGNED])
def test_what_is_signed(why: str, fields: bytes, expected: list[str]) -> None:
    least = ["from", "to", "cc", "reply-to", "subject", "date"]
    found = names(signed(fields, BODY))
    assert sorted(found) == sorted([*least, *(name for name in expected if name not in least)])


CHANGES: list[tuple[str, Callable[[bytes], bytes], bool]] = [
    ("a From on top", lambda m: b"From: <eve@example.org>\r\n" + m, False),
    ("a From below", lambda m: m.replace(b"\r\n\r\n", b"\r\nFrom: eve\r\n\r\n", 1), False),
    ("another Subject", lambda m: b"Subject: Win\r\n" + m, False),
    ("a Cc where there was none", lambda m: b"Cc: eve@example.org\r\n" + m, False),
    ("a Reply-To where there was none", lambda m: b"Reply-To: eve@example.org\r\n" + m, False),
    ("another recipient", lambda m: m.replace(b"bob@", b"eve@"), False),
    ("another word", lambda m: m.replace(b"how are", b"who are"), False),
    ("a line at the end", lambda m: m + b"PS: click here\r\n", False),
    ("the Date gone", lambda m: re.sub(rb"Date:.*\r\n", b"", m), False),
    ("words run together", lambda m: m.replace(b"Hello   there", b"Hellothere"), False),
    ("trace fields", lambda m: b"Received: from us\r\nAuthentication-Results: x\r\n" + m, True),
    ("a list's field", lambda m: b"List-Id: <a.b>\r\n" + m, True),
    ("names in capitals", lambda m: m.replace(b"Subject:", b"SUBJECT:"), True),
    ("folded anew", lambda m: m.replace(b"bob@example.net,\r\n\t", b"\r\n  bob@example.net, "), True),
    ("unfolded", lambda m: m.replace(b",\r\n\tcarl", b",  carl"), True),
    ("blanks at the ends of lines", lambda m: m.replace(b"you?\r\n", b"you? \t\r\n"), True),
    ("runs of blanks", lambda m: m.replace(b"are you", b"are \t you").replace(b"Hello  B", b"Hello B"), True),
    ("tabs", lambda m: m.replace(b"Hello  Bob", b"Hello\tBob"), True),
    ("empty lines at the end", lambda m: m + b"\r\n\r\n", True),
]


@pytest.mark.parametrize(("why", "change", "holds"), CHANGES, ids=[case[0] for case in CHANGES])
def test_what_a_signature_bears_on_the_way(why: str, change: Callable[[bytes], bytes], holds: bool) -> None:
    message = signed(SIGNED_HEADER, BODY)
    changed = change(message)
    assert changed != message
    assert verified(changed, PUBLISHED) == [holds, holds]


def test_an_unsubscribe_address_cannot_be_added_to_the_signed_one() -> None:
    header = SIGNED_HEADER + b"List-Unsubscribe: <https://example.com/u>\r\n"
    message = signed(header, BODY)
    assert verified(message, PUBLISHED) == [True, True]
    assert verified(b"List-Unsubscribe: <https://evil.example>\r\n" + message, PUBLISHED) == [False, False]


def test_fields_of_one_name_are_signed_from_the_bottom_up() -> None:
    message = signed(SIGNED_HEADER + b"Resent-To: first\r\nResent-To: second\r\n", BODY)
    assert verified(b"Resent-To: third\r\n" + message, PUBLISHED) == [True, True]
    assert verified(message.replace(b"first", b"other"), PUBLISHED) == [False, False]


def test_a_thousand_fields_of_one_name_do_not_make_a_signature_of_a_thousand_names() -> None:
    header = SIGNED_HEADER + b"Subject: again\r\n" * 1000
    message = signed(header, BODY)
    assert names(message).count("subject") == signature.MAX_SAME_FIELDS + 1
    assert len(message) - len(header) - len(BODY) < 4000


ODD = [
    ("no empty line, no body", SIGNED_HEADER, b""),
    ("a body without a line end", SIGNED_HEADER, b"text"),
    ("a body of empty lines", SIGNED_HEADER, b"\r\n\r\n"),
    ("only a From", b"From: ann@example.com\r\n", BODY),
    ("nothing that is signed but its absence", b"X-Other: y\r\n", BODY),
    ("empty values", b"From: ann@example.com\r\nSubject:\r\nTo: \r\nCc:\t\r\n", BODY),
    ("a value on the next line", b"From:\r\n ann@example.com\r\nSubject:\r\n \r\n  x\r\n", BODY),
    ("eight-bit values", "From: Änn <ann@example.com>\r\nSubject: Grüße\r\n".encode(), BODY),
    ("octets that are no UTF-8", b"From: \xff\xfe <ann@example.com>\r\nSubject: \x80\r\n", b"\xff\x00\r\n"),
    ("colons in values", b"From: ann@example.com\r\nSubject: a:b: c :d\r\n", BODY),
    ("names in odd letters", b"fRoM: ann@example.com\r\nSUBJECT: x\r\n", BODY),
    ("the same field twice", b"From: ann@example.com\r\nSubject: a\r\nTo: x\r\nSubject: b\r\n", BODY),
]


@pytest.mark.parametrize(("why", "header", "body"), ODD, ids=[case[0] for case in ODD])
def test_odd_messages_are_verified(why: str, header: bytes, body: bytes) -> None:
    assert verified(signed(header, body), PUBLISHED) == [True, True]


def test_a_blank_before_the_colon_is_not_signed() -> None:
    """RFC 5322 4.5.3 lets it stand there; dkimpy does not know that."""
    hashed = [
        sign(header, "", KEYS[1:], now=NOW)
        for header in (
            b"From: a\r\nSubject : x\r\n",
            b"From: a\r\nSubject: x\r\n",
            b"From: a\r\nSubject: y\r\n",
        )
    ]
    assert hashed[0] == hashed[1] != hashed[2]


NAMES = st.sampled_from(
    [b"Subject", b"To", b"cc", b"DATE", b"Reply-To", b"Content-Type", b"List-Id", b"X-A", b"Received"]
)
# No octets here that dkimpy takes for blanks and the RFC does not (VT, FF), nor bare CR or LF, which no
# message in the spool has.
WORDS = st.text(alphabet='ab:;=\t \xa0ÿ"<@', max_size=10).map(lambda text: text.encode("latin-1"))
FOLDS = st.sampled_from([b"\r\n ", b"\r\n\t", b" \r\n  ", b" ", b""])


@st.composite
def fields(draw: st.DrawFn) -> bytes:
    parts = draw(st.lists(st.tuples(WORDS, FOLDS), max_size=4))
    value = b"".join(word + fold for word, fold in parts)
    # A line of blanks only is obsolete, and ends the header for some readers.
    value = re.sub(rb"\r\n[ \t]+(?=\r\n|\Z)", b"", value)
    return draw(NAMES) + b":" + value + b"\r\n"


@settings(max_examples=50, deadline=None)
@given(
    above=st.lists(fields(), max_size=6),
    below=st.lists(fields(), max_size=6),
    lines=st.lists(WORDS, max_size=6),
)
def test_whatever_is_signed_is_verified(above: list[bytes], below: list[bytes], lines: list[bytes]) -> None:
    header = b"".join([*above, b"From: ann@example.com\r\n", *below])
    message = signed(header, b"\r\n".join(lines), KEYS[1:])
    assert verified(message, PUBLISHED) == [True]


LONG_HEADERS = [
    ("one long value", b"Subject: " + b"x " * 128_000 + b"\r\n"),
    ("many lines", b"Subject: x\r\n" + b" y\r\n" * 64_000),
    ("many fields", b"To: x\r\n" * 36_000),
    ("blanks", b"Subject: x" + b" " * 256_000 + b"\r\n"),
    ("colons", b"Subject" + b":" * 256_000 + b"\r\n"),
    ("no field at all", b"x" * 256_000 + b"\r\n"),
]


@pytest.mark.parametrize(("why", "header"), LONG_HEADERS, ids=[case[0] for case in LONG_HEADERS])
def test_a_long_header_takes_time_in_proportion(why: str, header: bytes) -> None:
    """Far below what anything that grows with the square would take."""
    began = time.process_time()
    sign(header, "", KEYS[1:], now=NOW)
    assert time.process_time() - began < 0.5


# ---- Where signatures are made -------------------------------------------------------------------


SHORT_HEADER = b"From: ann@example.com\r\n"


def watched(*files: str) -> tuple[tuple[DkimKey, ...], list[tuple[str, bool]]]:
    """Keys, and who signed with them: the algorithm, and whether in this thread."""
    here, seen = threading.get_ident(), []

    def watch(key: DkimKey) -> DkimKey:
        def signs(digest: bytes) -> bytes:
            seen.append((key.algorithm, threading.get_ident() == here))
            return key.sign(digest)

        return replace(key, sign=signs)

    entries = (entry("example.com", f"s{at}", file) for at, file in enumerate(files))
    return tuple(map(watch, keys_of(*entries).for_author("example.com", NOW))), seen


BOTH = ("rsa.pem", "ed.pem")
WHERE = [
    ("RSA in a thread, Ed25519 here", True, BOTH, 20, [(ED25519, True), (RSA, False)]),
    ("a short RSA key here", True, ("weak.pem",), 2, [(RSA, True)]),
    ("a message that is alone here", True, BOTH, 1, [(ED25519, True), (RSA, True)]),
    ("everything here with one core", False, BOTH, 2, [(ED25519, True), (RSA, True)]),
]


@pytest.mark.parametrize(
    ("why", "beside", "files", "messages", "expected"), WHERE, ids=[case[0] for case in WHERE]
)
async def test_the_thread_is_for_what_is_slow(
    why: str, beside: bool, files: tuple[str, ...], messages: int, expected: list[tuple[str, bool]]
) -> None:
    keys, seen = watched(*files)
    headers = [SHORT_HEADER + b"Subject: %d\r\n" % number for number in range(messages)]
    signing = DkimSigner(threaded=beside)
    try:
        found = await asyncio.gather(*(signing.sign(header, "", keys, now=NOW) for header in headers))
    finally:
        signing.close()
    assert sorted(set(seen)) == expected
    # Neither algorithm has anything random in it.
    assert found == [sign(header, "", keys, now=NOW) for header in headers]


@pytest.mark.parametrize("messages", [1, 2], ids=["here", "in the thread"])
async def test_a_key_that_fails_fails_for_who_asked(messages: int) -> None:
    def broken(digest: bytes) -> bytes:
        raise RuntimeError("no")

    right, _ = watched("rsa.pem")
    signing = DkimSigner(threaded=True)
    keys = [[DkimKey("a.b", "s", RSA, broken, slow=True)], right][:messages]
    try:
        found = await asyncio.gather(
            *(signing.sign(SHORT_HEADER, "", each, now=NOW) for each in keys), return_exceptions=True
        )
    finally:
        signing.close()
    assert isinstance(found[0], RuntimeError)
    assert found[1:] == [sign(SHORT_HEADER, "", right, now=NOW)][: messages - 1]


async def test_signatures_that_wait_at_the_end_are_cancelled() -> None:
    keys, seen = watched("rsa.pem")
    signing = DkimSigner(threaded=True)
    waits = asyncio.ensure_future(signing.sign(SHORT_HEADER, "", keys, now=NOW))
    await asyncio.sleep(0)
    signing.close()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert not seen
