"""Users for tests: real argon2 hashes, made once and cheap (8 KiB, one pass)."""

from __future__ import annotations

from functools import cache

from argon2 import PasswordHasher

from zonerelay.config.credentials.file import User, format_line


@cache
def cheap_hash(password: str) -> str:
    return PasswordHasher(time_cost=1, memory_cost=8, parallelism=1).hash(password)


def user(name: str = "app", password: str = "correct horse", *senders: str) -> User:
    return User(name, cheap_hash(password), senders)


def file_of(*users: User) -> str:
    return "".join(f"{format_line(user)}\n" for user in users)
