"""Matches strings against operators' patterns, in which `*` stands for any text. Pure."""

import re
from functools import lru_cache


def glob(pattern: str, flags: re.RegexFlag = re.NOFLAG) -> re.Pattern[str]:
    """Convert a pattern with `*` to a regular expression for `fullmatch`."""
    # Not fnmatch: `?` and `[` are ordinary characters of an address.
    first, *others = map(re.escape, pattern.split("*"))
    # Atomic groups: each part is searched from left to right, so that a text is read only once.
    middle = "".join(f"(?>.*?{part})" for part in others[:-1])
    return re.compile(first + middle + (f".*{others[-1]}" if others else ""), flags | re.DOTALL)


def is_like(pattern: str | None, text: str) -> bool:
    """Return whether a string matches this pattern, ignoring case. The pattern None matches every text."""
    return pattern is None or _compiled(pattern).fullmatch(text) is not None


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    return glob(pattern, re.IGNORECASE)
