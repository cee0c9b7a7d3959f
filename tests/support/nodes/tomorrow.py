"""A version of the relay that is to come: as today's, and it stores more than today's knows of.

Its schema has a step more, its scripts are other ones, its records have a member that nobody here
understands; and it says that today's version can work beside it.
"""

from __future__ import annotations

import hashlib
import stat
import sys
from pathlib import Path

from tests.support.debian import REPOSITORY
from zonerelay.model.delivery import Delivery
from zonerelay.store.common import records
from zonerelay.store.postgres import schema as postgres_schema
from zonerelay.store.redis import lease as redis_lease
from zonerelay.store.redis import scripts as redis_scripts

MEMBER = b'"tomorrow":{"is":"another day"}'
_STEP = """
ALTER TABLE delivery ADD COLUMN tomorrow text;
ALTER TABLE node ADD COLUMN tomorrow integer NOT NULL DEFAULT 7;
CREATE TABLE tomorrow (message_id bigint PRIMARY KEY)
"""


def become_tomorrow() -> None:
    postgres_schema.MIGRATIONS += (postgres_schema.Migration(_STEP, oldest=postgres_schema.VERSION),)
    postgres_schema.VERSION += 1
    redis_lease.OLDEST_FORMAT = redis_lease.FORMAT
    redis_lease.FORMAT += 1
    for name, source in redis_scripts.SOURCES.items():
        other = f"{source}\n-- tomorrow\n"
        redis_scripts.SOURCES[name] = other
        redis_scripts.DIGESTS[name] = hashlib.sha1(other.encode(), usedforsecurity=False).hexdigest()
    today = records.encode_delivery

    def encode_delivery(delivery: Delivery) -> bytes:
        encoded = today(delivery)
        return encoded if MEMBER in encoded else b"%b,%b}" % (encoded[:-1], MEMBER)

    records.encode_delivery = encode_delivery


def write_program(path: Path) -> Path:
    """An executable file that is that version."""
    path.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(REPOSITORY)!r})\n"
        "from tests.support.nodes.tomorrow import become_tomorrow\nbecome_tomorrow()\n"
        "from zonerelay.cli.main import main\nsys.exit(main())\n"
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path
