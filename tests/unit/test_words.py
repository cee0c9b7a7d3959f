"""Names: module names use known words, and a class has one meaning in its package.

A word is known if the glossary or `tests/data/field_words.txt` defines it, or if it is one of
`tests/data/programming_words.txt`.

`tests/data/word_exceptions.txt` lists what does not comply yet, a section for each test. A section may only
shrink: an entry that complies now fails its test, and `python -m tests.unit.test_words` removes it.
"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "zonerelay"
GLOSSARY = ROOT / "docs" / "reference" / "glossary.md"
FIELD_WORDS = ROOT / "tests" / "data" / "field_words.txt"
EXCEPTIONS = ROOT / "tests" / "data" / "word_exceptions.txt"
PROGRAMMING_WORDS = ROOT / "tests" / "data" / "programming_words.txt"
MAX_FIELD_WORDS = 150
MAX_PRIVATE_ROWS = 30

_ENDINGS: tuple[tuple[str, str], ...] = (
    ("ies", "y"), ("es", ""), ("s", ""), ("ing", ""), ("ing", "e"), ("ed", ""), ("ed", "e"), ("er", ""),
    ("er", "e"), ("or", ""), ("or", "e"), ("ion", ""), ("ion", "e"),
)  # fmt: skip
"""A word counts as known in its plural, and as the noun of its verb."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def of(path: Path) -> str:
    """The dotted name of a module or of a package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def forms(word: str) -> frozenset[str]:
    found = {word}
    for _ in range(2):  # "settings": a plural of a noun of a verb
        for each in list(found):
            found |= {
                each[: -len(end)] + new
                for end, new in _ENDINGS
                if each.endswith(end) and len(each) - len(end) >= 3
            }
    found |= {each[:-1] for each in found if len(each) > 3 and each[-1] == each[-2]}  # "settled", "dropped"
    return frozenset(found)


def field_words() -> dict[str, str]:
    """Each word with its source."""
    lines = FIELD_WORDS.read_text().splitlines()
    return dict(line.split("\t") for line in lines)


def glossary_words() -> Iterator[str]:
    """The words that a row of a table in the glossary defines."""
    for line in GLOSSARY.read_text().lower().splitlines():
        if line.startswith("|"):
            yield from re.findall(r"[a-z0-9]+", line.split("|")[1])


@cache
def known() -> frozenset[str]:
    programming = PROGRAMMING_WORDS.read_text().split()
    return frozenset().union(*map(forms, (*field_words(), *glossary_words(), *programming)))


def unknown_words() -> set[str]:
    words = {word for path in modules() for word in of(path).rpartition(".")[2].split("_")}
    return {word for word in words if not forms(word) & known()}


def homonyms() -> set[str]:
    """Public classes with several definitions in a top-level package, as `package.Class`."""
    counts: Counter[str] = Counter()
    for path in modules():
        package = path.relative_to(PACKAGE).with_suffix("").parts[0]
        for name in re.findall(r"^class ([A-Za-z]\w*)", path.read_text(), re.MULTILINE):
            counts[f"{package}.{name}"] += 1
    return {name for name, count in counts.items() if count > 1}


CHECKS = {"words": unknown_words, "classes": homonyms}


def exceptions() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {name: set() for name in CHECKS}
    section = ""
    for line in EXCEPTIONS.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line:
            found[section].add(line)
    return found


@pytest.mark.parametrize("name", CHECKS)
def test_what_does_not_comply_is_known_and_an_exception_that_complies_leaves_the_list(name: str) -> None:
    found = CHECKS[name]()
    assert sorted(found - exceptions()[name]) == []
    assert sorted(exceptions()[name] - found) == [], "run python -m tests.unit.test_words"


def test_the_field_words_are_few_and_each_has_its_source() -> None:
    assert 0 < len(field_words()) <= MAX_FIELD_WORDS
    source = re.compile(r"RFC \d{3,4} \d+(\.\d+)*|Postfix [a-z_-]+\(\d\)( \w+)?")
    assert [word for word, where in field_words().items() if not source.fullmatch(where)] == []


def test_the_relays_own_words_are_few() -> None:
    own = GLOSSARY.read_text().partition("## Words of this relay")[2].partition("\n## ")[0]
    assert 0 < len(re.findall(r"^\| (?!word |-)", own, re.MULTILINE)) <= MAX_PRIVATE_ROWS


def test_the_check_knows_plurals_and_nouns_of_verbs() -> None:
    assert forms("policies") & forms("policy")
    assert forms("settings") & forms("set")
    assert forms("writer") & forms("writing")
    assert not forms("doorway") & known()


def prune() -> None:
    """Remove exceptions that comply now; never add one."""
    left = {name: sorted(entries & CHECKS[name]()) for name, entries in exceptions().items()}
    EXCEPTIONS.write_text("".join(f"[{name}]\n" + "".join(f"{e}\n" for e in left[name]) for name in left))


if __name__ == "__main__":
    prune()
