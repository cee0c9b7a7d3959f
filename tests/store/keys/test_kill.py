"""A batch is there whole or not at all after kill -9, and every acknowledged one is."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.store.keys.places import PLACES, Place
from tests.store.keys.worker import KEPT, SESSIONS

ROUNDS = 4


def command(verb: str, place: Place) -> list[str]:
    return [
        *(sys.executable, "-m", "tests.store.keys.worker", verb, place.name),
        *(str(place.directory), *place.words),
    ]


def write_until_killed(place: Place, seconds: float) -> list[int]:
    """The numbers of the batches that were acknowledged."""
    with subprocess.Popen(command("write", place), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        assert first, "the worker died at once"
        time.sleep(seconds)
        process.kill()
        said = first + process.stdout.read()
    return [int(line) for line in said.split(b"\n")[:-1]]


def whole_batches(place: Place) -> set[int]:
    done = subprocess.run(command("check", place), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(map(int, done.stdout.split()))


def judge(acknowledged: list[int], found: set[int]) -> None:
    highest = max(acknowledged)
    wanted = {number for number in acknowledged if number > highest - (KEPT - 2) * SESSIONS}
    assert not wanted - found, f"acknowledged and lost: {sorted(wanted - found)}"
    assert min(found) >= highest - (KEPT + 2) * SESSIONS, "what was removed is there"


@pytest.mark.parametrize("name", [name for name, place in PLACES.items() if place.is_durable])
def test_acknowledged_batches_survive_kill_9(tmp_path: Path, name: str) -> None:
    place = PLACES[name](tmp_path)
    try:
        for number in range(ROUNDS):
            acknowledged = write_until_killed(place, 0.1 + 0.1 * number)
            judge(acknowledged, whole_batches(place))
    finally:
        place.close()
