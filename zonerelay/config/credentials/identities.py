"""API tokens: bearer tokens with a scope, in `identities.json` next to the spool.

A token consists of a prefix that secret scanners recognise and 256 random bits. The file contains its
SHA-256: a password needs a slow hash because it can be guessed, but 256 random bits cannot. Commands replace
the whole file, whether or not the relay is running. A relay reads it again if it has changed, so a removed
token is refused from the next request on. If the file may be written by others, or cannot be read, no token
is accepted, and IdentitiesError explains why.
"""

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from zonerelay.config.credentials.file import CredentialsError, locked, refuse_too_large, replace_file
from zonerelay.config.credentials.secrets import SecretError, read_secret

FILE_NAME = "identities.json"
PREFIX = "zrt_"
MAX_FILE = 32 * 1024 * 1024
MAX_TOKENS = 100_000
MIN_TOKEN = 32
TOKEN_FILE = "token_file"  # noqa: S105 - a name
"""The name of the token in `[admin] token_file`; `token add` refuses this name."""
VERSION = 1

Scope = Literal["read", "operate", "submit"]


class IdentitiesError(Exception):
    """The token file cannot be used, or cannot be changed as requested. The text names it, for the
    operator.
    """


class Token(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An API token with its name, scope and expiry. `sha256` is the hash of the whole token, in hexadecimal.
    Times are Unix seconds; `expires` 0 means never.

    `user` is the user in the credentials file on whose behalf the token submits mail, or "".
    """

    name: str
    scope: Scope
    sha256: str
    created: float
    expires: float = 0.0
    user: str = ""

    def may(self, scope: Scope) -> bool:
        """Return whether the token permits requests of this scope. `operate` includes `read`; `submit` is for
        submission only.
        """
        return self.scope == scope or (self.scope, scope) == ("operate", "read")


class _TokenFile(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the file with the API tokens."""

    version: int = VERSION
    tokens: tuple[Token, ...] = ()


def identities_file(directory: Path) -> Path:
    """Return the path of the file with the API tokens. `directory` is the directory that contains the
    spool.
    """
    return directory / FILE_NAME


def make_token() -> str:
    return PREFIX + secrets.token_hex()


class Identities:
    """The API tokens of a running relay. `now` returns Unix time. `token_file` is the file of the option
    `[admin] token_file`.
    """

    def __init__(self, path: Path, now: Callable[[], float], *, token_file: Path | None = None) -> None:
        self._path = path
        self._now = now
        self._token_file = token_file
        self._seen: tuple[int, ...] | None = None
        self._by_hash: dict[str, Token] = {}
        self._by_name: dict[str, Token] = {}

    def identify(self, text: str) -> Token | None:
        """Return the API token with this text if it is valid, or None otherwise. Raise IdentitiesError if the
        file is unusable.
        """
        self._refresh()
        # The time of a lookup by hash reveals nothing, because nobody can choose the hash of a text.
        found = self._by_hash.get(_digest(text))
        if found is None and self._token_file is not None:
            found = read_token_file(self._token_file)
            return found if hmac.compare_digest(found.sha256, _digest(text)) else None
        return None if found is None or 0 < found.expires <= self._now() else found

    def named(self, name: str) -> Token | None:
        """Return the API token with this name if it is valid, or None otherwise. A session or stream ends
        when the result is not equal to the token that began it.

        Raise IdentitiesError if the file is unusable.
        """
        if name == TOKEN_FILE and self._token_file is not None:
            return read_token_file(self._token_file)
        self._refresh()
        found = self._by_name.get(name)
        return None if found is None or 0 < found.expires <= self._now() else found

    def _refresh(self) -> None:
        try:
            status = os.stat(self._path)  # noqa: PTH116 - for every request: pathlib takes twice the time
        except FileNotFoundError:
            self._seen, self._by_hash, self._by_name = None, {}, {}
            return
        except OSError as error:
            raise IdentitiesError(f"{self._path}: {error.strerror or error}") from error
        seen = (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)
        if seen != self._seen:
            tokens = read(self._path)
            self._by_hash = {each.sha256: each for each in tokens}
            self._by_name = {each.name: each for each in tokens}
            self._seen = seen


def read_token_file(path: Path) -> Token:
    """Read the token in the file that `[admin] token_file` names. Raise IdentitiesError if the file is
    unusable.
    """
    try:
        text = read_secret(str(path.absolute()), {}).strip()
    except SecretError as error:
        raise IdentitiesError(str(error)) from error
    if not (len(text) >= MIN_TOKEN and text.isascii() and len(text.split()) == 1):
        raise IdentitiesError(f"{path} contains no token: expected a line of at least {MIN_TOKEN} characters")
    return Token(name=TOKEN_FILE, scope="operate", sha256=_digest(text), created=0.0)


def read(path: Path) -> tuple[Token, ...]:
    """Read the API tokens from their file, or return none if the file does not exist. Raise IdentitiesError
    if it is unusable.
    """
    try:
        with path.open("rb") as file:
            _refuse_open_to_others(path, os.fstat(file.fileno()))
            data = file.read(MAX_FILE + 1)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise IdentitiesError(f"{path}: {error.strerror or error}") from error
    if len(data) > MAX_FILE:
        raise IdentitiesError(f"{path}: the file exceeds {MAX_FILE} bytes")
    try:
        content = msgspec.json.decode(data, type=_TokenFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise IdentitiesError(f"{path} is damaged ({error}); restore or remove it") from None
    if content.version != VERSION:
        raise IdentitiesError(f"{path} was written by an incompatible release (version {content.version})")
    return content.tokens


def add(path: Path, token: Token) -> None:
    """Add a token to the file with the API tokens. Raise IdentitiesError on failure, including if a token has
    that name.
    """

    def added(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
        if any(each.name == token.name for each in tokens):
            raise IdentitiesError(f"the token {token.name} already exists; remove it, or choose another name")
        if len(tokens) >= MAX_TOKENS:
            raise IdentitiesError(f"the limit of {MAX_TOKENS} tokens is reached; remove unused ones")
        return (*tokens, token)

    _change(path, added)


def remove(path: Path, name: str) -> None:
    """Remove a token from the file with the API tokens. Raise IdentitiesError on failure, including if there
    is no such token.
    """

    def removed(tokens: tuple[Token, ...]) -> tuple[Token, ...]:
        left = tuple(each for each in tokens if each.name != name)
        if left == tokens:
            raise IdentitiesError(f"the token {name} does not exist in {path}")
        return left

    _change(path, removed)


def token_of(text: str, name: str, scope: Scope, *, created: float, expires: float, user: str) -> Token:
    return Token(name=name, scope=scope, sha256=_digest(text), created=created, expires=expires, user=user)


def _change(path: Path, change: Callable[[tuple[Token, ...]], tuple[Token, ...]]) -> None:
    path = Path(os.path.realpath(path))
    if not path.parent.exists():
        raise IdentitiesError(f"{path.parent} does not exist; the relay creates it at its first start")
    try:
        with locked(path.parent):
            content = _TokenFile(tokens=change(read(path)))
            text = msgspec.json.format(msgspec.json.encode(content).decode(), indent=1) + "\n"
            refuse_too_large(path, text, MAX_FILE)
            replace_file(path, text)
    except CredentialsError as error:
        raise IdentitiesError(str(error)) from error


def _refuse_open_to_others(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise IdentitiesError(f"{path} is not a file")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise IdentitiesError(
            f"{path} is writable by other users, who could add tokens; run chmod go-w on it"
        )
    directory = path.parent.stat().st_uid
    if status.st_uid not in (0, os.geteuid(), directory):
        owner = "it must belong to root or to the relay's user"
        raise IdentitiesError(f"{path} belongs to user {status.st_uid}; {owner}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
