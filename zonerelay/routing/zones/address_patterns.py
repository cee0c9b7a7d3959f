"""Matches addresses against configured patterns, for access rules, routes and the senders of a user.

Patterns: "user@example.com"; "example.com" (and "@example.com"), every address there; "*.example.com", every
name below it but not the domain itself; "*", every address; "<>", the null sender, which no other pattern
matches. A `*` in a local part stands for any text. Local parts are compared without case and quotes, as
nearly every server delivers them: `SPAM@` or `"spam"@` must not evade a block list. Domains are compared as
A-labels in lower case.

The cost of a look-up does not grow with the number of patterns, except for patterns with a `*` in the local
part: those of the mail's domain whose text before the `*` matches are tried in turn.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache

from zonerelay.model.pattern import glob
from zonerelay.routing.addresses import ascii_domain, is_literal
from zonerelay.smtp.server.paths import literal_address

_ANY = "*"
_NULL_SENDER = "<>"
_EMPTY = '""'  # an empty local part, which is not the same as any local part
_ESCAPED = re.compile(r"\\(.)")


class AddressTable:
    """A lookup table of numbered address patterns, which finds those that match an address. Only "<>" matches
    the null sender.

    Raises ValueError with a message if the domain of a pattern is invalid.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, list[int]] = {}
        self._has_below = False
        self._globs: dict[str, _Globs] = {}  # by the domain pattern

    def add(self, pattern: str, number: int) -> None:
        if pattern == _NULL_SENDER:
            self._numbers.setdefault(pattern, []).append(number)
            return
        local, _, domain = pattern.rpartition("@")
        local, name = "" if local in ("", _ANY) else _local_part(local) or _EMPTY, _domain_pattern(domain)
        key = f"{local}@{name}"
        if local and (_ANY in local or _ANY in name):
            self._globs.setdefault(name, _Globs()).add(local, key)
        self._has_below = self._has_below or name.startswith("*.")
        self._numbers.setdefault(key, []).append(number)

    def find(self, mailbox: str) -> list[int]:
        """Return the numbers of all patterns that match the address, in order."""
        if not mailbox:
            return self._numbers.get(_NULL_SENDER, [])
        local, domain = _parts(mailbox)
        names = [domain, _ANY]
        if self._has_below:
            names += (f"*.{parent}" for parent in _parents(domain))
        keys = {f"{local or _EMPTY}@{domain}", *(f"@{name}" for name in names)}
        for name in names if self._globs else ():
            if name in self._globs:
                keys.update(self._globs[name].find(local))
        numbers = [number for key in keys if key in self._numbers for number in self._numbers[key]]
        return numbers if len(numbers) < 2 else sorted(set(numbers))


class AddressPatterns:
    """A set of address patterns. Raises ValueError with a message if the domain of a pattern is invalid."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = tuple(patterns)
        self._table = AddressTable()
        for number, pattern in enumerate(self._patterns):
            self._table.add(pattern, number)

    def match(self, mailbox: str) -> bool:
        """Return whether any pattern matches the address. `mailbox` is as in an envelope, with `""` for the
        null sender.
        """
        return bool(self.find(mailbox))

    def find(self, mailbox: str) -> str:
        """Return the first pattern that matches the address, as it was written, or `""`."""
        found = self._table.find(mailbox)
        return self._patterns[found[0]] if found else ""


class _Globs:
    """The patterns for local parts that contain `*`, indexed by the text before the `*`."""

    def __init__(self) -> None:
        self._by_start: dict[str, list[tuple[Callable[[str], object], str]]] = {}
        self._lengths: set[int] = set()

    def add(self, local: str, pattern: str) -> None:
        start = local.partition(_ANY)[0]
        self._by_start.setdefault(start, []).append((glob(local).fullmatch, pattern))
        self._lengths.add(len(start))

    def find(self, local: str) -> Iterator[str]:
        for length in self._lengths:
            for matches, pattern in self._by_start.get(local[:length], ()):
                if matches(local):
                    yield pattern


def _domain_pattern(pattern: str) -> str:
    if pattern in (_ANY, _NULL_SENDER):
        return pattern
    name = pattern.removeprefix("*.")
    try:
        ascii_form = _literal(name) if is_literal(name) else ascii_domain(name)
    except ValueError as error:
        raise ValueError(f'"{pattern}" cannot be matched: {error}') from error
    return f"*.{ascii_form}" if name != pattern else ascii_form


@lru_cache(4096)
def _parts(mailbox: str) -> tuple[str, str]:
    """Return the local part and the domain of an address in the form in which they are compared. A bare
    postmaster (RFC 5321 4.5.1) has no domain.
    """
    local, at, domain = mailbox.rpartition("@")
    if not at:
        return _local_part(domain), ""
    try:
        return _local_part(local), _literal(domain) if is_literal(domain) else ascii_domain(domain)
    except ValueError:
        return _local_part(local), domain.lower()


def _local_part(text: str) -> str:
    if len(text) > 1 and text.startswith('"') and text.endswith('"'):
        text = _ESCAPED.sub(r"\1", text[1:-1])
    return text.lower()


def _literal(domain: str) -> str:
    address = literal_address(domain)
    return f"[{address}]" if address is not None else domain.lower()


def _parents(domain: str) -> Iterator[str]:
    while domain := domain.partition(".")[2]:
        yield domain
