"""Without room new mail is refused with StoreFullError, and what makes room is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(("name", "megabytes"), [("directory", 40)])
def test_a_full_disk_can_be_emptied(tmp_path: Path, name: str, megabytes: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.keys.full_worker", name, str(tmp_path), str(megabytes)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
