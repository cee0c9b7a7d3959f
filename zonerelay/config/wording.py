"""How problems quote, list and suggest."""

from __future__ import annotations

import json
from collections.abc import Iterable

_SHOWN = 80


def quoted(text: str) -> str:
    """The text as the file has it, on one line and not too long."""
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
