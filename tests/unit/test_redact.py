import re
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zonerelay.model.envelope import NULL_SENDER, Mailbox
from zonerelay.telemetry.logs import redact
from zonerelay.telemetry.logs.redact import TEXT_LIMIT, Redactor, load_or_create_key

REDACTOR = Redactor(b"k" * 32, enabled=True)
ALICE = Mailbox("alice@example.com")
PSEUDONYM = re.compile(r"u-[a-z2-7]{13}@d-[a-z2-7]{13}")


def test_a_mailbox_becomes_a_stable_pseudonym_that_ignores_case() -> None:
    assert PSEUDONYM.fullmatch(REDACTOR.mailbox(ALICE))
    assert REDACTOR.mailbox(ALICE) == REDACTOR.mailbox(Mailbox("Alice@Example.COM"))
    assert Redactor(b"k" * 32, enabled=True).mailbox(ALICE) == REDACTOR.mailbox(ALICE)


def test_another_key_makes_other_pseudonyms() -> None:
    assert Redactor(b"other" * 8, enabled=True).mailbox(ALICE) != REDACTOR.mailbox(ALICE)


def test_lines_join_by_domain_but_not_by_local_part() -> None:
    user, _, domain = REDACTOR.mailbox(ALICE).partition("@")
    assert REDACTOR.mailbox(Mailbox("bob@example.com")).endswith(f"@{domain}")
    assert not REDACTOR.mailbox(Mailbox("alice@example.org")).startswith(user)


def test_the_null_sender_and_login_names_have_their_own_forms() -> None:
    assert REDACTOR.mailbox(NULL_SENDER) == "<>"
    assert re.fullmatch(r"u-[a-z2-7]{13}", REDACTOR.mailbox(Mailbox("app1")))


def test_a_client_is_hidden_and_its_mapped_form_is_the_same_client() -> None:
    assert re.fullmatch(r"c-[a-z2-7]{13}", REDACTOR.client("192.0.2.1"))
    assert REDACTOR.client("::ffff:192.0.2.1") == REDACTOR.client("192.0.2.1")
    assert REDACTOR.client("") == ""


@pytest.mark.parametrize(
    "text",
    [
        "550 5.1.1 <alice@example.com>: user unknown",
        "550 alice@example.com... No such user",
        "recipient (alice@example.com)",
        "'Alice@Example.com' unknown",
        'no "alice@example.com" here',
        "rfc822;alice@example.com;",
        "Mailbox alice@example.com.",
    ],
    ids=["angles", "dots", "parentheses", "quotes", "double quotes", "semicolons", "full stop"],
)
def test_an_address_in_a_reply_joins_with_the_log_of_the_recipient(text: str) -> None:
    cleaned = REDACTOR.text(text)
    assert REDACTOR.mailbox(ALICE) in cleaned
    assert "lice" not in cleaned
    assert "xample" not in cleaned


@pytest.mark.parametrize(
    "secret",
    [
        "o'brien@example.com",
        '"john doe"@example.com',
        "jürgen@bücher.example",
        "alice@[192.0.2.1]",
        "alice+tag=x@sub.example.co.uk",
        "https://example.net/?mail=alice%40example.com",
        "<20240101.abc$def@mail.example.com>",
        "a@b",
    ],
)
def test_every_form_of_address_disappears_from_text(secret: str) -> None:
    cleaned = REDACTOR.text(f"550 {secret} refused")
    assert PSEUDONYM.search(cleaned)
    words = [word for word in re.findall(r"\w{3,}", secret) if word not in ("https", "http")]
    assert not any(word in cleaned for word in words), cleaned


@pytest.mark.parametrize(
    ("text", "mailbox"),
    [
        ("550 rfc822;alice+40example.com unknown", "alice@example.com"),
        ("550 rfc822;Alice+2Btag+40example.com unknown", "alice+tag@example.com"),
        (r"550 utf-8;alice\x{40}example.com unknown", "alice@example.com"),
        ("550 user jane.doe unknown at person.example", "jane.doe@person.example"),
        ("550 5.1.1 Mailbox jane_doe is disabled in person.example", "jane_doe@person.example"),
    ],
)
def test_an_address_in_other_words_is_the_same_address(text: str, mailbox: str) -> None:
    name, _, domain = REDACTOR.mailbox(Mailbox(mailbox)).partition("@")
    cleaned = REDACTOR.text(text)
    assert name in cleaned
    assert domain in cleaned
    assert not re.search("lice|jane|doe|example", cleaned)
    assert REDACTOR.text(cleaned) == cleaned


ABOUT_JANE = [
    ("550 user jane unknown at person.example", "550 user {} unknown at {}"),
    ("550 JANE: no such mailbox here", "550 {}: no such mailbox here"),
    ('550 "jane" is over quota (jane)', '550 "{}" is over quota ({})'),
    ("250 2.1.5 jane", "250 2.1.5 {}"),
    ("550 janet and mary-jane are here, person.example is not", None),
    ("550 unknown at person.example", None),
    ("250 2.0.0 Ok: queued at mx.person.example", None),
]


@pytest.mark.parametrize(("text", "wanted"), ABOUT_JANE, ids=[row[0] for row in ABOUT_JANE])
def test_what_a_peer_says_about_a_mailbox_does_not_name_it(text: str, wanted: str | None) -> None:
    jane = Mailbox("jane@person.example")
    name, _, domain = REDACTOR.mailbox(jane).partition("@")
    cleaned = REDACTOR.about(text, jane)
    if wanted is None:
        assert cleaned == text
    elif wanted.endswith("at {}"):
        assert cleaned == wanted.format(name, domain)
    else:
        assert cleaned == wanted.format(*[name] * wanted.count("{}"))
    assert Redactor(b"", enabled=False).about(text, jane) == text
    assert REDACTOR.about(text, Mailbox("postmaster")) == REDACTOR.text(text)


def test_a_mailbox_without_a_local_part_is_a_name() -> None:
    """`@example.com` has no mailbox: its pseudonym has no domain that would join with others."""
    assert re.fullmatch(r"u-[a-z2-7]{13}", REDACTOR.mailbox(Mailbox("@example.com")))
    assert REDACTOR.mailbox(Mailbox("@example.com")) != REDACTOR.mailbox(Mailbox("example.com"))
    assert REDACTOR.mailbox(Mailbox("a@")).startswith("u-")


@pytest.mark.parametrize(
    "text",
    [
        "250 2.0.0 Ok: queued as 4QxYz in mail.example.com [192.0.2.1]",
        "550 5.1.1 user unknown in virtual alias table",
        "550 recipient 5.1.1 not known",
        "451 call +40 123 later, mailbox is over quota",
    ],
)
def test_text_without_addresses_stays_as_it_is(text: str) -> None:
    assert REDACTOR.text(text) == text


def test_control_characters_and_writing_tricks_become_visible() -> None:
    assert REDACTOR.text("a\r\nb\x1b[31m\x00\u202e\ud800") == "a␍␊b␛[31m␀��"


def test_text_is_cut_and_never_through_an_address() -> None:
    for padding in range(TEXT_LIMIT - 60, TEXT_LIMIT + 10):
        cleaned = REDACTOR.text("x" * padding + " alice@example.com and more " + "y " * 3000)
        assert len(cleaned) <= TEXT_LIMIT
        assert "alic" not in cleaned
        assert REDACTOR.text(cleaned) == cleaned


@given(st.text(st.sampled_from("ab@.<>'\" \r\n%40;:[]\\é-ud2"), max_size=700))
def test_redacting_twice_is_redacting_once(text: str) -> None:
    once = REDACTOR.text(text)
    assert REDACTOR.text(once) == once
    assert once.isprintable()
    assert len(once) <= TEXT_LIMIT


def test_switched_off_it_shows_addresses_but_still_cleans_text() -> None:
    redactor = Redactor(b"", enabled=False)
    assert redactor.mailbox(ALICE) == "alice@example.com"
    assert redactor.client("192.0.2.1") == "192.0.2.1"
    assert redactor.text("550 <alice@example.com>\r\n") == "550 <alice@example.com>␍␊"


def test_an_operator_can_ask_which_mailbox_a_pseudonym_is() -> None:
    pseudonym = REDACTOR.mailbox(ALICE)
    assert REDACTOR.matches({pseudonym}, ALICE)
    assert REDACTOR.matches({pseudonym}, Mailbox("ALICE@example.com"))
    assert REDACTOR.matches({pseudonym.partition("@")[2]}, Mailbox("bob@example.com"))
    assert not REDACTOR.matches({pseudonym}, Mailbox("bob@example.com"))
    assert not REDACTOR.matches(set(), ALICE)


def test_the_last_addresses_are_known_by_their_pseudonyms() -> None:
    redactor = Redactor(b"k" * 32, enabled=True)
    alice = redactor.mailbox(ALICE)
    redactor.message_id("<one@example.com>")
    assert redactor.known({alice, "d-none"}) == [ALICE]
    for number in range(redact.CACHE_SIZE):
        redactor.mailbox(Mailbox(f"{number}@example.net"))
    assert redactor.known({alice}) == []
    assert redactor.mailbox(ALICE) == alice


def test_the_key_is_made_once_and_for_the_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "redact.key"
    key = load_or_create_key(path)
    assert len(key) >= 32
    assert load_or_create_key(path) == key
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["redact.key"]


def test_workers_that_race_get_the_same_key(tmp_path: Path) -> None:
    keys: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: keys.append(load_or_create_key(tmp_path / "key"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 8
    assert len(set(keys)) == 1


@pytest.mark.parametrize(
    ("content", "mode", "words"),
    [
        (b"", 0o600, "damaged"),
        (b"not hexadecimal", 0o600, "damaged"),
        (b"ab" * 8, 0o600, "damaged"),
        (b"\xff" * 64, 0o600, "damaged"),
        (b"ab" * 32, 0o644, "chmod 640"),
    ],
    ids=["empty", "words", "short", "binary", "world-readable"],
)
def test_a_bad_key_is_refused_in_words(tmp_path: Path, content: bytes, mode: int, words: str) -> None:
    path = tmp_path / "redact.key"
    path.write_bytes(content)
    path.chmod(mode)
    with pytest.raises(redact.RedactKeyError, match=words) as caught:
        load_or_create_key(path)
    assert str(path) in str(caught.value)


def test_a_missing_directory_is_said_in_words(tmp_path: Path) -> None:
    with pytest.raises(redact.RedactKeyError, match=r"redact_key_file"):
        load_or_create_key(tmp_path / "absent" / "redact.key")
