"""Checks the example of docs/operate/high-availability.md and the engines of docs/store/engines.md."""

from __future__ import annotations

import re

from tests.bench.engines import ENGINES
from tests.support.debian import REPOSITORY
from zonerelay.config.load import load_text
from zonerelay.config.settings import Backend


def page(name: str) -> str:
    return (REPOSITORY / "docs" / name).read_text()


def test_example_of_several_machines_loads() -> None:
    (example,) = re.findall(
        r"^```toml\n(.+?)^```", page("operate/high-availability.md"), re.MULTILINE | re.DOTALL
    )
    settings = load_text(example)
    assert settings.spool.backend is Backend.POSTGRES
    assert settings.postgres.password == "credential:postgres"


def test_every_engine_is_described_and_measured() -> None:
    text = page("store/engines.md")
    assert set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE)) == {backend.value for backend in Backend}
    measured = re.findall(r"^\| (\w+(?: x3)?) \| \d+ \|", text, re.MULTILINE)
    assert set(measured) == set(ENGINES)
