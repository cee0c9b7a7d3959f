"""The shipped configuration is short and loads, and every option has a default and a reason."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from tests.upgrades.configuration import every_option
from zonerelay.config.endpoints import parse_listen
from zonerelay.config.load import load, load_text
from zonerelay.config.settings import TABLES, Settings
from zonerelay.config.toml_text import about, options

CONFIG = Path(__file__).parents[2] / "config"
SHIPPED = (CONFIG / "zonerelay.toml").read_text(encoding="utf-8")


def uncomment(text: str) -> str:
    return re.sub(r"^#(?=[\w\[])", "", text, flags=re.MULTILINE)


def test_every_default_can_be_written_out() -> None:
    """All defaults written out mean the same as an empty file, and none of them is refused."""
    settings = load_text(every_option())
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


def test_its_examples_load() -> None:
    settings = load_text(uncomment(SHIPPED))
    assert settings.zone[0].credentials == (settings.credential[0].name,)


def test_it_is_short_and_no_wider_than_a_terminal() -> None:
    lines = [line for line in SHIPPED.splitlines() if re.match(r"#?[\w\[]", line)]
    assert 20 <= len(lines) <= 40
    assert max(map(len, SHIPPED.splitlines())) <= 110


def test_only_this_machine_can_reach_what_make_run_starts() -> None:
    settings = load(CONFIG / "zonerelay.toml")
    assert [listener.address for listener in settings.listener] == ["127.0.0.1:2525"]
    assert all(parse_listen(listener.address).is_loopback for listener in settings.listener)
    assert parse_listen(settings.admin.address).is_loopback


def test_every_table_and_every_option_has_a_reason() -> None:
    for option in options():
        assert re.fullmatch(r"[A-Za-z].{15,}\.", option.doc), f"{option.table}.{option.key}"
    for table in TABLES:
        assert re.fullmatch(r"[A-Z].{15,}\.", about(table)), table
