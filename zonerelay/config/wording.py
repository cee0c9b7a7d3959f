"""How problems quote, list and suggest, and how URLs are shown: without what may be a secret in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

_SHOWN = 80
MASK = "***"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,20}://)([^\s\"'<>]+)")
_WORD = re.compile(r"[^\s,<>\"']+")
_TOKEN = re.compile(r"/(?=[^/]*[0-9])[^/]{16,}")
"""Part of a path: as long as the tokens that chat services put into the addresses of their hooks."""
_VALUE = re.compile(r"([^&;=]*=)?[^&;]+")
_WEB = ("http://", "https://")
_PLAIN = tuple(
    f"{key}="
    for key in (
        "host", "port", "user", "dbname", "sslmode", "sslrootcert", "sslcert", "sslkey", "db", "prefix",
    )
)  # fmt: skip
"""Keys of queries whose values are shown: those of databases."""


def masked(text: str) -> str:
    """Returns the text with what may be a secret in a URL masked: a password, in web addresses the user name
    too, values of the query, the fragment, and parts of a path that look like tokens.
    """
    return _URL.sub(lambda found: found[1] + _masked(found[2], is_web=found[1].lower() in _WEB), text)


def _masked(rest: str, *, is_web: bool) -> str:
    rest, mark, _ = rest.partition("#")
    fragment = f"#{MASK}" if mark else ""
    rest, mark, query = rest.partition("?")
    login, at, rest = rest.rpartition("@")
    if is_web:
        login, rest = MASK if login else "", _TOKEN.sub(f"/{MASK}", rest)
    elif ":" in login:
        login = f"{login.partition(':')[0]}:{MASK}"
    return f"{login}{at}{rest}{mark}{_VALUE.sub(_masked_value, query)}{fragment}"


def _masked_value(found: re.Match[str]) -> str:
    return found[0] if found[1] in _PLAIN else f"{found[1] or ''}{MASK}"


def _without_login(found: re.Match[str]) -> str:
    """Masks NAME:PASSWORD@ where no scheme says that it is a URL."""
    login, at, rest = found[0].rpartition("@")
    return f"{MASK}{at}{rest}" if ":" in login and "://" not in login else found[0]


def quoted(text: str) -> str:
    """The text as the file has it, on one line and not too long, without a secret that a URL in it has."""
    if "@" in text or "://" in text:
        text = _WORD.sub(_without_login, masked(text))
    shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    # What is not printable could break the line, or turn it round.
    return json.dumps(shown, ensure_ascii=not shown.isprintable())


def in_words(words: Iterable[str], joiner: str = "and") -> str:
    """`"a"`, `"a" and "b"`, `"a", "b" and "c"`."""
    *first, last = [quoted(word) for word in words]
    return f"{', '.join(first)} {joiner} {last}" if first else last


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?` with the nearest known word, or nothing when none is near."""
    import difflib  # noqa: PLC0415 - only with a mistake

    nearest = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""
