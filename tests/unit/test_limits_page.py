"""docs/deliver/limits.md cannot drift: its examples load, its options and numbers are the code's."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from zonerelay.config.checks import advice
from zonerelay.config.load import load_text
from zonerelay.config.settings import DestinationSettings, ZoneSettings
from zonerelay.config.units import parse_rate
from zonerelay.limits.values import MARGIN_LEAST, MARGIN_PART
from zonerelay.queue.destination.rates import Pacer
from zonerelay.queue.zone.attempts import PATIENCE

PAGE = (Path(__file__).parents[2] / "docs" / "deliver" / "limits.md").read_text()
_TOML = re.compile(r"^```toml\n(.+?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = _TOML.findall(PAGE)
OF_RETRY = _TOML.findall((Path(__file__).parents[2] / "docs" / "deliver" / "retry.md").read_text())


@pytest.mark.parametrize("text", EXAMPLES, ids=range(len(EXAMPLES)))
def test_every_example_is_a_configuration_without_a_flaw(text: str) -> None:
    assert list(advice(load_text(text), "relay.example.org")) == []


def test_the_example_of_zones_with_schedules_of_their_own_loads() -> None:
    own, function = OF_RETRY
    assert list(advice(load_text(own), "relay.example.org")) == []
    assert "backoff" in function


def test_every_limit_of_a_zone_and_of_a_destination_is_explained() -> None:
    assert len(EXAMPLES) == 2
    table = PAGE.partition("| option |")[2].partition("\n\n")[0]
    named = set(re.findall(r"`(max_\w+)`", table))
    there = {field.name for kind in (ZoneSettings, DestinationSettings) for field in fields(kind)}
    times = {"max_age", "max_attempts"}
    assert named == {name for name in there if name.startswith("max_")} - times


def test_the_numbers_are_those_of_the_code() -> None:
    assert f"stretched by {MARGIN_PART:.0%} of it".replace("%", " %") in PAGE
    assert f"at least by {MARGIN_LEAST:g} seconds" in PAGE
    assert int(60 / Pacer(parse_rate("100/1m")).interval) == 98
    assert int(1 / Pacer(parse_rate("10/1s")).interval) == 9
    assert f"within {PATIENCE:.0f} seconds" in PAGE
