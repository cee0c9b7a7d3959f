"""Checks docs/deliver/routing.md: it has every condition, its examples load, `explain` replies as shown."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import fields
from pathlib import Path

import pytest

from zonerelay.cli import arguments
from zonerelay.config.checks import advice
from zonerelay.config.load import load_text
from zonerelay.config.settings import RouteSettings
from zonerelay.routing.zones.route_rules import RoutedMail
from zonerelay.routing.zones.zones import Zones

PAGE = (Path(__file__).parents[2] / "docs" / "deliver" / "routing.md").read_text()
EXAMPLES = re.findall(r"^```toml\n(.+?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", EXAMPLES, ids=range(len(EXAMPLES)))
def test_every_example_is_a_configuration_without_a_flaw(text: str) -> None:
    assert list(advice(load_text(text), "relay.example.org")) == []


def test_every_condition_stands_in_the_table() -> None:
    assert len(EXAMPLES) == 3
    table = PAGE.partition("| condition |")[2].partition("\n\n")[0]
    first_cells = [line.split(" | ")[0] for line in table.splitlines()[2:]]
    named = re.findall(r"`(\w+)`", " ".join(first_cells))
    assert sorted([*named, "set_priority", "zone"]) == sorted(field.name for field in fields(RouteSettings))


def test_explain_says_what_the_page_shows() -> None:
    settings = load_text(EXAMPLES[0])
    asked = arguments.parse(
        [
            "explain",
            "ann@example.net",
            "--from",
            "bounce-17@example.com",
            "--client",
            "10.0.7.1",
            "--size",
            "12 MB",
        ]
    )
    mail = RoutedMail(sender=asked.sender, client=asked.client, size=asked.size)
    found = Zones(settings.zone, settings.route).explain(asked.address, mail)
    assert f"zone       {found.zone} ([[route]] number {found.rule}: {found.reason})" in PAGE
    assert [check.unmatched for check in found.checks] == [("recipient_domain",), ()]
    assert ipaddress.ip_address(asked.client) in settings.route[2].client[0]
