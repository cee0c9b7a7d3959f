"""The reference pages are what `debian/manual.py` makes of the commands, the operations and the options."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from zonerelay.cli.arguments import GROUPS

ROOT = Path(__file__).parents[2]


@pytest.fixture
def manual() -> ModuleType:
    spec = importlib.util.spec_from_file_location("manual", ROOT / "debian" / "manual.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["commands.md", "api.md", "configuration.md"])
def test_the_reference_is_written_again_with_what_it_describes(
    manual: ModuleType, page: str, tmp_path: Path
) -> None:
    manual.reference(tmp_path)
    written = (ROOT / "docs" / "reference" / page).read_text()
    assert written == (tmp_path / page).read_text(), "make reference"


def test_each_command_has_its_page_and_its_completion(manual: ModuleType, tmp_path: Path) -> None:
    manual.main(tmp_path)
    assert (tmp_path / "usr/share/man/man5/zonerelay.toml.5.gz").is_file()
    completion = (tmp_path / manual.COMPLETION["bash"]).read_text()
    for command in (each for commands in GROUPS.values() for each in commands):
        assert (tmp_path / f"usr/share/man/man1/zonerelay-{command.top}.1.gz").is_file()
        assert f"_zonerelay_{command.words.replace(' ', '_').replace('-', '_')}_" in completion
