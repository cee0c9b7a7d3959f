"""Reads secrets, and keeps refresh tokens that a token server has replaced.

A file is looked at each time its secret is needed and read again when it has changed, so that a new password
needs no restart and no signal.

A server that rotates refresh tokens may refuse the old one, so a lost token costs the operator another log-in
in a browser. A new token is stored before the new access token is used: in the file that held the old one,
atomically and readable by its owner alone. Where that file cannot be written (an environment variable,
systemd's credentials, a directory that the relay may only read) the token goes to a file of its own in
`directory`. That file is used as long as the operator has not changed the original which it replaces.

Raises SecretError, whose text is for the operator.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from zonerelay import durable
from zonerelay.config.credentials.secrets import SecretError, read_secret, secret_path
from zonerelay.delivery.auth.accounts import digest
from zonerelay.model.queue_name import Kind, queue_of
from zonerelay.process.threads import FILES

# The fields of stat that change with a file.
_Look = tuple[int, ...]


class Secrets:
    """One per worker. References with `env:` and `credential:` point into `environment`."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self._read: dict[str, tuple[_Look, str]] = {}
        self.of_mailbox: Callable[[str], str] | None = None
        """Returns the password of a mailbox of the outbox, by its zone. Raises SecretError."""

    async def get(self, reference: str) -> str:
        """Returns the secret behind a reference. Raises SecretError."""
        if self.of_mailbox is not None and queue_of(reference).kind is Kind.MAILBOX:
            return self.of_mailbox(reference)
        path = secret_path(reference, self.environment)
        if path is None:
            return read_secret(reference, self.environment)
        look = _look(path)
        known = self._read.get(reference)
        if known is None or known[0] != look:
            secret = await FILES.run(read_secret, reference, self.environment)
            known = self._read[reference] = (look, secret)
        return known[1]

    def forget(self) -> None:
        """Drops what was read, because new settings have other references."""
        self._read.clear()


def _look(path: Path) -> _Look:
    """Runs on the event loop: a stat takes microseconds on a small local file, a thread would cost a
    hundred.
    """
    try:
        found = os.stat(path)  # noqa: PTH116  (half the time of Path.stat)
    except OSError as error:
        raise SecretError(f"{path} cannot be read: {error.strerror}") from error
    return (found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev, found.st_size)


MAX_KEPT = 256 * 1024


class KeptTokens:
    """Refresh tokens in `directory`, which must be private to the relay. Methods block: run them in a
    thread.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def current(self, credential: str, original: str) -> str:
        """Returns the token that has replaced the operator's, or the operator's own. Raises SecretError."""
        path = self._path(credential)
        try:
            with path.open("rb") as file:
                kept = json.loads(file.read(MAX_KEPT))
        except (FileNotFoundError, NotADirectoryError):
            return original
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is damaged"
            raise SecretError(f"{path} cannot be read: {reason}; remove it to start afresh") from error
        match kept:
            case {"replaces": str(replaced), "refresh_token": str(token)} if token:
                return token if replaced == digest(original) else original
        raise SecretError(f"{path} is damaged; remove it to start afresh")

    def replace(self, credential: str, reference: str, original: str, token: str) -> None:
        """Stores a token. `original`: the present value of `reference`. Raises SecretError when no place
        takes it.
        """
        if reference.startswith("/"):
            with contextlib.suppress(OSError):
                durable.write(Path(reference), f"{token}\n".encode())
                return
        path = self._path(credential)
        document = json.dumps({"replaces": digest(original), "refresh_token": token})
        try:
            durable.make_directory(self._directory)
            durable.write(path, f"{document}\n".encode())
        except OSError as error:
            raise SecretError(f"the new refresh token cannot be kept in {path}: {error.strerror}") from error

    def _path(self, credential: str) -> Path:
        return self._directory / f"{credential}.json"
