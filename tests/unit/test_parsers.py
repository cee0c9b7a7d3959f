"""Parsers of what strangers send: each takes linear time, and the page has a row for each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.strangers import PARSERS, Parser, inputs, seconds

PAGE = Path(__file__).parents[2] / "docs/develop/parsers.md"
SIZE = 16 * 1024


@pytest.mark.parametrize("parser", PARSERS, ids=[each.name for each in PARSERS])
def test_no_hostile_pattern_takes_long(parser: Parser) -> None:
    """A quarter of a second is what quadratic time takes at this size; the slowest takes a fifth of it."""
    for data in inputs(parser, min(SIZE, parser.most)):
        assert seconds(parser, data) < 0.25, data[:100]


def test_the_page_has_every_parser() -> None:
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert rows[1:] == [each.name for each in PARSERS]
