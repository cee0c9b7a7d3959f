"""The reference pages are what `debian/manual.py` makes of the commands, the operations and the options."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

from zonerelay.admin.api.openapi import document
from zonerelay.admin.api.verbs import VERBS
from zonerelay.admin.problems import Code
from zonerelay.admin.submission.verbs import SUBMISSION
from zonerelay.cli.arguments import GROUPS
from zonerelay.telemetry.metrics.metrics import Metrics

ROOT = Path(__file__).parents[2]


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
