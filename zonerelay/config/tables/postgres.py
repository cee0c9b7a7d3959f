"""The settings of a queue in PostgreSQL: [postgres]. Import them from `models`."""

from __future__ import annotations

from dataclasses import dataclass

from zonerelay.config.options.options import MINUTE, Form, count, duration, text
from zonerelay.config.tables.intake import LOSS_WORDS


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresSettings:
    """[postgres]: used when `[spool] backend` says so."""

    url: str = text(
        "postgresql:///zonerelay?host=/run/postgresql&user=zonerelay",
        'The database: "postgresql://USER@HOST:5432/DATABASE", or as here by its Unix socket. Over a network '
        "add ?sslmode=verify-full&sslrootcert=FILE. No password here.",
    )
    password: str = text(
        "",
        "Where the password is: a file, env:NAME or credential:NAME. Empty: none is needed.",
        form=Form.SECRET,
    )
    schema: str = text(
        "zonerelay",
        "The schema for the tables, which is made if it is not there. Relays with the same database and "
        "schema share one queue.",
    )
    node: int = count(
        0,
        "The number of this relay among those that share the queue, 0 to 255. Each has its own and keeps it: "
        "who comes back under a number takes up at once what was claimed under it.",
        least=0,
        most=255,
        optional=True,
    )
    lease: float = duration(
        15 * MINUTE,
        "How long a relay may be silent before others take over what it has claimed. It may still be sending "
        "it, if only its way to the database is cut, so this should be longer than any transaction: "
        "[delivery] final_dot_timeout alone is 10 minutes.",
        least=1.0,
    )
    accept_loss: str = text(
        "",
        f'The words "{LOSS_WORDS}", exactly so, make do with a server that has fsync or full_page_writes '
        "off, which is refused without them, and leave synchronous_commit as it is.",
    )
