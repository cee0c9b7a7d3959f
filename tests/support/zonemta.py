"""ZoneMTA of 2016 from npm, unpacked into `.cache` and not installed.

A leveldown that today's Node runs is in the place of the engine that would have to be compiled.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from tests.support.debian import CACHE
from tests.support.haraka import NPM_TIMEOUT
from tests.support.locks import locked

VERSION = "0.1.0-alpha.120"
QUEUE = Path(__file__).parents[1] / "transfer" / "zonemta_queue.js"
_PACKAGE = {
    "name": "zonemta-for-tests",
    "private": True,
    "dependencies": {"zone-mta": VERSION, "leveldown": "^5.6.0"},
}
_NPM = ("install", "--no-audit", "--no-fund", "--ignore-scripts", "--omit=dev")


@cache
def _unpacked() -> Path:
    home = CACHE / f"zonemta-{VERSION}"
    with locked(home):
        if not (home / "done").exists():
            if shutil.which("npm") is None:
                pytest.fail("no npm here, which ZoneMTA comes from: apt-get install nodejs npm")
            (home / "package.json").write_text(json.dumps(_PACKAGE))
            subprocess.run(["npm", *_NPM], cwd=home, capture_output=True, timeout=NPM_TIMEOUT, check=True)
            (home / "done").touch()
    return home


def fill_queue(directory: Path, *words: str) -> subprocess.Popen[str]:
    """Runs `zonemta_queue.js`, which prints the ids of two messages when they are in the queue."""
    home = _unpacked()
    return subprocess.Popen(
        ["node", str(QUEUE), str(home), str(directory), *words],
        env={**os.environ, "NODE_CONFIG_DIR": str(home / "node_modules" / "zone-mta" / "config")},
        stdout=subprocess.PIPE,
        text=True,
    )
