"""A version of the relay that is to come: as today's, and it stores more than today's knows of.

Its records have a member that nobody here understands.
"""

import stat
import sys
from pathlib import Path

from tests.support.debian import REPOSITORY
from zonerelay.model.delivery import Delivery
from zonerelay.store import records

MEMBER = b'"tomorrow":{"is":"another day"}'


def become_tomorrow() -> None:
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
