"""What the pages name is there: files, headings, metrics, options, commands, and examples that load."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from zonerelay.cli import arguments
from zonerelay.config.checks import advice
from zonerelay.config.load import load_text
from zonerelay.config.toml_text import options

ROOT = Path(__file__).parents[2]
PAGES = [
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING")),
]
"""Not the change log: it may name what has gone."""
TEXTS = [*PAGES, *(ROOT / "config").glob("*.toml"), *(ROOT / "systemd").iterdir(), ROOT / "Dockerfile"]

_OTHERS_FILES = ("# /etc/zonerelay/credentials.rails.toml",)
"""First lines of examples that are no configuration of the relay."""
_FOLDERS = {path.name for path in (ROOT, ROOT / "zonerelay") for path in path.iterdir() if path.is_dir()}
_FILES = {path.name for folder in ("zonerelay", "tests", "docs") for path in (ROOT / folder).rglob("*.*")}
_NO_FILES = ("message/rfc822", "message/global", "queue/ID", "history/00.db")
"""Media types; an object in a bucket; a file of a running relay."""
_CODE = "".join(path.read_text() for path in ROOT.glob("zonerelay/**/*.py"))
_METRICS = {*re.findall(r'"(zonerelay_\w+)"', _CODE), "zonerelay_info"}


def spans(page: Path) -> Iterator[tuple[int, str]]:
    """What stands in back-ticks, with its line."""
    for number, line in enumerate(page.read_text().splitlines(), 1):
        for span in re.findall(r"`([^`]+)`", line):
            yield number, span


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            aim = page.parent / target if target else page
            assert aim.exists(), f"{page}: {target}"
            assert not anchor or anchor in headings(aim), f"{page}: {target}#{anchor}"


def test_the_index_leads_to_every_page() -> None:
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text()
    pages = [str(page.relative_to(docs)) for page in docs.rglob("*.md") if page != docs / "README.md"]
    assert [page for page in pages if f"({page})" not in index] == []


@cache
def headings(page: Path) -> frozenset[str]:
    """As GitHub spells them in links."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return frozenset(re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found)


def test_every_file_that_is_named_exists() -> None:
    for page in PAGES:
        for number, span in spans(page):
            folder, _, rest = span.partition("/")
            if rest and folder in _FOLDERS and span not in _NO_FILES and re.fullmatch(r"[\w/.]+", rest):
                places = (span, f"zonerelay/{span}", f"zonerelay/{span}.py", f"tests/{span}")
                assert any((ROOT / place).exists() for place in places), f"{page}:{number}: {span}"
            elif test := re.fullmatch(r"(\w+/[\w/]+\.py)::(\w+)", span):
                assert f"def {test[2]}(" in (ROOT / "tests" / test[1]).read_text(), f"{page}:{number}: {span}"
            elif re.fullmatch(r"\w+\.(py|md|lua)", span):
                assert span in _FILES or (ROOT / span).exists(), f"{page}:{number}: {span}"


def test_every_metric_that_is_named_exists() -> None:
    for page in TEXTS:
        for name in re.findall(r"\bzonerelay_[a-z_]+\b", page.read_text()):
            assert {name, re.sub("_(bucket|count|sum)$", "", name)} & _METRICS, f"{page}: {name}"


def test_every_option_that_is_named_with_its_table_exists() -> None:
    for page in PAGES:
        for number, span in spans(page):
            if match := re.fullmatch(r"\[+([a-z0-9]+)\]+(?: ([a-z_]+))?(?: = .*)?", span):
                assert (match[1], match[2] or "") in known_options(), f"{page}:{number}: {span}"


@cache
def known_options() -> frozenset[tuple[str, str]]:
    """Every table with each of its options, and with none."""
    found = [(described.heading.strip("[]"), described.key) for described in options()]
    return frozenset((*found, *((table, "") for table, _ in found)))


def test_every_example_of_a_configuration_loads() -> None:
    for page in PAGES:
        for example in re.findall(r"^```toml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            if not example.startswith(_OTHERS_FILES):
                load_text(re.sub(r"^#(?=[a-z])", "", example, flags=re.MULTILINE))
                settings = load_text(example)
                assert page.parent.name == "send" or list(advice(settings, "relay.example.org")) == []


def test_every_command_that_is_named_is_understood() -> None:
    for page in PAGES:
        for number, words in commands(page):
            parser = grammar()
            for word in words:
                verbs = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
                if word.startswith("--"):
                    assert word.partition("=")[0] in parser._option_string_actions, (
                        f"{page}:{number}: {words}"
                    )
                elif verbs and re.fullmatch("[a-z-]+", word):
                    assert word in verbs[0].choices, f"{page}:{number}: {words}"
                    parser = verbs[0].choices[word]


grammar = cache(arguments.build)


def commands(page: Path) -> Iterator[tuple[int, list[str]]]:
    """In code, where a line or what stands in back-ticks begins with the program."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        fenced ^= line.startswith("```")
        code = [line] if fenced or line.startswith("    ") else re.findall(r"`([^`]+)`", line)
        for each in code:
            if match := re.match(r"\s*(?:[$#] )?(?:sudo (?:-u \w+ )?)?zonerelay ([a-z][^|<>&#]*)", each):
                yield number, match[1].split()
