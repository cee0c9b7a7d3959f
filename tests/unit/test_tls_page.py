"""Checks docs/deliver/tls.md: its examples load, its levels and texts are the program's."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from zonerelay.config.checks import advice
from zonerelay.config.load import load_text
from zonerelay.config.settings import TlsMode
from zonerelay.delivery.connection import session
from zonerelay.delivery.tls import chains, dane
from zonerelay.delivery.tls import plan as tls_plan
from zonerelay.delivery.tls import verify as tls_check

PAGE = (Path(__file__).parents[2] / "docs" / "deliver" / "tls.md").read_text()
EXAMPLES = re.findall(r"^```toml\n(.+?)^```", PAGE, re.MULTILINE | re.DOTALL)
SOURCE = "".join(inspect.getsource(each) for each in (session, tls_plan, tls_check, dane, chains))


@pytest.mark.parametrize("text", EXAMPLES, ids=range(len(EXAMPLES)))
def test_every_example_is_a_configuration_without_a_flaw(text: str) -> None:
    assert list(advice(load_text(text), "relay.example.org")) == []


def test_every_level_is_explained() -> None:
    levels = PAGE.partition("## Levels\n")[2].partition("\n## ")[0]
    assert re.findall(r'^\| `"(\w+)"`', levels, re.MULTILINE) == [mode.value for mode in TlsMode]


def test_the_words_of_deferrals_are_those_that_are_said() -> None:
    table = PAGE.partition("## When mail waits because of TLS\n")[2].partition("\n## ")[0]
    first_cells = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    quoted = re.findall(r"`([^`]+)`", " ".join(first_cells))
    assert len(quoted) > 10
    said = " ".join(re.sub(r'"\s+f?"', "", SOURCE).split())
    for words in quoted:
        # What differs from case to case is left out: names, records, the reply.
        for piece in re.split(r"…|\(3 1 1\)|\"", words):
            assert piece.strip(" :,") in said, words
