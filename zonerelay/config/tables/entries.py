"""Rules for tables that are written several times, as [[source]] is: names, and entries that never match."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from zonerelay.config.problems import KeyPath, Report
from zonerelay.config.wording import did_you_mean, in_words, quoted

Entry = TypeVar("Entry")

MAX_COMPARED = 300
"""Entries of which each is compared with all before it; of more, only with those that take everything."""


def check_names(table: str, names: Sequence[str], missing: str, report: Report) -> None:
    """Refuses an entry without a name, with the text `missing`, and one with the name of an earlier entry."""
    first: dict[str, int] = {}
    for at, name in enumerate(names):
        path = (table, at, "name")
        if not report.sound(*path):
            continue
        if not name:
            report.refuse(path, missing)
        elif (there := first.setdefault(name, at)) != at:
            report.refuse(path, f"{quoted(name)} is the name of {table}[{there}] already")


def check_known(name: str, names: Iterable[str], what: str, path: KeyPath, report: Report) -> bool:
    """Refuses the option at `path` when it names what is not in `names`, with the nearest name or all names.
    Returns whether it is known.
    """
    known = list(names)
    if name in known:
        return True
    near = did_you_mean(name, known) or (f"; there is {in_words(known)}" if known else "")
    report.refuse(path, f"{what} {quoted(name)}{near}")
    return False


def unreachable(
    entries: Sequence[Entry], covers: Callable[[Entry, Entry], bool], takes_all: Callable[[Entry], bool]
) -> Iterator[tuple[int, int]]:
    """Yields each entry that never matches, with the earlier entry that covers it; both as positions."""
    earlier: list[int] = []
    for at, entry in enumerate(entries):
        other = next((place for place in earlier if covers(entries[place], entry)), None)
        if other is not None:
            yield at, other
        elif len(entries) <= MAX_COMPARED or takes_all(entry):
            earlier.append(at)
