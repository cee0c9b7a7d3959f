"""Without room new mail is refused with StoreFullError, and what makes room is written."""

import subprocess
import sys
from pathlib import Path

import pytest


def run(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.keys.full_worker", *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("name", "megabytes"), [("directory", 40)])
def test_a_full_disk_can_be_emptied(tmp_path: Path, name: str, megabytes: int) -> None:
    run(name, str(tmp_path), str(megabytes))


def test_a_file_system_without_inodes_is_told_as_such(tmp_path: Path) -> None:
    said = run("directory", str(tmp_path)).splitlines()
    assert [("no free inodes" in line, "df -i" in line) for line in said] == [(True, True)] * 2, said
