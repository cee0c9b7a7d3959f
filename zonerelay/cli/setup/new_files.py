"""Files that a command makes: written whole, and with their rights from the first octet on."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from zonerelay.cli.terminal.exits import CliError


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Writes a file in one piece: a reader has the old file or the new one. Makes directories.

    Raises CliError.
    """
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CliError(f"{path} cannot be written: {error.strerror}") from error


def refuse_existing(*paths: Path, hint: str) -> None:
    for path in paths:
        if path.is_symlink() or path.exists():
            raise CliError(f"{path} exists already: {hint}")
