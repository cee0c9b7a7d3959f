"""Credentials: users and identities in their files, and secrets of the configuration."""

import os
import stat
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.targets import logins
from tests.support.credentials import cheap_hash, file_of, user
from tests.support.event_log import EventLog, events_into
from zonerelay.admin import operators
from zonerelay.admin.operators import Access
from zonerelay.admin.problems import ApiError
from zonerelay.admin.requests import RequestIdentity
from zonerelay.config import toml_text
from zonerelay.config.checks import advice
from zonerelay.config.credentials import file as credentials
from zonerelay.config.credentials import identities, passwords
from zonerelay.config.credentials.file import CredentialsError, User, format_line, parse, parse_line
from zonerelay.config.credentials.identities import Identities, IdentitiesError, Scope, Token
from zonerelay.config.credentials.secrets import SecretError, read_secret
from zonerelay.config.load import ConfigError, load_text, read
from zonerelay.config.options.options import options_of
from zonerelay.config.problems import masked, quoted
from zonerelay.config.settings import REPEATED, TABLES
from zonerelay.config.user_limits import NONE, UserLimits, change_user
from zonerelay.model.clock import ManualClock
from zonerelay.model.envelope import Priority
from zonerelay.transfer.others.slimta import _shown

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
    assert not change_user(file, "a", lambda *_: (changed, NONE))
    change_user(file, "c", lambda *_: (user("c"), NONE))
    assert file.read_text() == (
        f"# first\n{format_line(changed)}\n\n# second\n{format_line(user('b'))}\n{format_line(user('c'))}\n"
    )
    change_user(file, "b", None)
    assert set(credentials.read(file)) == {"a", "c"}
    assert "# second\n" in file.read_text()


def test_a_new_file_is_not_for_everybody(file: Path) -> None:
    assert change_user(file, "app", lambda *_: (user(), NONE))
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert credentials.read(file) == {"app": user()}
    assert list(file.parent.iterdir()) == [file]


def test_mode_and_owner_stay(file: Path) -> None:
    file.write_text("")
    file.chmod(0o644)
    before = file.stat()
    change_user(file, "app", lambda *_: (user(), NONE))
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
        change_user(file, "app", lambda *_: (user(), NONE))
    assert asked == [(file.stat().st_uid, file.stat().st_gid)]
    assert file.read_text() == "# there\n"
    assert list(file.parent.iterdir()) == [file]


def test_a_symbolic_link_stays_one(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("")
    link = tmp_path / "link"
    link.symlink_to("target")
    change_user(link, "app", lambda *_: (user(), NONE))
    assert link.is_symlink()
    assert set(credentials.read(target)) == {"app"}


def test_nothing_is_written_on_top_of_a_file_that_is_wrong(file: Path) -> None:
    file.write_text("app:what is this\n")
    with pytest.raises(CredentialsError, match="credentials:1: "):
        change_user(file, "b", lambda *_: (user("b"), NONE))
    assert file.read_text() == "app:what is this\n"


def test_a_change_that_is_refused_leaves_the_file_alone(file: Path) -> None:
    file.write_text(file_of(user()))
    before = file.stat().st_ino, file.stat().st_mtime_ns, file.read_text()

    def refuse(there: User | None, _: UserLimits) -> NoReturn:
        assert there == user()
        raise LookupError

    with pytest.raises(LookupError):
        change_user(file, "app", refuse)
    change_user(file, "app", lambda *_: (user(), NONE))
    assert (file.stat().st_ino, file.stat().st_mtime_ns, file.read_text()) == before
    assert list(file.parent.iterdir()) == [file]


def test_a_full_disk_leaves_the_file_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("# there\n")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CredentialsError, match="No space left"):
        change_user(file, "app", lambda *_: (user(), NONE))
    assert file.read_text() == "# there\n"
    assert list(file.parent.iterdir()) == [file]


def test_a_directory_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match="nowhere does not exist: create it"):
        change_user(tmp_path / "nowhere" / "credentials", "app", lambda *_: (user(), NONE))


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


# Secrets: read whole or not at all; in a URL of the configuration refused, or masked where it is shown


SECRET = "hunter2hunter2xyz"
URLS = [
    (table, key) for table in TABLES for key in options_of(TABLES[table]) if toml_text.is_url(key)
]  # every option for a URL there is, those to come too
SCHEMES = {"postgres": "postgresql", "outbox": "postgresql", "redis": "redis"}
WAYS = {
    "password": "{scheme}://relay:{secret}@host.example/path",
    "no user": "{scheme}://:{secret}@host.example/path",
    "user name": "{scheme}://{secret}:x@host.example/path",
    "slash": "{scheme}://relay:a/{secret}@host.example/path",
    "query": "{scheme}://host.example/path?password={secret}",
    "token": "{scheme}://host.example/path?a=b&token={secret}",
    "bare query": "{scheme}://host.example/path?{secret}",
    "capitals": "{scheme}://host.example/path?PassWord={secret}",
    "fragment": "{scheme}://host.example/path#{secret}",
    "path": "{scheme}://host.example/services/T00000000/{secret}",
    "wrong scheme": "gopher://relay:{secret}@host.example/path",
    "no URL": "relay:{secret}@host.example",
    "space": " {scheme}://relay:{secret}@host.example/path",
}
OTHERS = {
    "webhook": 'name = "hook"\nsecret = "env:HOOK"\n',
    "credential": 'name = "main"\nuser = "u"\nclient_id = "app"\nclient_secret = "env:A"\n'
    'grant = "client_credentials"\n',
    "s3": 'bucket = "mail"\n',
}
# What cannot be a secret where a database is named: the name of the user, of the database and its settings.
PLAIN = {"user name", "path", "bare query", "token", "fragment"}


def document(table: str, key: str, url: str) -> str:
    brackets = f"[[{table}]]" if table in REPEATED else f"[{table}]"
    return f'{brackets}\n{OTHERS.get(table, "")}{key} = "{url}"\n'


def shown(file: Path, text: str) -> Iterator[str]:
    """Everything that a person or a token of scope read is shown of it."""
    try:
        file.write_text(text)
        settings, report = read(file)
    except ConfigError as error:
        yield str(error)
        return
    yield toml_text.effective(settings, report)
    yield toml_text.changed(settings, report)
    yield from advice(settings, "relay.example.org")


def test_there_are_urls_to_look_at() -> None:
    assert {table for table, _ in URLS} == {"webhook", "credential", "postgres", "outbox", "redis", "s3"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("table", "key"), URLS, ids=lambda each: each)
def test_no_secret_in_a_url_is_shown(tmp_path: Path, table: str, key: str, way: str) -> None:
    if table in SCHEMES and way in PLAIN:
        return
    url = WAYS[way].format(scheme=SCHEMES.get(table, "https"), secret=SECRET)
    for text in shown(tmp_path / "file", document(table, key, url)):
        assert SECRET not in text, text


@pytest.mark.parametrize("key", ["zone", "dns", "listener"])
@pytest.mark.parametrize("way", WAYS)
def test_no_option_that_takes_no_url_repeats_the_secret_of_one(key: str, way: str) -> None:
    url = WAYS[way].format(scheme="https", secret=SECRET)
    document = {
        "zone": f'[[zone]]\nname = "default"\nnext_hop = "{url}"\n',
        "dns": f'[dns]\nservers = ["{url}"]\n',
        "listener": f'[[listener]]\naddress = "{url}"\nallow_networks = ["{url}"]\n',
    }[key]
    with pytest.raises(ConfigError) as caught:
        load_text(document)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://host.example:8443/mail-events", "https://host.example:8443/mail-events"),
        ("https://a:b@host.example/x?y=z&q#f", "https://***@host.example/x?y=***&***#***"),
        (
            "https://hooks.example/services/T01/B02/abcdEFGH12345678",
            "https://hooks.example/services/T01/B02/***",
        ),
        (
            "postgresql://u@h1,h2:5432/db?sslmode=verify-full",
            "postgresql://u@h1,h2:5432/db?sslmode=verify-full",
        ),
        (
            "postgresql:///zonerelay?host=/run/postgresql&user=u",
            "postgresql:///zonerelay?host=/run/postgresql&user=u",
        ),
        ("postgresql://u:p@h/db?sslpassword=x", "postgresql://u:***@h/db?sslpassword=***"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock?db=1"),
        ("see https://u@a/ and https://b/?k=v.", "see https://***@a/ and https://b/?k=***"),
        ("no URL: a@b.example", "no URL: a@b.example"),
    ],
)
def test_what_is_masked_and_what_is_not(text: str, shown: str) -> None:
    assert masked(text) == shown


def test_the_source_of_an_import_is_shown_without_its_password() -> None:
    assert _shown("redis://u:p@host:6379/2?prefix=x:") == "redis://host:6379/2?prefix=x:"
    assert _shown("redis://host/2?prefix=x:&password=p") == "redis://host/2?prefix=x:&password=***"


def test_an_address_is_quoted_as_it_is() -> None:
    assert quoted("user@example.com") == '"user@example.com"'
    assert quoted("user:secret@smtp.example.com:587") == '"***@smtp.example.com:587"'


@pytest.mark.parametrize("text", ["a:" * 50_000, "://" * 50_000, "https://" + "@" * 100_000, "?" * 100_000])
def test_masking_takes_linear_time(text: str) -> None:
    begun = time.process_time()
    masked(text)
    quoted(text)
    assert time.process_time() - begun < 1.0


def test_a_masked_document_is_still_one(tmp_path: Path) -> None:
    url = f"https://{SECRET}@host.example/a?b={SECRET}"
    (tmp_path / "file").write_text(document("webhook", "url", url))
    settings, report = read(tmp_path / "file")
    found = tomllib.loads(toml_text.effective(settings, report))
    assert found["webhook"][0]["url"] == "https://***@host.example/a?b=***"


# Secrets themselves


def test_what_is_not_utf8_in_the_environment_is_an_error_in_words() -> None:
    """Python hands such octets on as surrogates, which nothing can be done with later."""
    assert read_secret("env:WORD", {"WORD": "gehöft"}) == "gehöft"
    with pytest.raises(SecretError, match=r"^the environment variable WORD is not UTF-8$"):
        read_secret("env:WORD", {"WORD": b"geh\xf6ft".decode("utf-8", "surrogateescape")})


# The identities of HTTP: the form of a token, its scope, and a file that is changed under a reader


def token(name: str, text: str, *, scope: Scope = "read", expires: float = 0.0) -> Token:
    return identities.token_of(text, name, scope, created=1.0, expires=expires, user="")


def test_a_token_has_256_random_bits_and_a_prefix_that_scanners_know() -> None:
    made = {identities.make_token() for _ in range(100)}
    assert len(made) == 100
    assert all(each.startswith("zrt_") and len(bytes.fromhex(each[4:])) == 32 for each in made)


@pytest.mark.parametrize(
    ("scope", "may"), [("read", {"read"}), ("operate", {"read", "operate"}), ("submit", {"submit"})]
)
def test_operate_includes_read_and_submit_is_apart(scope: Scope, may: set[Scope]) -> None:
    scopes: tuple[Scope, ...] = ("read", "operate", "submit")
    assert {each for each in scopes if token("a", "t", scope=scope).may(each)} == may


def test_a_reader_sees_what_commands_change(tmp_path: Path) -> None:
    path = tmp_path / "identities.json"
    now = 100.0
    reader = Identities(path, lambda: now)
    first, second = identities.make_token(), identities.make_token()
    assert reader.identify(first) is None
    identities.add(path, token("first", first))
    identities.add(path, token("second", second, expires=101.0))
    assert [found and found.name for found in map(reader.identify, (first, second))] == ["first", "second"]
    now = 101.0
    assert reader.identify(second) is None
    assert reader.named("second") is None
    with pytest.raises(IdentitiesError, match="already exists; remove it, or choose another"):
        identities.add(path, token("first", second))
    identities.remove(path, "first")
    assert reader.identify(first) is None
    with pytest.raises(IdentitiesError, match="the token first does not exist"):
        identities.remove(path, "first")
    assert [each.name for each in tmp_path.iterdir()] == ["identities.json"]
    assert path.stat().st_mode & 0o777 == 0o640
    for wrong in ("{", '{"version": 2}', '{"version": 1, "tokens": [{"name": 1}]}'):
        path.write_text(wrong)
        with pytest.raises(IdentitiesError):
            reader.identify(first)


def test_the_token_file_is_one_token_more(tmp_path: Path) -> None:
    file = tmp_path / "token"
    reader = Identities(tmp_path / "identities.json", lambda: 1.0, token_file=file)
    file.write_text("0123456789abcdef0123456789abcdef\n")
    found = reader.identify("0123456789abcdef0123456789abcdef")
    assert found is not None
    assert (found.name, found.scope) == ("token_file", "operate")
    assert reader.identify("0123456789abcdef0123456789abcdeF") is None
    file.write_text("short\n")
    with pytest.raises(IdentitiesError, match="at least 32"):
        reader.identify("short")


def test_failures_are_remembered_of_so_many_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "MAX_CLIENTS", 2)
    log, clock = EventLog(), ManualClock()
    door = Access(Identities(tmp_path / "identities.json", lambda: 1.0), clock, events_into(log, clock))
    for client in ("a", "b", "a", "c", "b"):  # the first failure of a client is logged
        with pytest.raises(ApiError, match="the token is invalid"):
            door.admit("zrt_wrong", RequestIdentity(client, secure=True, private=True))
    assert [each["client"] for each in log.named("http-request")] == ["a", "b", "c", "b"]
