"""docs/rewriting.md: its examples work, and what it says of single addresses and fields is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zonerelay.config.models import Settings
from zonerelay.config.settings import ConfigError, load_text

PAGE = (Path(__file__).parents[2] / "docs" / "rewriting.md").read_text()
EXAMPLES = re.findall(r"^```toml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def named(table: str) -> Settings:
    """The first example with this table or option."""
    return load_text(next(example for example in EXAMPLES if table in example))


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_example_is_a_configuration(example: str) -> None:
    load_text(example)


def test_the_rules_are_those_of_the_zone() -> None:
    [zone] = named("header_remove").zone
    assert zone.header_remove == ("X-Originating-IP", "X-Mailer")
    assert len(zone.header_add) == 2


def test_the_srs_example_rewrites_in_one_zone_only() -> None:
    settings = named("[srs]")
    assert [zone.srs for zone in settings.zone] == [False, True]
    assert settings.srs.max_age == 21 * 86_400


def test_the_fields_that_no_rule_changes() -> None:
    line = next(line for line in PAGE.splitlines() if "not for a rule to change" in line)
    names = re.findall(r"`([A-Z][A-Za-z-]+)`", line)
    assert len(names) == 5
    for name in names:
        for option, value in (
            ("header_add", f"{name}: x"),
            ("header_replace", f"{name}: x"),
            ("header_remove", name),
        ):
            with pytest.raises(ConfigError, match="not for a rule to change"):
                load_text(f'[[zone]]\n{option} = ["{value}"]')
