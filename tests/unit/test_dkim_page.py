"""docs/deliver/dkim.md cannot drift: its examples load, and it names what the code signs and says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from zonerelay.config.checks import advice
from zonerelay.config.load import load_text
from zonerelay.message.dkim import keys as dkim_keys
from zonerelay.message.dkim import private_keys as dkim_private
from zonerelay.message.dkim import signature as dkim
from zonerelay.message.dkim.dns_record import RecordStatus

PAGE = (Path(__file__).parents[2] / "docs" / "deliver" / "dkim.md").read_text()
EXAMPLES = re.findall(r"^```toml\n(.+?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_the_examples_are_found() -> None:
    assert len(EXAMPLES) == 4


@pytest.mark.parametrize("text", EXAMPLES, ids=range(len(EXAMPLES)))
def test_every_example_is_a_configuration_without_a_flaw(text: str) -> None:
    settings = load_text(text)
    assert settings.dkim
    assert list(advice(settings, "relay.example.org")) == []


def table(first_words: str) -> list[list[str]]:
    rows = PAGE.partition(f"| {first_words} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_every_status_is_explained() -> None:
    assert [row[0].strip("`") for row in table("status")] == [status.value for status in RecordStatus]


def test_the_fields_are_those_that_are_signed() -> None:
    shown = [row[0].lower().split(", ") for row in table("fields")[:3]]
    groups = (dkim._ALWAYS, dkim._WHEN_PRESENT, dkim._NOT_OVERSIGNED)
    assert [sorted(row) for row in shown] == [sorted(name.decode() for name in group) for group in groups]


def test_the_numbers_are_those_of_the_code() -> None:
    assert f"RSA keys of {dkim_private.MIN_RSA_BITS} to {dkim_private.MAX_RSA_BITS} bits" in PAGE
    assert f"within {dkim_keys.ENDS_SOON / 86_400:.0f} days" in PAGE
    assert f"more than {dkim.MAX_SAME_FIELDS} fields of one name" in PAGE
