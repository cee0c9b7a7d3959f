"""Rules 1 and 2: what was acknowledged survives a kill and a power cut; nothing half-done shows.

A power cut is made of a real file system: the spool lies on a loop-mounted ext4 image, the process
is stopped in the middle of its work, and the image is copied as the block device has it, so that
everything that was not synced is missing in the copy. That needs root; without it they are skipped.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.store.disks import make_image
from tests.support.power import needs_a_disk, said_until_a_cut, whole_lines
from zonerelay.config.settings import Backend

IMAGE_SIZE = 96 * 1024 * 1024


class Facts:
    """What workers have said, over several lives of one spool."""

    def __init__(self) -> None:
        self.stored: set[str] = set()
        self.settling: set[str] = set()
        self.settled: set[str] = set()

    def hear(self, lines: list[str]) -> None:
        for line in lines:
            fact, _, identity = line.partition(" ")
            getattr(self, fact).add(identity)


DURABLE = [Backend.LEVELDB, Backend.DISK]


def command(verb: str, backend: Backend, directory: Path, *more: object) -> list[str]:
    return [sys.executable, "-m", "tests.store.crash_worker", verb, backend, str(directory), *map(str, more)]


def check(facts: Facts, backend: Backend, directory: Path, image: Path | None = None) -> None:
    result = subprocess.run(
        command("check", backend, directory, *([image] if image else [])),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    found = {identity: state for state, identity in map(str.split, result.stdout.splitlines())}
    assert "broken" not in found.values(), result.stderr
    lost = facts.stored - facts.settling - set(found)
    assert not lost, f"acknowledged and lost: {lost}"
    assert not facts.settled & set(found), "a settled delivery came back"


def work_for(seconds: float, process: subprocess.Popen[bytes]) -> bytes:
    """Let the worker work, counted from its first acknowledgement."""
    assert process.stdout is not None
    first = process.stdout.readline()
    assert first, "the worker died at once"
    time.sleep(seconds)
    return first


@pytest.mark.parametrize("rounds", [1, pytest.param(6, marks=pytest.mark.proof)])
@pytest.mark.parametrize("backend", DURABLE)
def test_acknowledged_mail_survives_kill_9(tmp_path: Path, backend: Backend, rounds: int) -> None:
    facts = Facts()
    for number in range(rounds):
        with subprocess.Popen(command("take", backend, tmp_path), stdout=subprocess.PIPE) as process:
            first = work_for(0.1 + 0.07 * number, process)
            process.kill()
            assert process.stdout is not None
            facts.hear(whole_lines(first + process.stdout.read()))
        check(facts, backend, tmp_path)
    assert len(facts.stored) > rounds


@needs_a_disk
@pytest.mark.parametrize("cut", [0, pytest.param(1, marks=pytest.mark.proof)])
@pytest.mark.parametrize("backend", DURABLE)
def test_acknowledged_mail_survives_a_power_cut(tmp_path: Path, backend: Backend, cut: int) -> None:
    image, copy = tmp_path / "disk", tmp_path / "disk-after-cut"
    make_image(image, IMAGE_SIZE)
    facts = Facts()
    mount = tmp_path / "mount"
    mount.mkdir()
    taking = command("take", backend, mount, image)
    facts.hear(said_until_a_cut(taking, tmp_path / "said", 0.2 + 0.25 * cut, image, copy))
    assert facts.stored
    check(facts, backend, mount, copy)


@needs_a_disk
@pytest.mark.parametrize(
    ("backend", "size"),
    [
        (Backend.LEVELDB, 1_200_000),
        (Backend.DISK, 1_200_000),
        *(
            pytest.param(Backend.LEVELDB, size, marks=pytest.mark.proof)
            for size in (1_100_000, 1_300_000, 1_400_000)
        ),
        pytest.param(Backend.DISK, 500, marks=pytest.mark.proof),
    ],
)
def test_body_survives_a_power_cut_at_its_250(tmp_path: Path, backend: Backend, size: int) -> None:
    """LevelDB closes a full log without syncing it: a body over two logs needs every batch synced. Files
    are there, but not under their names, as long as their directory is not synced.
    """
    image, copy, mount = tmp_path / "disk", tmp_path / "disk-after-cut", tmp_path / "mount"
    mount.mkdir()
    make_image(image, IMAGE_SIZE)
    process = subprocess.Popen(command("one", backend, mount, image, size), stdout=subprocess.PIPE)
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        shutil.copyfile(image, copy)
    finally:
        process.kill()
        said, _ = process.communicate()
    facts = Facts()
    facts.hear(whole_lines(said))
    assert len(facts.stored) == 1
    check(facts, backend, mount, copy)
