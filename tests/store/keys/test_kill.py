"""A batch is there whole or not at all after kill -9 and after a power cut, and every acknowledged one is.

A power cut is made of a real file system, as in `tests/store/test_crash.py`.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.store.disks import make_image
from tests.store.keys.places import PLACES, Place
from tests.store.keys.worker import KEPT, SESSIONS
from tests.support.power import needs_a_disk, said_until_a_cut, whole_lines


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
    return [int(line) for line in whole_lines(said)]


def whole_batches(place: Place, image: Path | None = None) -> set[int]:
    environment = {**os.environ, **({"KEYS_IMAGE": str(image)} if image else {})}
    done = subprocess.run(
        command("check", place), capture_output=True, text=True, check=False, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr
    return set(map(int, done.stdout.split()))


def judge(acknowledged: list[int], found: set[int]) -> None:
    highest = max(acknowledged)
    wanted = {number for number in acknowledged if number > highest - (KEPT - 2) * SESSIONS}
    assert not wanted - found, f"acknowledged and lost: {sorted(wanted - found)}"
    assert min(found) >= highest - (KEPT + 2) * SESSIONS, "what was removed is there"


@pytest.mark.parametrize("rounds", [1, pytest.param(4, marks=pytest.mark.proof)])
@pytest.mark.parametrize("name", [name for name, place in PLACES.items() if place.is_durable])
def test_acknowledged_batches_survive_kill_9(tmp_path: Path, name: str, rounds: int) -> None:
    place = PLACES[name](tmp_path)
    try:
        for number in range(rounds):
            acknowledged = write_until_killed(place, 0.1 + 0.1 * number)
            judge(acknowledged, whole_batches(place))
    finally:
        place.close()


@needs_a_disk
@pytest.mark.parametrize("cut", [0, pytest.param(1, marks=pytest.mark.proof)])
@pytest.mark.parametrize("name", ["directory", "sqlite"])
def test_acknowledged_batches_survive_a_power_cut(tmp_path: Path, name: str, cut: int) -> None:
    image, copy = tmp_path / "disk", tmp_path / "disk-after-cut"
    place = PLACES[name](tmp_path / "mount")
    place.directory.mkdir()
    make_image(image, 96 * 1024 * 1024)
    environment = {"KEYS_IMAGE": str(image)}
    said = said_until_a_cut(
        command("write", place), tmp_path / "said", 0.2 + 0.3 * cut, image, copy, environment
    )
    acknowledged = [int(line) for line in said]
    assert acknowledged
    judge(acknowledged, whole_batches(place, copy))
