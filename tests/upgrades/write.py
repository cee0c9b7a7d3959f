"""`python -m tests.upgrades.write RELEASE`: writes the fixture of a release, as this tree stores things.

It replaces the one of that name: the fixture of a release that is tagged is never written again.
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

from tests.upgrades import backup, passing
from tests.upgrades.configuration import every_option
from tests.upgrades.engines import ENGINES, pack_tar
from tests.upgrades.fixtures import CONFIGURATION, DIRECTORY, QUEUE
from tests.upgrades.outbox import write_outbox


def write(name: str) -> None:
    target = DIRECTORY / name
    target.mkdir(parents=True, exist_ok=True)
    for engine in ENGINES.values():
        with tempfile.TemporaryDirectory() as home:
            spool = engine.spool(Path(home))
            expected = asyncio.run(engine.write(spool))
            (target / engine.file).write_bytes(engine.pack(spool))
    write_outbox(target)
    with tempfile.TemporaryDirectory() as home:
        (target / backup.FILE).write_bytes(pack_tar(backup.make(Path(home) / "home")))
    (target / passing.FILE).write_text(json.dumps(passing.written(), indent=1) + "\n")
    (target / CONFIGURATION).write_text(every_option())
    text = json.dumps(expected, indent=1, ensure_ascii=False, sort_keys=True)
    (target / QUEUE).write_text(f"{text}\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(sys.argv[1])
