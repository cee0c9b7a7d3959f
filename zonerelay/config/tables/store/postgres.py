"""[postgres]: the queue in a PostgreSQL database.

No URL is in a text of this module: there might be a password in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qs, urlsplit

from zonerelay.config.options import forms
from zonerelay.config.options.options import MINUTE, count, duration, text
from zonerelay.config.problems import Report
from zonerelay.config.tables.outbound.delivery import DeliverySettings
from zonerelay.config.tables.store.spool import LOSS_WORDS, Backend, SpoolSettings

_SCHEMA = re.compile("[a-z_][a-z0-9_]{0,39}")
_LOCAL = re.compile(r"localhost|127\.[0-9.]+|::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class PostgresSettings:
    """[postgres]: used when `[spool] backend` says so."""

    url: str = text("postgresql:///zonerelay?host=/run/postgresql&user=zonerelay")
    """The database: "postgresql://USER@HOST:5432/DATABASE", or as here by its Unix socket. Over a network add
    ?sslmode=verify-full&sslrootcert=FILE. No password here.
    """
    password: str = text("", form=forms.secret)
    """Where the password is: a file, env:NAME or credential:NAME. Empty: none is needed."""
    schema: str = text("zonerelay")
    """The schema for the tables, which is made if it is not there. Relays with the same database and schema
    share one queue.
    """
    node: int = count(0, least=0, most=255, optional=True)
    """The number of this relay among those that share the queue, 0 to 255. Each has its own and keeps it: who
    comes back under a number takes up at once what was claimed under it.
    """
    lease: float = duration(15 * MINUTE, least=1.0)
    """How long a relay may be silent before others take over what it has claimed. It may still be sending it,
    if only its way to the database is cut, so this should be longer than any transaction: [delivery]
    final_dot_timeout alone is 10 minutes.
    """
    accept_loss: str = text("")
    """The words "I understand that acknowledged mail may be lost", exactly so, make do with a server that has
    fsync or full_page_writes off, which is refused without them, and leave synchronous_commit as it is.
    """


def check_postgres(postgres: PostgresSettings, report: Report) -> None:
    if not report.sound("postgres"):
        return
    if problem := url_problem(postgres.url):
        report.refuse(("postgres", "url"), problem)
    if not _SCHEMA.fullmatch(postgres.schema):
        report.refuse(("postgres", "schema"), "is a name of small letters, digits and _, such as zonerelay")
    if postgres.accept_loss not in ("", LOSS_WORDS):
        text = f'if acknowledged mail may be lost, say exactly "{LOSS_WORDS}"'
        report.refuse(("postgres", "accept_loss"), text)


def postgres_advice(
    postgres: PostgresSettings, spool: SpoolSettings, delivery: DeliverySettings
) -> list[str]:
    if spool.backend is not Backend.POSTGRES:
        return []
    found = []
    if postgres.lease <= delivery.final_dot_timeout:
        found.append(
            "postgres.lease: not longer than delivery.final_dot_timeout: a message may be sent a second time "
            "while a relay that is cut off from the database still sends it"
        )
    if postgres.accept_loss:
        found.append("postgres.accept_loss: a crash of the database may lose mail that was acknowledged")
    if is_in_the_open(postgres.url):
        found.append(
            "postgres.url: mail goes over the network to any server that answers there: add "
            "?sslmode=verify-full"
        )
    return found


def url_problem(url: str, option: str = "postgres.password") -> str:
    """Returns the reason why the URL cannot be used, "" when it can. `option` is the place of a password."""
    try:
        parts = urlsplit(url)
        query = parse_qs(parts.query)
    except ValueError:
        return 'is no URL: write "postgresql://USER@HOST:5432/DATABASE"'
    if parts.scheme not in {"postgresql", "postgres"}:
        return 'must begin with "postgresql://"'
    has_password = ":" in parts.netloc.rpartition("@")[0] or "@" in parts.path
    if has_password or any("password" in key.lower() for key in query):
        return f"has a password in it: say in {option} where the password is"
    if not _hosts(parts):
        return "names no host: a name, an address, or ?host=/run/postgresql for the Unix socket"
    return ""


def _hosts(parts: SplitResult) -> list[str]:
    named = parts.netloc.rpartition("@")[2] or "".join(parse_qs(parts.query).get("host", []))
    return [re.sub(r":\d+$", "", host).strip("[]") for host in named.split(",") if host]


def is_in_the_open(url: str) -> bool:
    parts = urlsplit(url)
    mode = "".join(parse_qs(parts.query).get("sslmode", []))
    far = [host for host in _hosts(parts) if not host.startswith("/") and not _LOCAL.fullmatch(host)]
    return bool(far) and mode not in {"verify-ca", "verify-full"}
