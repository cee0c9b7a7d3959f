"""`zonerelay spool migrate`: between all engines, killed and resumed, beside relays that run."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from tests.transfer.migrations import ENGINES, PAIRS, configured, contents, fill, tell
from zonerelay.cli.main import main


def migrate(source: Path, target: Path, *more: str) -> int:
    return main(["spool", "migrate", "--config", str(source), "--to", str(target), *more])


def test_a_queue_goes_round_all_engines_and_comes_back_as_it_was(tmp_path: Path) -> None:
    configs = [configured(tmp_path / each, each) for each in ENGINES]
    asyncio.run(fill(configs[0], 40))
    before = asyncio.run(contents(configs[0]))
    for source, target in itertools.pairwise([*configs, configs[0]]):
        assert migrate(source, target) == 0
        assert asyncio.run(contents(source)) == {}
        assert asyncio.run(contents(target)) == before


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_wherever_it_is_killed_nothing_is_lost_or_sent_twice(pair: tuple[str, str], tmp_path: Path) -> None:
    """A few kills at steps; `python -m tests.transfer.migrations` does fifty, and at moments too."""
    tell(pair, 1 if "s3" in pair else 3, tmp_path, seed=PAIRS.index(pair))
