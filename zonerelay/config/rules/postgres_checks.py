"""[postgres]: what must hold between its options, what follows from them, and its secret.

No URL is in a text of this module: there might be a password in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from urllib.parse import SplitResult, parse_qs, urlsplit

from zonerelay.config.credentials.secrets import SecretError, read_secret
from zonerelay.config.options.problems import Report
from zonerelay.config.settings import LOSS_WORDS, Backend, Settings

_SCHEMA = re.compile("[a-z_][a-z0-9_]{0,39}")
_LOCAL = re.compile(r"localhost|127\.[0-9.]+|::1")


def check_postgres(settings: Settings, report: Report) -> None:
    postgres = settings.postgres
    if not report.sound("postgres"):
        return
    if problem := url_problem(postgres.url):
        report.refuse(("postgres", "url"), problem)
    if not _SCHEMA.fullmatch(postgres.schema):
        report.refuse(("postgres", "schema"), "is a name of small letters, digits and _, such as zonerelay")
    if postgres.accept_loss not in ("", LOSS_WORDS):
        text = f'if acknowledged mail may be lost, say exactly "{LOSS_WORDS}"'
        report.refuse(("postgres", "accept_loss"), text)


def try_postgres(settings: Settings, environment: Mapping[str, str], report: Report) -> None:
    """What a start would find out: is the password there?"""
    if settings.spool.backend is Backend.POSTGRES and settings.postgres.password:
        try:
            read_secret(settings.postgres.password, environment)
        except SecretError as error:
            report.refuse(("postgres", "password"), str(error))


def postgres_advice(settings: Settings) -> list[str]:
    postgres = settings.postgres
    if settings.spool.backend is not Backend.POSTGRES:
        return []
    found = []
    if postgres.lease <= settings.delivery.final_dot_timeout:
        found.append(
            "postgres.lease: not longer than delivery.final_dot_timeout: a message may be sent a second time "
            "while a relay that is cut off from the database still sends it"
        )
    if postgres.accept_loss:
        found.append("postgres.accept_loss: a crash of the database may lose mail that was acknowledged")
    if is_in_the_open(postgres.url):
        found.append(
            "postgres.url: mail goes over the network to whoever answers there: add ?sslmode=verify-full"
        )
    return found


def url_problem(url: str, option: str = "postgres.password") -> str:
    """Why it cannot be used, "" when it can. `option` is where a password goes."""
    try:
        parts = urlsplit(url)
        query = parse_qs(parts.query)
    except ValueError:
        return 'is no URL: write "postgresql://USER@HOST:5432/DATABASE"'
    if parts.scheme not in {"postgresql", "postgres"}:
        return 'must begin with "postgresql://"'
    if ":" in parts.netloc.rpartition("@")[0] or "password" in query:
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
