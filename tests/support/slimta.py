"""python-slimta of PyPI, unpacked into `.cache`: it runs in processes of its own, never in ours."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.support.debian import CACHE
from tests.support.locks import locked
from tests.support.programs import PIP_TIMEOUT

QUEUE = Path(__file__).parents[1] / "transfer" / "slimta_queue.py"
VERSION = "5.0.5"


@cache
def _unpacked() -> Path:
    home = CACHE / f"python-slimta-{VERSION}"
    with locked(home):
        if not (home / "done").exists():
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            command = [*pip, "--target", str(home), f"python-slimta[redis]=={VERSION}"]
            subprocess.run(command, timeout=PIP_TIMEOUT, check=True)
            (home / "done").touch()
    return home


def fill_queue(*words: str) -> subprocess.Popen[str]:
    """Runs `slimta_queue.py`, which prints the ids of two messages when they have been attempted."""
    environment = {**os.environ, "PYTHONPATH": str(_unpacked())}
    return subprocess.Popen(
        [sys.executable, str(QUEUE), *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
