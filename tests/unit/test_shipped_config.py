"""The shipped configuration files load, and config/zonerelay.toml shows every option, its default and why."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from pathlib import Path

import pytest

from tests.support.described_options import Described, options
from zonerelay.config.endpoints import parse_listen
from zonerelay.config.load import load, load_text
from zonerelay.config.settings import Settings
from zonerelay.config.toml_lines import line_numbers

CONFIG = Path(__file__).parents[2] / "config"
SHIPPED = (CONFIG / "zonerelay.toml").read_text(encoding="utf-8")

_OPTION = re.compile(r"#(?P<key>[a-z0-9_]+) = (?P<value>.+)")
_HEADING = re.compile(r"#?\[{1,2}(?P<table>[a-z0-9]+)\]{1,2}")


def shown_options() -> dict[tuple[str, str], tuple[str, str]]:
    """`#key = default` lines by table and key, each with the comment right above it."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    table, comment = "", ""
    for line in SHIPPED.splitlines():
        if heading := _HEADING.fullmatch(line):
            table = heading["table"]
        elif option := _OPTION.fullmatch(line):
            found[table, option["key"]] = (option["value"], comment)
        comment = f"{comment} {line.removeprefix('#').strip()}".strip() if line.startswith("# ") else ""
    return found


@pytest.mark.parametrize(
    "option", list(options()), ids=lambda option: f"{option.table}.{option.key}".lstrip(".")
)
def test_every_option_is_shown_with_its_default_and_the_reason(option: Described) -> None:
    doc = "\n".join(textwrap.wrap(option.doc, 96, initial_indent="# ", subsequent_indent="# "))
    expected = (
        f"config/zonerelay.toml should have:\n\n{option.heading}\n{doc}\n#{option.key} = {option.default}\n"
    )
    assert shown_options().get((option.table, option.key)) == (option.default, option.doc), expected


def test_nothing_is_shown_that_is_no_option() -> None:
    assert set(shown_options()) == {(option.table, option.key) for option in options()}


def test_options_are_in_the_order_of_the_model() -> None:
    assert list(shown_options()) == [(option.table, option.key) for option in options()]


def test_every_default_can_be_uncommented() -> None:
    """All defaults written out mean the same as an empty file, and none of them is refused."""
    kept = [line for line in SHIPPED.splitlines() if _OPTION.fullmatch(line) or _HEADING.fullmatch(line)]
    uncommented = [line.removeprefix("#") for line in kept]
    # A route and an access rule need a condition, and what has a name needs one: no use at their defaults.
    text = "\n".join(uncommented).replace("sender_domain = []", 'sender_domain = ["example.com"]')
    text = text.replace(
        '[[dkim]]\ndomain = ""\nselector = ""',
        '[[dkim]]\ndomain = "example.com"\nselector = "s1"',
    )
    text = text.replace('key_file = "."', 'key_file = "s1.key"')
    text = text.replace(
        '[[source]]\nname = ""\naddress = []',
        '[[source]]\nname = "first"\naddress = ["192.0.2.7"]',
    )
    text = text.replace(
        '[[credential]]\nname = ""\nsender = []\nuser = ""\npassword = ""',
        '[[credential]]\nname = "smarthost"\nuser = "relay"\npassword = "env:PASSWORD"',
    )
    text = text.replace(
        '[[rewrite]]\naddress = []\nto = ""',
        '[[rewrite]]\naddress = ["old.example"]\nto = "@example.com"',
    )
    text = text.replace(
        '[[webhook]]\nname = "webhook"\nurl = ""\nevents = []\nsecret = ""',
        '[[webhook]]\nname = "webhook"\nurl = "https://app.example.com/"\nevents = []\nsecret = "env:HOOK"',
    )
    settings = load_text(text.replace("recipient = []", 'recipient = ["example.com"]'))
    bare = dataclasses.replace(
        settings,
        route=(),
        access=(),
        source=(),
        destination=(),
        credential=(),
        dkim=(),
        rewrite=(),
        webhook=(),
    )
    assert bare == Settings()
    assert len(settings.route) == 1
    assert len(settings.access) == 1


def test_it_differs_from_the_defaults_only_in_the_spool_directory() -> None:
    settings = load(CONFIG / "zonerelay.toml")
    assert settings.spool.path == Path("var/spool")
    assert dataclasses.replace(settings, spool=Settings().spool) == Settings()
    assert dataclasses.replace(settings.spool, path=Settings().spool.path) == Settings().spool


def test_only_this_machine_can_reach_what_make_run_starts() -> None:
    settings = load(CONFIG / "zonerelay.toml")
    assert [listener.address for listener in settings.listener] == ["127.0.0.1:2525"]
    assert all(parse_listen(listener.address).is_loopback for listener in settings.listener)
    assert parse_listen(settings.admin.address).is_loopback


def test_a_default_that_is_changed_stands_right_below_it() -> None:
    lines = SHIPPED.splitlines()
    for path, line in line_numbers(SHIPPED).items():
        if len(path) == 2 and path[1] == "path":
            above = [text for text in reversed(lines[: line - 1]) if not text.startswith("# ")]
            assert above[0].startswith("#path = ")


def test_it_is_no_wider_than_a_terminal_and_has_no_stray_blanks() -> None:
    for number, line in enumerate(SHIPPED.splitlines(), start=1):
        assert len(line) <= 100, number
        assert line == line.rstrip(), number


def test_every_reason_is_a_sentence() -> None:
    for option in options():
        assert re.fullmatch(r"[A-Za-z].{15,}\.", option.doc), f"{option.table}.{option.key}"
