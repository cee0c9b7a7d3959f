"""Users for tests: real argon2 hashes, made once and cheap (8 KiB, one pass)."""

import time
from functools import cache
from pathlib import Path

from argon2 import PasswordHasher

from zonerelay.config.credentials.file import User, format_line
from zonerelay.config.credentials.identities import Scope, add, make_token, token_of


@cache
def cheap_hash(password: str) -> str:
    return PasswordHasher(time_cost=1, memory_cost=8, parallelism=1).hash(password)


def user(name: str = "app", password: str = "correct horse", *senders: str) -> User:
    return User(name, cheap_hash(password), senders)


def file_of(*users: User) -> str:
    return "".join(f"{format_line(user)}\n" for user in users)


def token(
    file: Path, name: str = "alice", scope: Scope = "operate", *, of: str = "", expires: float = 0.0
) -> str:
    """Return a token that is in a file of identities from now on; `of` is its user."""
    text = make_token()
    add(file, token_of(text, name, scope, created=time.time(), expires=expires, user=of))
    return text
