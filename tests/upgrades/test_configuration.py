"""Configurations of older releases load. A key that is gone is refused with words of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.upgrades import fixtures
from tests.upgrades.configuration import every_option
from zonerelay.config.load import load_text


@pytest.mark.parametrize("path", fixtures.configurations(), ids=lambda path: path.parent.name)
def test_a_configuration_of_an_older_release_loads(path: Path) -> None:
    load_text(path.read_text())


def test_the_newest_fixture_gives_every_option() -> None:
    given, now = (fixtures.newest() / fixtures.CONFIGURATION).read_text(), every_option()
    assert given == now, (
        "an option has changed: python -m tests.upgrades.write RELEASE, for the release that will have it;"
        " if a key or a value is gone, files that have it must be told in words what to write instead"
    )
