"""docs/deliver/rewriting.md: its examples work, and what it says of single addresses and fields is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zonerelay.config.checks import advice
from zonerelay.config.load import ConfigError, load_text
from zonerelay.config.settings import Settings
from zonerelay.inbound.state.rewriting import Place, Rewriting
from zonerelay.message.header.address_fields import MAX_LINE, MAX_OCTETS
from zonerelay.model.address import Mailbox

PAGE = (Path(__file__).parents[2] / "docs" / "deliver" / "rewriting.md").read_text()
"""However its lines are broken."""
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


def test_the_example_of_other_addresses_has_no_flaw_and_does_what_it_says() -> None:
    settings = named("[[rewrite]]")
    assert list(advice(settings, "relay.example.org")) == []
    rewriting = Rewriting(settings.rewrite)

    def becomes(place: Place, address: str, listener: str = "", user: str = "") -> tuple[str, int]:
        return rewriting.of(listener, user).find(place, Mailbox(address))

    assert becomes(Place.SENDER, "boss@old.example") == ("ceo@example.com", 1)
    assert becomes(Place.RECIPIENT, "ann@old.example") == ("ann@example.com", 2)
    assert becomes(Place.RECIPIENT, "x@y.example", "10.0.0.5:2525") == ("trash@example.com", 3)
    assert becomes(Place.HEADER, "x@y.example", "10.0.0.5:2525") == ("x@y.example", 0)
    assert becomes(Place.SENDER, "x@y.example", "[::]:465", "shop") == ("orders@example.com", 4)
    for rule, line in ((1, "as sender     becomes ceo@"), (2, "as recipient  becomes ann@")):
        assert f"{line}example.com (rewrite={rule})" in PAGE


def test_the_bounds_are_those_of_the_code() -> None:
    assert f"{MAX_OCTETS >> 10} KB of address fields" in PAGE
    assert f"{MAX_LINE} bytes" in PAGE


def test_the_fields_that_are_dropped_are_those_of_the_default() -> None:
    table = PAGE.partition("## What is dropped")[2].partition("\n\n- ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([A-Z][\w-]+)`", row.split(" | ")[0])]
    assert tuple(names) == load_text("").listener[0].drop_headers


def test_rules_are_ascii_on_one_line() -> None:
    for value in ("X: gr\\u00fcn", "X: a\\u0000b", "X: a\\nb", "X:", "X", "X Y: z", "X: \\u0007"):
        with pytest.raises(
            ConfigError,
            match=r"^zone\[0\]\.header_add\[0\]: .*(not a header field|without control characters)",
        ):
            load_text(f'[[zone]]\nheader_add = ["{value}"]')
