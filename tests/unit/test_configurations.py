"""Configurations as operators write them: what is refused at which line, what is noted, what is taken.

Every file in `configurations/` has cases, each behind a line `--- what it shows`. A case is TOML with what is
said of it:

    ! path: words    a problem of the line above, whose text contains the words
    ~ path: words    a note, wherever it stands
    ~                no note at all

There are as many problems as the case has. Where it has notes, there are as many of those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from zonerelay.config.checks import advice
from zonerelay.config.load import ConfigError, load_text

FOLDER = Path(__file__).parent / "configurations"


@dataclass
class Case:
    """A configuration with what is said of it."""

    lines: list[str] = field(default_factory=list)
    problems: list[tuple[int, str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] | None = None

    def add(self, line: str) -> None:
        sign, _, rest = line.partition(" ")
        path, _, words = rest.partition(": ")
        if sign == "!":
            self.problems.append((max(1, len(self.lines)), path, words))
        elif sign == "~":
            self.notes = [*(self.notes or []), *([(path, words)] if path else [])]
        else:
            self.lines.append(line)


def cases() -> Iterator[ParameterSet]:
    """Yield the parameters of the test, each with the name of its file and its number there."""
    for path in sorted(FOLDER.glob("*.txt")):
        found: list[Case] = []
        for line in path.read_text().splitlines():
            if line.startswith("---"):
                found.append(Case())
            else:
                found[-1].add(line)
        yield from (pytest.param(case, id=f"{path.stem}-{n}") for n, case in enumerate(found, 1))


CASES = list(cases())


@pytest.mark.parametrize("case", CASES)
def test_a_configuration(case: Case) -> None:
    text = "\n".join(case.lines)
    try:
        settings = load_text(text, "relay.toml")
    except ConfigError as error:
        found = sorted(error.problems, key=lambda problem: problem.line)
        compare(case.problems, [(each.line, each.path, each.text) for each in found])
        return
    assert not case.problems
    if case.notes is not None:
        compare(case.notes, [note.partition(": ")[::2] for note in advice(settings, "relay.example.org")])


def compare(wanted: Sequence[tuple[object, ...]], found: Sequence[tuple[object, ...]]) -> None:
    """Compare all but the last fields, which are words and texts that contain them."""
    assert [each[:-1] for each in found] == [each[:-1] for each in wanted], found
    for (*_, words), (*_, text) in zip(wanted, found, strict=True):
        assert str(words) in str(text)


def test_there_are_configurations() -> None:
    assert len(CASES) > 400
