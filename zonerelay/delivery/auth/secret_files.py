"""Secrets as they are now: a file is looked at each time it is needed, and read again when it has changed.

No restart and no signal after a password was changed. Raises SecretError, whose text is for the operator.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from zonerelay.config.credentials.secrets import SecretError, read_secret, secret_path
from zonerelay.model.outbox import is_mailbox_zone

# What stat says of a file.
_Look = tuple[int, ...]


class Secrets:
    """One per worker. `environment` is where `env:` and `credential:` point into."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self._read: dict[str, tuple[_Look, str]] = {}
        self.of_mailbox: Callable[[str], str] | None = None
        """`of_mailbox(zone)`: the password of a mailbox of the outbox. Raises SecretError."""

    async def get(self, reference: str) -> str:
        """Raises SecretError."""
        if self.of_mailbox is not None and is_mailbox_zone(reference):
            return self.of_mailbox(reference)
        path = secret_path(reference, self.environment)
        if path is None:
            return read_secret(reference, self.environment)
        look = _look(path)
        known = self._read.get(reference)
        if known is None or known[0] != look:
            secret = await asyncio.to_thread(read_secret, reference, self.environment)
            known = self._read[reference] = (look, secret)
        return known[1]

    def forget(self) -> None:
        """The settings have changed: other references count now."""
        self._read.clear()


def _look(path: Path) -> _Look:
    """On the event loop: microseconds for a small local file, and a thread would cost a hundred."""
    try:
        found = os.stat(path)  # noqa: PTH116  (half the time of Path.stat)
    except OSError as error:
        raise SecretError(f"{path} cannot be read: {error.strerror}") from error
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev, found.st_size)
