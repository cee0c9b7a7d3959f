"""Every file of a LevelDB spool, damaged in every way, found at a start and while the relay runs.

Never is more lost than what is damaged, never without a word, and a start that refuses changes nothing. Each
test is one object of the spool with all its faults, in processes of their own (`damage_worker.py`). The
tables in damage_matrix.md say what comes of each: `python -m tests.store.test_damage_matrix` prints them.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from tests.store.damage_worker import FAULTS, FLIPS, LOGS, MOMENTS, OBJECTS, TABLES, Mended, Outcome

pytestmark = pytest.mark.proof

DOCUMENT = Path(__file__).with_name("damage_matrix.md")
MAPPED = ("empty", "cut")
"""LevelDB maps its tables: of one that became shorter while it was read nothing but a signal is to be had."""


def build_disk(directory: Path) -> Path:
    library = directory / "failing_disk.so"
    source = Path(__file__).with_name("failing_disk.c")
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def outcomes_of(name: str, disk: Path, directory: Path) -> list[Outcome]:
    ran = subprocess.run(
        [sys.executable, "-m", "tests.store.damage_worker", name, directory],
        env={**os.environ, "LD_PRELOAD": str(disk)},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        check=False,
        timeout=140,
    )
    assert ran.returncode == 0, ran.stderr.decode()
    found = [msgspec.json.decode(line, type=Outcome) for line in ran.stdout.splitlines()]
    assert [(each.moment, each.fault) for each in found] == [(m, f) for m in MOMENTS for f in FAULTS]
    return found


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_disk(tmp_path_factory.mktemp("disk"))


def test_there_are_two_hundred_cells_and_more() -> None:
    assert len(OBJECTS) * len(FAULTS) * len(MOMENTS) >= 200


@pytest.mark.parametrize("name", OBJECTS)
def test_damage_takes_no_more_than_it_hits_and_is_told(name: str, disk: Path, tmp_path: Path) -> None:
    found = outcomes_of(name, disk, tmp_path)
    for outcome in found:
        check(outcome)
    for outcome in found[: len(FAULTS)]:
        check_repair(outcome, outcome.mended)
    lines = DOCUMENT.read_text().splitlines()
    assert row_of(name, found) in lines
    assert repairs_of(name, found) in lines


def check(outcome: Outcome) -> None:
    assert not outcome.error, outcome
    assert not outcome.changed, outcome
    assert not outcome.added or outcome.fault == "read-only", outcome
    if outcome.refused:
        assert "nothing was changed" in outcome.refused or "cannot be opened" in outcome.refused, outcome
    lost, may_lose = set(outcome.lost), set(outcome.may_lose)
    assert lost <= may_lose, (lost - may_lose, outcome)
    assert set(outcome.repeated) <= may_lose, outcome
    assert not lost or outcome.told, outcome
    if outcome.object in TABLES:
        check_table(outcome)
    if outcome.object in LOGS and outcome.fault in FLIPS:
        assert {each[:16] for each in lost} <= set(outcome.named), outcome
        assert len({each[:16] for each in lost}) <= 1, outcome
    if is_fatal(outcome):
        assert outcome.told or outcome.refused, outcome


def check_table(outcome: Outcome) -> None:
    if outcome.moment == "running" and outcome.fault in MAPPED:
        assert outcome.ended_by == -signal.SIGBUS, outcome
        assert outcome.refused, outcome
    else:
        assert outcome.ended_by == 0, outcome
    if outcome.fault == "data":
        assert len(outcome.lost) <= 3, outcome
    if outcome.fault in FLIPS and not outcome.refused:
        assert not outcome.accepts, outcome


def check_repair(outcome: Outcome, mended: Mended) -> None:
    """Everything that is not in the damaged blocks is in the repaired spool, and what is not is named."""
    assert not mended.findings, outcome
    assert not mended.kept_differs, outcome
    missed = {each[:16] for each in (*mended.lost, *mended.repeated)}
    assert missed <= set(mended.hit), outcome
    assert set(mended.unsaved) <= set(mended.bodies), outcome
    assert not missed or mended.said, outcome
    if outcome.fault in FLIPS:
        named = str(mended.said)
        assert not {each for each in missed if each not in named and each not in mended.gone}, outcome
        assert len(mended.gone) <= 2, outcome
        assert len(mended.repeated) <= 1, outcome
    assert mended.after <= mended.before, outcome


def is_fatal(outcome: Outcome) -> bool:
    """The next start cannot but find it."""
    files = ("CURRENT", "MANIFEST", *TABLES)
    if outcome.moment == "running":
        return outcome.object in files and outcome.fault not in ("EIO", "read-only")
    return outcome.object in (*files, *LOGS) and outcome.fault != "read-only"


def row_of(name: str, found: Sequence[Outcome]) -> str:
    """At a start, and while running."""
    start, running = found[: len(FAULTS)], found[len(FAULTS) :]
    cells = (f"{at.letter}/{then.letter}" for at, then in zip(start, running, strict=True))
    return f"| {name} | {' | '.join(cells)} |"


def repairs_of(name: str, found: Sequence[Outcome]) -> str:
    cells = (each.mended.letter for each in found[: len(FAULTS)] if each.fault != "read-only")
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    repairs: list[str] = []
    with tempfile.TemporaryDirectory() as place:
        library = build_disk(Path(place))
        print(f"| | {' | '.join(FAULTS)} |\n|{'---|' * (len(FAULTS) + 1)}")
        for name in OBJECTS:
            directory = Path(place) / name
            directory.mkdir()
            found = outcomes_of(name, library, directory)
            print(row_of(name, found), flush=True)
            repairs.append(repairs_of(name, found))
    print(f"\n| | {' | '.join(FAULTS[:-1])} |\n|{'---|' * len(FAULTS)}")
    print("\n".join(repairs))


if __name__ == "__main__":
    main()
