"""Reads secrets from the files and environment variables that the configuration names. No message of this
module contains a secret.

A place is a file, an environment variable (`env:NAME`), or a credential from systemd (`credential:NAME`, a
file in $CREDENTIALS_DIRECTORY).
"""

import re
import stat
from collections.abc import Mapping
from pathlib import Path

MAX_SECRET = 64 * 1024

_CONTROLS = re.compile(r"[\x00-\x1f\x7f]")


class SecretError(ValueError):
    """A secret cannot be read. The text explains why and names the place, for the operator."""


def read_secret(reference: str, environment: Mapping[str, str]) -> str:
    """Read the secret to which a reference points: the content of a file or of an environment variable. Raise
    SecretError if it cannot be read.
    """
    kind, _, name = reference.partition(":")
    if kind == "env" and not reference.startswith("/"):
        secret = environment.get(name, "")
        if not secret:
            raise SecretError(f"the environment variable {name} is not set")
        if not secret.isascii() and any("\ud800" <= c <= "\udfff" for c in secret):
            raise SecretError(f"the environment variable {name} is not UTF-8")
        return secret
    path = secret_path(reference, environment)
    assert path is not None
    try:
        with path.open("rb") as file:
            octets = file.read(MAX_SECRET + 1)
    except OSError as error:
        raise SecretError(f"{path} cannot be read: {error.strerror}") from error
    if len(octets) > MAX_SECRET:
        raise SecretError(f"{path} exceeds {MAX_SECRET} bytes")
    try:
        secret = octets.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise SecretError(f"{path} is not UTF-8") from error
    if not secret:
        raise SecretError(f"{path} is empty")
    if _CONTROLS.search(secret):
        raise SecretError(f"{path} is not one line of text; the file must contain only the secret")
    return secret


def secret_path(reference: str, environment: Mapping[str, str]) -> Path | None:
    """Return the path of the file to which a secret's reference points, or None for an environment variable.
    Raise SecretError on failure.
    """
    if reference.startswith("/"):
        return Path(reference)
    kind, _, name = reference.partition(":")
    if kind == "env":
        return None
    directory = environment.get("CREDENTIALS_DIRECTORY", "")
    if not directory:
        raise SecretError(f"credential:{name} requires $CREDENTIALS_DIRECTORY of systemd's LoadCredential=")
    return Path(directory) / name


def is_public(path: Path) -> bool:
    """Return whether every user of the machine may read the file. Raise OSError on failure."""
    return bool(stat.S_IMODE(path.stat().st_mode) & 0o007)
