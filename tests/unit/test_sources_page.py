"""docs/deliver/sources.md cannot drift: its example loads, and does what the page says."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from zonerelay.config.checks import advice
from zonerelay.config.load import load_text
from zonerelay.config.settings import SourceSettings, ZoneSettings
from zonerelay.config.units import format_duration
from zonerelay.delivery.source import ABSENT_FOR, shares

PAGE = (Path(__file__).parents[2] / "docs" / "deliver" / "sources.md").read_text()
EXAMPLES = re.findall(r"^```toml\n(.+?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_example_is_a_configuration_without_a_flaw() -> None:
    [text] = EXAMPLES
    settings = load_text(text)
    assert list(advice(settings, settings.hostname)) == []
    out1, out2 = shares(settings.source[:2])
    assert f"as out1.example.org: {out1:.0%} of the mail" in PAGE
    assert f"as out2.example.org: {out2:.0%} of the mail" in PAGE


def test_every_option_is_explained() -> None:
    text = EXAMPLES[0] + PAGE
    assert [each.name for each in fields(SourceSettings) if f"{each.name} = " not in text] == []
    assert "sources = " in EXAMPLES[0]
    assert [name for name in ("source_by", "source_penalty", "ipv6") if f"`{name}" not in PAGE] == []


def test_numbers_are_those_of_the_code() -> None:
    assert format_duration(ZoneSettings().source_penalty) == "2h"
    assert "`source_penalty` (2 hours)" in PAGE
    assert ABSENT_FOR == 60
    assert "Every minute" in PAGE
