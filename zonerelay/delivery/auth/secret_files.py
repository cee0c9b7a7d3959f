"""Secrets as they are now: a file is looked at each time it is needed, and read again when it has changed.

No restart and no signal after a password was changed. Raises SecretError, whose text is for the operator.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import tempfile
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


MAX_KEPT = 256 * 1024


class KeptTokens:
    """`directory` must be private to the relay. Methods block: run them in a thread."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def current(self, credential: str, original: str) -> str:
        """What has replaced the operator's token, or that itself. Raises SecretError."""
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
                return token if replaced == _digest(original) else original
        raise SecretError(f"{path} is damaged; remove it to start afresh")

    def replace(self, credential: str, reference: str, original: str, token: str) -> None:
        """`original`: what `reference` says now. Raises SecretError when it can be kept nowhere."""
        if reference.startswith("/"):
            with contextlib.suppress(OSError):
                _write(Path(reference), f"{token}\n")
                return
        path = self._path(credential)
        document = json.dumps({"replaces": _digest(original), "refresh_token": token})
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            _write(path, f"{document}\n")
        except OSError as error:
            raise SecretError(f"the new refresh token cannot be kept in {path}: {error.strerror}") from error

    def _path(self, credential: str) -> Path:
        return self._directory / f"{credential}.json"


def _write(path: Path, text: str) -> None:
    """Whole or not at all, also after a power cut; readable by its owner alone."""
    path = path.resolve()  # a symbolic link stays one
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
