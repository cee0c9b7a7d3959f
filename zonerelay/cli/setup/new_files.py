"""Creates files atomically, with their final permissions from the first byte on."""

from __future__ import annotations

from pathlib import Path

from zonerelay import durable
from zonerelay.cli.terminal.exits import CliError


def write_new(path: Path, content: bytes, mode: int) -> None:
    """Write a file atomically: a reader sees the old file or the new one. Create missing directories.

    Raise CliError if the file cannot be written.
    """
    try:
        durable.make_directory(path.parent, mode=0o755)
        durable.write(path, content, mode=mode)
    except OSError as error:
        raise CliError(f"{path} cannot be written: {error.strerror}") from error


def refuse_existing(*paths: Path, hint: str) -> None:
    for path in paths:
        if path.is_symlink() or path.exists():
            raise CliError(f"{path} already exists: {hint}")
