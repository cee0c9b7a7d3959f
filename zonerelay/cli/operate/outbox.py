"""`zonerelay outbox`: prints the SQL of the tables, counts rows, and encrypts the passwords of mailboxes. No
relay needs to run.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from argparse import Namespace
from typing import TYPE_CHECKING

from zonerelay.cli.relay import load_settings
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import OK, CliError, refused
from zonerelay.cli.terminal.passwords import ask, read_line
from zonerelay.smtp.server.sasl import MAX_PASSWORD

if TYPE_CHECKING:
    from zonerelay.config.settings import OutboxSettings


def schema(arguments: Namespace) -> int:
    from zonerelay.outbox.database.tables import script
    from zonerelay.outbox.keeper import names_of

    print(script(names_of(load_settings(arguments.config).outbox)), end="")
    return OK


def encrypt(arguments: Namespace) -> int:
    from zonerelay.outbox.database.passwords import NONCE_SIZE, seal
    from zonerelay.outbox.store import read_keys
    from zonerelay.store.contract import StoreOpenError

    with refused(StoreOpenError):
        keys = read_keys(load_settings(arguments.config).outbox, os.environ)
    if not keys:
        raise CliError("[outbox] keys is empty: create a key with openssl rand -base64 32 > FILE")
    password = _password()
    nonce = secrets.token_bytes(NONCE_SIZE)
    print(seal(password, keys[0], nonce, host=arguments.host, port=arguments.port, user=arguments.user))
    return OK


def _password() -> str:
    password = ask("Password of the mailbox: ") if sys.stdin.isatty() else read_line()
    if not password:
        raise CliError("no password was given")
    if not password.isprintable() or len(password.encode()) > MAX_PASSWORD:
        raise CliError(f"the password must be a single line of at most {MAX_PASSWORD} bytes")
    return password


def status(arguments: Namespace) -> int:
    from zonerelay.store.contract import StoreError

    settings = load_settings(arguments.config).outbox
    if not settings.url:
        raise CliError("the outbox is not configured: set [outbox] url to its database")
    with refused(StoreError):
        found = asyncio.run(_ask(settings))
    if arguments.json:
        output.print_line(found)
        return OK
    facts = [(name, f"{found[name]:,}") for name in ("queued", "processing", "sent", "failed")]
    for name, seconds in (("oldest", found["oldest_seconds"]), ("due for", found["lag_seconds"])):
        facts.append((name, text.age(seconds)))
    facts.append(("relays", str(found["relays"])))
    output.console().print(output.facts(facts))
    return OK


async def _ask(settings: OutboxSettings) -> dict[str, float]:
    """Query the database for the numbers that `outbox status` prints. `oldest_seconds` is the age of the
    oldest waiting row, `lag_seconds` of the oldest one that is due. Raise StoreError if it does not answer.
    """
    from zonerelay.outbox.database.sql import OutboxStatements
    from zonerelay.outbox.database.tables import check
    from zonerelay.outbox.keeper import names_of
    from zonerelay.outbox.store import access_of
    from zonerelay.store.postgres.driver import DatabaseConnection

    names = names_of(settings)
    statements = OutboxStatements(names)
    link = await DatabaseConnection.open(access_of(settings, os.environ))
    try:
        await check(link, names)
        rows = await link.fetch(statements.figures)
        ((sent,),) = await link.fetch(statements.sent)
        ((relays,),) = await link.fetch(statements.alive)
    finally:
        await link.close()
    counts = {row[0]: row[1] for row in rows}
    return {
        "queued": counts.get("queued", 0),
        "processing": counts.get("processing", 0),
        "sent": sent,
        "failed": counts.get("failed", 0),
        "oldest_seconds": max((row[2] or 0.0 for row in rows), default=0.0),
        "lag_seconds": max((row[3] or 0.0 for row in rows), default=0.0),
        "relays": relays,
    }
