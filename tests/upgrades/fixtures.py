"""The fixtures of `tests/data/upgrades`: a directory for each release, and for revisions before the first.

NAME/ENGINE.…        a queue, as `engines` packs it
NAME/queue.json      what is in each of them (`mail.Expected`)
NAME/outbox.sql.gz   the outbox's tables, with rows
NAME/backup.tar.gz   a backup of the queue
NAME/zonerelay.toml  a configuration
"""

import json
import re
from pathlib import Path

from tests.upgrades import mail
from tests.upgrades.engines import ENGINES

DIRECTORY = Path(__file__).parents[1] / "data" / "upgrades"
QUEUE = "queue.json"
CONFIGURATION = "zonerelay.toml"


def names() -> list[str]:
    """The oldest first: revisions, whose names are no numbers, were before every release."""
    return sorted((path.name for path in DIRECTORY.iterdir() if path.is_dir()), key=age)


def age(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split("."))) if re.fullmatch(r"\d+\.\d+\.\d+", name) else ()


def newest() -> Path:
    return DIRECTORY / names()[-1]


def stored() -> list[tuple[str, str]]:
    """Every queue that there is: the name of its fixture and of its engine."""
    return [
        (name, engine)
        for name in names()
        for engine in ENGINES
        if (DIRECTORY / name / ENGINES[engine].file).exists()
    ]


def expected(name: str) -> mail.Expected:
    found: mail.Expected = json.loads((DIRECTORY / name / QUEUE).read_text())
    return found


def configurations() -> list[Path]:
    return sorted(DIRECTORY.glob(f"*/{CONFIGURATION}"))
