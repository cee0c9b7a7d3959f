"""python-slimta of PyPI, unpacked into `.cache`: it runs in processes of its own, never in ours."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.programs import from_pypi

QUEUE = Path(__file__).parents[1] / "transfer" / "slimta_queue.py"
VERSION = "5.0.5"


def fill_queue(*words: str) -> subprocess.Popen[str]:
    """Runs `slimta_queue.py`, which prints the ids of two messages when they have been attempted."""
    home = from_pypi(f"python-slimta-{VERSION}", f"python-slimta[redis]=={VERSION}")
    return subprocess.Popen(
        [sys.executable, str(QUEUE), *words],
        env={**os.environ, "PYTHONPATH": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
