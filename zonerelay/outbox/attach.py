"""Builds the outbox of a worker: its keys, the access to its database, and the name of the relay in it."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from zonerelay.config.credentials.secrets import SecretError, read_secret
from zonerelay.config.settings import OutboxSettings, SpoolSettings
from zonerelay.outbox.database.passwords import PasswordError, read_key
from zonerelay.outbox.keeper import OutboxContext, OutboxKeeper
from zonerelay.outbox.rows.mailboxes import Mailboxes
from zonerelay.outbox.store import OutboxStore
from zonerelay.store.context import secret_of
from zonerelay.store.contract import StoreOpenError
from zonerelay.store.postgres.driver import DatabaseAccess, load_driver

NAME_FILE = "outbox-{:02d}.name"


def build_outbox(
    spool: SpoolSettings, index: int, environment: Mapping[str, str], around: OutboxContext
) -> OutboxStore:
    """Return the outbox of worker `index`. Raises StoreOpenError if a secret cannot be read."""
    load_driver()
    outbox = around.settings
    name = _locked_name(spool.path.parent / NAME_FILE.format(index))
    mailboxes = Mailboxes(read_keys(outbox, environment), around.clock.monotonic)
    return OutboxStore(OutboxKeeper(access_of(outbox, environment), name, around), mailboxes)


def _locked_name(path: Path) -> str:
    """Return a name of this relay that survives restarts and is unique among running relays.

    The name is in a file next to the spool, which stays open and locked until the process ends. A relay that
    finds it locked uses a name for this run only.
    """
    name = secrets.token_hex(16)
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return name  # then the claims of an earlier run are taken over when its lease has ended
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return name
    if known := os.read(file, 64).decode("ascii", "replace").strip():
        return known
    os.write(file, f"{name}\n".encode())
    return name


def access_of(outbox: OutboxSettings, environment: Mapping[str, str]) -> DatabaseAccess:
    password = secret_of("outbox.password", outbox.password, environment)
    return DatabaseAccess(outbox.url, password, outbox.schema, "zonerelay outbox", outbox.lease)


def read_keys(outbox: OutboxSettings, environment: Mapping[str, str]) -> list[bytes]:
    """Read the keys that decrypt the passwords of mailboxes. Raises StoreOpenError."""
    keys = []
    for at, reference in enumerate(outbox.keys):
        try:
            keys.append(read_key(read_secret(reference, environment)))
        except (SecretError, PasswordError) as error:
            raise StoreOpenError(f"outbox.keys[{at}]: {error}") from error
    return keys
