"""Refresh tokens that a token server has replaced: written down before the new access token is used.

A server that rotates refresh tokens may not take the old one again, so one that is lost costs the operator
another round in a browser. The new one goes to the file that held the old one, in one step and readable by
its owner alone. Where that cannot be written (an environment variable, systemd's credentials, a directory
that the relay may only read) it goes to a file of its own in `directory`, which counts as long as the
operator's original is still the one that it replaces.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path

from zonerelay.config.credentials.secrets import SecretError

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
