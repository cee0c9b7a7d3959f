"""The credentials file: what is read, what is refused and where, and how it is changed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.targets import logins
from tests.support.credentials import cheap_hash, file_of, user
from zonerelay.config.credentials import file as credentials
from zonerelay.config.credentials import passwords
from zonerelay.config.credentials.file import (
    CredentialsError,
    User,
    change_user,
    format_line,
    parse,
    parse_line,
)
from zonerelay.model.queue_name import Priority

HASH = cheap_hash("correct horse")
COST, SALT, DIGEST = HASH.rsplit("$", 2)


def test_users_comments_and_empty_lines_are_read() -> None:
    text = (
        "# applications\n\n"
        f"app:{HASH}\n"
        f"  crm@example.com:{HASH}:example.com, *.example.com,bounce-*@example.net \r\n"
        f"jörg:{HASH}:\n"
        f"late:{HASH}:u@[IPv6:2001:db8::1]\n"
        f"shop:{HASH}::bulk\n"
        f"both:{HASH}:u@[IPv6:2001:db8::1]:high"
    )
    assert parse(text, "file") == {
        "app": User("app", HASH),
        "crm@example.com": User(
            "crm@example.com", HASH, ("example.com", "*.example.com", "bounce-*@example.net")
        ),
        "jörg": User("jörg", HASH),
        "late": User("late", HASH, ("u@[IPv6:2001:db8::1]",)),
        "shop": User("shop", HASH, (), Priority.BULK),
        "both": User("both", HASH, ("u@[IPv6:2001:db8::1]",), Priority.HIGH),
    }


def test_names_are_case_sensitive() -> None:
    assert set(parse(file_of(user("app"), user("App")), "file")) == {"app", "App"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("app", "expected name:hash"),
        (":" + HASH, "the user name is missing"),
        ("a b:" + HASH, "is not a valid user name"),
        ("a\u00a0b:" + HASH, "is not a valid user name"),
        ("a\x07:" + HASH, "is not a valid user name"),
        ("u" * 256 + ":" + HASH, "255 bytes"),
        ("ju\u0308rgen:" + HASH, "NFC"),
        ("app:", "the hash is not an argon2id hash"),
        ("app:secret", "the hash is not an argon2id hash"),
        ("app:$2b$12$abcdefghijklmnopqrstuv", "the hash is not an argon2id hash"),
        ("app:" + HASH.replace("argon2id", "argon2i"), "the hash is not an argon2id hash"),
        ("app:" + HASH[:-1] + "!", "the hash is not an argon2id hash"),
        ("app:" + HASH.replace("m=8,", "m=4194304,"), "4194304 KiB"),
        ("app:" + HASH.replace("m=8,", "m=7,"), "7 KiB"),
        ("app:" + HASH.replace("t=1,", "t=99,"), "99 passes"),
        ("app:" + HASH.replace("p=1$", "p=0$"), "0 lanes"),
        (f"app:{COST}$AAAA${DIGEST}", "damaged"),
        (f"app:{COST}${SALT}$AAAA", "damaged"),
        (f"app:{COST}${SALT}$AAAAA", "damaged"),
        (f"app:{HASH}:,", "a sender pattern is empty"),
        (f"app:{HASH}:example.com,", "a sender pattern is empty"),
        (f"app:{HASH}:a b@example.com", "is not an address pattern"),
        (f"app:{HASH}:exa mple", "is not a domain"),
    ],
    ids=lambda value: value if len(value) < 40 else "long",  # a hash is another in every process
)
def test_a_wrong_line_is_named_and_its_hash_is_not_shown(line: str, words: str) -> None:
    with pytest.raises(CredentialsError) as caught:
        parse(f"# comment\n\n{line}\n", "/etc/credentials")
    said = str(caught.value)
    assert said.startswith("/etc/credentials:3: ")
    assert words in said
    assert DIGEST not in said
    assert "secret" not in said


def test_a_user_who_is_there_twice_is_an_error() -> None:
    with pytest.raises(CredentialsError, match='file:2: the user "app" is defined twice'):
        parse(file_of(user(), user()), "file")


def test_a_user_does_not_show_the_hash_by_accident() -> None:
    assert DIGEST not in repr(user())


@given(
    name=st.text("az09@.-_+%ü日\\\"'=", max_size=40),
    senders=st.lists(st.sampled_from(["example.com", "*.example.com", "b-*@example.com", "<>"]), max_size=3),
    priority=st.sampled_from([None, *Priority]),
)
def test_what_is_written_is_read_again(name: str, senders: list[str], priority: Priority | None) -> None:
    try:
        credentials.check_name(name)
    except ValueError:
        return
    written = User(name, HASH, tuple(senders), priority)
    assert parse_line(format_line(written)) == written


@given(st.text())
def test_any_line_is_a_user_or_nothing_or_a_problem_in_words(line: str) -> None:
    logins.credentials(line.encode("utf-8", "replace"))


# ---- reading ---------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "credentials"


def test_a_file_that_cannot_be_read_is_named_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match=r"none: No such file") as caught:
        credentials.read(tmp_path / "none")
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    with pytest.raises(CredentialsError, match="Is a directory"):
        credentials.read(tmp_path)


def test_what_is_not_utf_8_is_named_with_its_line(file: Path) -> None:
    file.write_bytes(b"# one\n# t\xffwo\n")
    with pytest.raises(CredentialsError, match="credentials:2: not UTF-8"):
        credentials.read(file)


def test_a_file_is_not_read_without_end(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials, "MAX_FILE", 10)
    file.write_text("# 456789\n\n")
    assert credentials.read(file) == {}
    file.write_text("# 456789\n\n\n")
    with pytest.raises(CredentialsError, match="exceeds 10 bytes"):
        credentials.read(file)


# ---- changing --------------------------------------------------------------------------------


def test_a_change_keeps_comments_order_and_the_other_users(file: Path) -> None:
    file.write_text(f"# first\n{format_line(user('a'))}\n\n# second\n{format_line(user('b'))}")
    changed = user("a", "another password", "example.com")
    assert not change_user(file, "a", lambda _: changed)
    change_user(file, "c", lambda _: user("c"))
    assert file.read_text() == (
        f"# first\n{format_line(changed)}\n\n# second\n{format_line(user('b'))}\n{format_line(user('c'))}\n"
    )
    change_user(file, "b", lambda _: None)
    assert set(credentials.read(file)) == {"a", "c"}
    assert "# second\n" in file.read_text()


def test_a_new_file_is_not_for_everybody(file: Path) -> None:
    assert change_user(file, "app", lambda _: user())
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert credentials.read(file) == {"app": user()}
    assert list(file.parent.iterdir()) == [file]


def test_mode_and_owner_stay(file: Path) -> None:
    file.write_text("")
    file.chmod(0o644)
    before = file.stat()
    change_user(file, "app", lambda _: user())
    after = file.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (before.st_mode, before.st_uid, before.st_gid)
    assert after.st_ino != before.st_ino


def test_the_owner_is_given_back_or_nothing_is_changed(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only root can make files of others, so the kernel's answers are those that root's file would get."""
    file.write_text("# there\n")
    asked: list[tuple[int, int]] = []
    real = os.fstat

    def of_somebody_else(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        return os.stat_result((*found[:4], found.st_uid + 1, *found[5:10]))

    def refuse(_descriptor: int, uid: int, gid: int) -> None:
        asked.append((uid, gid))
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fstat", of_somebody_else)
    monkeypatch.setattr(os, "fchown", refuse)
    with pytest.raises(CredentialsError, match="change it as that user or as"):
        change_user(file, "app", lambda _: user())
    assert asked == [(file.stat().st_uid, file.stat().st_gid)]
    assert file.read_text() == "# there\n"
    assert list(file.parent.iterdir()) == [file]


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("")
    link = tmp_path / "link"
    link.symlink_to("target")
    change_user(link, "app", lambda _: user())
    assert link.is_symlink()
    assert set(credentials.read(target)) == {"app"}


def test_nothing_is_written_on_top_of_a_file_that_is_wrong(file: Path) -> None:
    file.write_text("app:what is this\n")
    with pytest.raises(CredentialsError, match="credentials:1: "):
        change_user(file, "b", lambda _: user("b"))
    assert file.read_text() == "app:what is this\n"


def test_a_change_that_is_refused_leaves_the_file_alone(file: Path) -> None:
    file.write_text(file_of(user()))
    before = file.stat().st_ino, file.stat().st_mtime_ns, file.read_text()

    def refuse(there: User | None) -> None:
        assert there == user()
        raise LookupError

    with pytest.raises(LookupError):
        change_user(file, "app", refuse)
    change_user(file, "app", lambda there: there)
    assert (file.stat().st_ino, file.stat().st_mtime_ns, file.read_text()) == before
    assert list(file.parent.iterdir()) == [file]


def test_a_full_disk_leaves_the_file_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("# there\n")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CredentialsError, match="No space left"):
        change_user(file, "app", lambda _: user())
    assert file.read_text() == "# there\n"
    assert list(file.parent.iterdir()) == [file]


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match="nowhere does not exist: create it"):
        change_user(tmp_path / "nowhere" / "credentials", "app", lambda _: user())


# ---- hashes ----------------------------------------------------------------------------------


def test_a_hash_knows_its_password_and_no_other() -> None:
    made = passwords.make_hash("correct horse")
    passwords.check_hash(made)
    assert made.startswith("$argon2id$v=19$m=19456,t=2,p=1$")
    assert made != passwords.make_hash("correct horse")
    assert passwords.matches(made, "correct horse")
    assert not passwords.matches(made, "correct horsf")
    assert not passwords.matches(made, "")


def test_nobodys_hash_costs_what_most_hashes_cost_and_nobody_has_it() -> None:
    alone = passwords.nobodys_hash(())
    assert alone.rsplit("$", 2)[0] == passwords.make_hash("x").rsplit("$", 2)[0]
    most = passwords.nobodys_hash([HASH, passwords.make_hash("x"), HASH])
    assert most.rsplit("$", 2)[0] == COST
    for hashed in (alone, most):
        passwords.check_hash(hashed)
        assert not passwords.matches(hashed, "")
        assert not passwords.matches(hashed, "correct horse")
