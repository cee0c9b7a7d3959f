"""ZoneMTA of 2016 from npm, unpacked into `.cache` and not installed.

A leveldown that today's Node runs is in the place of the engine that would have to be compiled.
"""

import os
import subprocess
from pathlib import Path

from tests.support.programs import from_npm

VERSION = "0.1.0-alpha.120"
QUEUE = Path(__file__).parents[1] / "transfer" / "zonemta_queue.js"


def fill_queue(directory: Path, *words: str) -> subprocess.Popen[str]:
    """Runs `zonemta_queue.js`, which prints the ids of two messages when they are in the queue."""
    home = from_npm(f"zonemta-{VERSION}", {"zone-mta": VERSION, "leveldown": "^5.6.0"})
    return subprocess.Popen(
        ["node", str(QUEUE), str(home), str(directory), *words],
        env={**os.environ, "NODE_CONFIG_DIR": str(home / "node_modules" / "zone-mta" / "config")},
        stdout=subprocess.PIPE,
        text=True,
    )
