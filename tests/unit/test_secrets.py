"""Secrets: read whole or not at all; in a URL of the configuration refused, or masked where it is shown."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from zonerelay.config import toml_text
from zonerelay.config.checks import advice
from zonerelay.config.credentials.secrets import SecretError, read_secret
from zonerelay.config.load import ConfigError, load_text, read
from zonerelay.config.options.options import options_of
from zonerelay.config.problems import masked, quoted
from zonerelay.config.settings import REPEATED, TABLES
from zonerelay.transfer.others.slimta import _shown

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
