"""Every input that is worth remembering goes through its target: seeds, and whatever once broke a promise."""

from pathlib import Path

import pytest

from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
MAX_CORPUS = 300 * 1024
FILES = sorted(CORPUS.glob("*/*"))


@pytest.mark.parametrize("path", FILES, ids=[f"{path.parent.name}/{path.name}" for path in FILES])
def test_no_input_of_the_corpus_breaks_a_promise(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_takes_an_empty_input(name: str) -> None:
    TARGETS[name](b"")


def test_every_target_has_a_corpus_and_the_other_way_round() -> None:
    assert {path.parent.name for path in FILES} == set(TARGETS)


def test_the_corpus_stays_small() -> None:
    assert sum(path.stat().st_size for path in FILES) < MAX_CORPUS
