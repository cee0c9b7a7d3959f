"""What both relays need to be a server with TLS and AUTH: one certificate (ECDSA P-256) and the users."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.bench.client import PASSWORD, user_name
from tests.bench.rows import Row, Tls
from tests.support.certificates import DAY, make
from zonerelay.config.credentials import passwords
from zonerelay.config.credentials.file import User, format_line


@dataclass(frozen=True, slots=True)
class Papers:
    """`credentials` has each user with a hash as `zonerelay user` makes it, at full cost."""

    certificate: Path
    key: Path
    credentials: Path
    users: Sequence[str]


def make_papers(directory: Path, row: Row) -> Papers | None:
    """None for a row in clear text."""
    if row.tls is Tls.NONE:
        return None
    now = time.time()
    certificate, key = make("relay.test", starts=now - DAY, ends=now + 90 * DAY).write(directory, "relay")
    names = [user_name(number) for number in range(row.users)]
    credentials = directory / "credentials"
    lines = [format_line(User(name, passwords.make_hash(PASSWORD))) for name in names]
    credentials.write_text("".join(f"{line}\n" for line in lines))
    credentials.chmod(0o600)
    return Papers(certificate, key, credentials, names)
