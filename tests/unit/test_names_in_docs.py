"""What the pages name is there, and what they explain is what the code has."""

import argparse
import importlib.util
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import fields
from enum import Enum
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import pytest

from tests.bench.strangers import PARSERS, Parser, inputs, seconds
from zonerelay.admin.api.openapi import document
from zonerelay.admin.api.verbs import VERBS
from zonerelay.admin.problems import Code
from zonerelay.admin.submission.verbs import SUBMISSION
from zonerelay.cli import arguments
from zonerelay.cli.arguments import GROUPS
from zonerelay.config import settings as tables
from zonerelay.config.checks import advice
from zonerelay.config.load import load_text
from zonerelay.config.settings import Backend, CredentialSettings, RouteSettings, SourceSettings, TlsMode
from zonerelay.config.toml_text import options
from zonerelay.inbound.refusal import Reason
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.replies import ServerReply
from zonerelay.message.dkim.keys import RecordStatus
from zonerelay.operations.requests import CHANGES
from zonerelay.outbox.database.tables import WRITTEN_BY_APPLICATIONS
from zonerelay.smtp.client.reputation import CLASSES
from zonerelay.telemetry.metrics.metrics import Metrics

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


# What a page explains in a table is what the code has: every option, value and reason


REFUSALS = {
    name: answer
    for name, answer in vars(replies).items()
    if isinstance(answer, ServerReply) and answer.reason is not None and answer.wire
}


def names(described: type[Any]) -> list[str]:  # Any: an enumeration, or a dataclass
    """The values of an enumeration, or the fields of a table."""
    if issubclass(described, Enum):
        return [each.value for each in described]
    return [field.name for field in fields(described)]


@pytest.mark.parametrize(
    ("page", "explained"),
    [
        ("deliver/destinations.md", names(tables.DestinationSettings)),
        ("deliver/dkim.md", names(RecordStatus)),
        ("deliver/replies.md", CLASSES),
        ("deliver/routing.md", names(RouteSettings)),
        ("deliver/smarthosts.md", names(CredentialSettings)),
        ("deliver/sources.md", names(SourceSettings)),
        ("deliver/tls.md", names(TlsMode)),
        ("operate/operating.md", CHANGES),
        ("send/listener.md", names(Reason)),
        ("send/outbox.md", WRITTEN_BY_APPLICATIONS),
        ("store/engines.md", names(Backend)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_name_is_explained(page: str, explained: Iterable[str]) -> None:
    text = (ROOT / "docs" / page).read_text()
    missing = [
        name for name in explained if not re.search(rf"`[^`\n]*\b{name}\b|^{name} = ", text, re.MULTILINE)
    ]
    assert missing == []


@pytest.mark.parametrize("name", list(REFUSALS))
def test_every_refusal_has_its_code_beside_its_reason(name: str) -> None:
    answer = REFUSALS[name]
    assert answer.reason is not None
    rows = (ROOT / "docs" / "send" / "listener.md").read_text().splitlines()
    (row,) = [line for line in rows if f"| `{answer.reason.value}` |" in line]
    assert f"`{answer.reply.code} {answer.reply.status}`" in row or f"`{answer.reply.code}`" in row


def test_the_fields_that_are_dropped_are_those_of_the_default() -> None:
    page = (ROOT / "docs" / "deliver" / "rewriting.md").read_text()
    table = page.partition("## What is dropped")[2].partition("\n\n- ")[0]
    cells = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    found = re.findall(r"`([A-Z][\w-]+)`", " ".join(cells))
    assert tuple(found) == load_text("").listener[0].drop_headers


# The reference pages are what `debian/manual.py` makes of the commands, the operations and the options


@pytest.fixture
def manual(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "debian")
    spec = importlib.util.spec_from_file_location("manual", ROOT / "debian" / "manual.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_written_again_with_what_it_describes(manual: ModuleType, tmp_path: Path) -> None:
    """Notes written by hand are read from the page, so the pages are there already."""
    shutil.copytree(ROOT / "docs" / "reference", tmp_path, dirs_exist_ok=True)
    manual.reference(tmp_path)
    pages = ("commands.md", "api.md", "configuration.md", "metrics.md", "events.md")
    for page in pages:
        written = (ROOT / "docs" / "reference" / page).read_text()
        assert (tmp_path / page).read_text() == written, f"{page}: make reference"


def test_every_event_has_a_meaning_and_every_metric_of_a_running_relay_is_there() -> None:
    events = (ROOT / "docs" / "reference" / "events.md").read_text()
    assert re.findall(r"(?m)^- `([\w-]+)` \([\w, ]+\): \.", events) == []
    assert "- `deferred` (info): one attempt" in events
    listed = re.findall(r"(?m)^\| `(zonerelay_\w+)", (ROOT / "docs" / "reference" / "metrics.md").read_text())
    scraped = re.findall(r"(?m)^# TYPE (zonerelay_\w+)", Metrics().exposition().decode())
    assert sorted(set(scraped) - set(listed)) == []


def test_each_command_has_its_page_and_its_completion(manual: ModuleType, tmp_path: Path) -> None:
    manual.main(tmp_path)
    assert (tmp_path / "usr/share/man/man5/zonerelay.toml.5.gz").is_file()
    completion = (tmp_path / manual.COMPLETION["bash"]).read_text()
    for command in (each for commands in GROUPS.values() for each in commands):
        assert (tmp_path / f"usr/share/man/man1/zonerelay-{command.top}.1.gz").is_file()
        assert f"_zonerelay_{command.words.replace(' ', '_').replace('-', '_')}_" in completion


def test_the_page_of_the_api_has_every_error_code_and_clients_can_be_generated() -> None:
    """`items: false` and defaults, which generated clients sent as values, were in the description."""
    failures = (ROOT / "docs" / "operate" / "api.md").read_text().partition("## Failures")[2]
    assert [code for code in get_args(Code) if f"`{code}`" not in failures] == []
    text = document((*VERBS, *SUBMISSION)).decode()
    assert not re.search(r'"items":false|prefixItems|"default":', text)
    description = json.loads(text)
    tags = {each["name"] for each in description["tags"]}
    for path, verbs in description["paths"].items():
        for verb in verbs.values():
            assert set(verb["tags"]) <= tags, path
    assert description["servers"]


# Parsers of what strangers send: each takes linear time, and the page has a row for each


PAGE = Path(__file__).parents[2] / "docs/develop/parsers.md"
SIZE = 16 * 1024


@pytest.mark.parametrize("parser", PARSERS, ids=[each.name for each in PARSERS])
def test_no_hostile_pattern_takes_long(parser: Parser) -> None:
    """A quarter of a second is what quadratic time takes at this size; the slowest takes a fifth of it."""
    for data in inputs(parser, min(SIZE, parser.most)):
        assert seconds(parser, data) < 0.25, data[:100]


def test_the_page_has_every_parser() -> None:
    rows = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    assert rows[1:] == [each.name for each in PARSERS]
