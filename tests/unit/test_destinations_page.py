"""Checks options, examples and numbers of docs/deliver/destinations.md, policies of docs/deliver/tls.md."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from zonerelay.config.checks import advice
from zonerelay.config.load import load_text
from zonerelay.config.settings import DestinationSettings
from zonerelay.routing import mta_sts
from zonerelay.routing import mta_sts as sts_files
from zonerelay.routing import mta_sts as sts_policies
from zonerelay.routing.destinations.destination_table import DestinationTable
from zonerelay.routing.destinations.route import MxHost

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "deliver" / "destinations.md").read_text()
TLS_PAGE = (DOCS / "deliver" / "tls.md").read_text()
OURS = TLS_PAGE.partition("## MTA-STS\n")[2].partition("\n## ")[0]
OTHER = TLS_PAGE.partition("## Other TLS for some destinations\n")[2].partition("\n## ")[0]
EXAMPLES = re.findall(r"^```toml\n(.+?)^```", f"{PAGE}\n{OURS}\n{OTHER}", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", EXAMPLES, ids=range(len(EXAMPLES)))
def test_every_example_is_a_configuration_without_a_flaw(text: str) -> None:
    assert list(advice(load_text(text), "relay.example.org")) == []


def test_every_option_stands_in_a_table() -> None:
    assert len(EXAMPLES) == 3
    first_cells = [line.split(" | ")[0] for line in PAGE.splitlines() if line.startswith("| `")]
    named = re.findall(r"`(\w+)`", " ".join(first_cells))
    assert sorted(named) == sorted(field.name for field in fields(DestinationSettings))


def test_the_example_meets_what_the_page_says() -> None:
    table = DestinationTable(load_text(EXAMPLES[0]).destination)
    met = table.find("default", "partner.example", (MxHost("mx.partner.example", 25),))
    assert met is not None
    assert f"destination  {met.name} of the configuration" in PAGE


def test_times_and_bounds_are_those_of_the_code() -> None:
    assert f"up to {sts_policies.FIRST_WAIT:.0f} seconds" in OURS
    assert f"`{sts_files.DIRECTORY}`" in OURS
    assert f"at most {sts_policies.MAX_POLICIES:,}" in OURS
    assert sts_policies.RETRY_AFTER == 300.0
    assert "for five minutes" in OURS
    assert mta_sts.REFRESH_AGE == 86_400.0
    assert "a day old" in OURS
