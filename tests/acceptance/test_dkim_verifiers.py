"""Signatures as OpenDKIM sees them, which most of the mail world has verified with: RSA and Ed25519."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.dkim import NOW, entry, keys_of, records, sign
from tests.support.opendkim import OpenDkim
from zonerelay.message.dkim.signature import ED25519, RSA, RelaxedBody

ENTRIES = (entry("example.com", "rsa"), entry("example.com", "ed", "ed.pem"))
KEYS = keys_of(*ENTRIES).for_author("example.com", NOW)
BOTH_PASS, BOTH_FAIL = {RSA: "pass", ED25519: "pass"}, {RSA: "fail", ED25519: "fail"}

HEADER = (
    b"From: Ann <ann@example.com>\r\n"
    b"To: bob@example.net,\r\n\tcarl@example.net\r\n"
    b"Subject:  Hello   there \r\n"
    b"Date: Sat, 21 Nov 2026 10:00:00 +0000\r\n"
    b"Message-ID: <1@example.com>\r\n"
)
BODY = b"Hello  Bob, \r\n\r\n.how are you?\r\n"


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> OpenDkim:
    return OpenDkim(tmp_path_factory.mktemp("opendkim"), records(ENTRIES))


def signed(header: bytes, body: bytes) -> bytes:
    relaxed = RelaxedBody()
    relaxed.feed(body)
    return sign(header, relaxed.digest(), KEYS, now=NOW) + header + b"\r\n" + body


MESSAGES = [
    ("a plain one", HEADER, BODY),
    ("no body", HEADER, b""),
    ("a body of empty lines", HEADER, b"\r\n\r\n"),
    ("trailing blanks and empty lines", HEADER, b"a \t b\t\r\n \r\n\r\n \t\r\n"),
    ("lines of blanks within", HEADER, b" a\r\n  \r\n\t\r\nb\r\n"),
    ("eight bits", "From: Änn <ann@example.com>\r\nSubject: Grüße\r\n".encode(), "Grüße\r\n".encode()),
    ("empty values", b"From: ann@example.com\r\nSubject:\r\nTo: \r\n", BODY),
    ("values on the next line", b"From:\r\n ann@example.com\r\nSubject:\r\n\tx\r\n  y\r\n", BODY),
    ("the same field twice", b"From: ann@example.com\r\nTo: a\r\nSubject: x\r\nTo: b\r\n", BODY),
    ("everything that is signed", HEADER + b"".join(
        b"%b: <x@example.com>\r\n" % name
        for name in (b"Sender", b"Reply-To", b"Cc", b"In-Reply-To", b"References", b"MIME-Version",
                     b"Content-Type", b"List-Id", b"List-Unsubscribe-Post", b"Resent-From")
    ), BODY),
    ("a large body", HEADER, b"some words and more of them, to fill a line\r\n" * 20_000),
]  # fmt: skip


@pytest.mark.parametrize(("why", "header", "body"), MESSAGES, ids=[case[0] for case in MESSAGES])
def test_a_message_passes(why: str, header: bytes, body: bytes, verifier: OpenDkim) -> None:
    assert verifier.verdicts(signed(header, body)) == BOTH_PASS


CHANGES: list[tuple[str, Callable[[bytes], bytes], bool]] = [
    ("a From on top", lambda m: b"From: <eve@example.org>\r\n" + m, False),
    ("a Subject on top", lambda m: b"Subject: Win\r\n" + m, False),
    ("a Reply-To where there was none", lambda m: b"Reply-To: eve@example.org\r\n" + m, False),
    ("another word", lambda m: m.replace(b"how are", b"who are"), False),
    ("a line at the end", lambda m: m + b"PS: click here\r\n", False),
    ("trace fields", lambda m: b"Received: from us\r\nReturn-Path: <a@b>\r\n" + m, True),
    ("a list's field", lambda m: b"List-Id: <a.b>\r\n" + m, True),
    ("folded anew", lambda m: m.replace(b",\r\n\tcarl", b",   \r\n  carl"), True),
    ("blanks and empty lines", lambda m: m.replace(b"are you", b"are \t you") + b" \r\n\r\n", True),
]


@pytest.mark.parametrize(("why", "change", "holds"), CHANGES, ids=[case[0] for case in CHANGES])
def test_what_a_signature_bears_on_the_way(
    why: str, change: Callable[[bytes], bytes], holds: bool, verifier: OpenDkim
) -> None:
    message = signed(HEADER, BODY)
    changed = change(message)
    assert changed != message
    assert verifier.verdicts(changed) == (BOTH_PASS if holds else BOTH_FAIL)


def test_messages_made_at_random_pass(verifier: OpenDkim) -> None:
    chance = random.Random(6376)
    for _ in range(40):
        header, body = _header(chance), _body(chance)
        assert verifier.verdicts(signed(header, body)) == BOTH_PASS, (header, body)


def _header(chance: random.Random) -> bytes:
    names = [b"Subject", b"To", b"CC", b"date", b"Reply-To", b"Content-Type", b"List-Id", b"X-A", b"Received"]
    fields = [b"From: ann@example.com\r\n"]
    for _ in range(chance.randrange(8)):
        words = [_word(chance) for _ in range(chance.randrange(1, 6))]
        value = b"".join(word + chance.choice((b" ", b"  ", b"\t", b"\r\n ", b" \r\n\t")) for word in words)
        fields.append(chance.choice(names) + b":" + value + b"end\r\n")
    chance.shuffle(fields)
    return b"".join(fields)


def _word(chance: random.Random) -> bytes:
    return bytes(chance.choices(b'ab:;="<@,\xc3\xa9', k=chance.randrange(1, 9)))


def _body(chance: random.Random) -> bytes:
    parts = [b"\r\n", b"\r\n", b" ", b"\t", b"  ", b".", b"word", b"\xff"]
    return b"".join(chance.choices(parts, k=chance.randrange(60))) + b"\r\n"


def test_a_weak_key_is_what_opendkim_takes_too(tmp_path: Path) -> None:
    """1024 bits: the least that RFC 8301 3.2 lets anybody sign with."""
    weak = entry("example.com", "weak", "weak.pem")
    relaxed = RelaxedBody()
    relaxed.feed(BODY)
    keys = keys_of(weak).for_author("example.com", NOW)
    message = sign(HEADER, relaxed.digest(), keys, now=NOW) + HEADER + b"\r\n" + BODY
    assert OpenDkim(tmp_path, records([weak])).verdicts(message) == {RSA: "pass"}
