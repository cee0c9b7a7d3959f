"""The reference pages are what `debian/manual.py` makes of the commands and the operations."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("page", ["commands.md", "api.md"])
def test_the_reference_is_written_again_with_what_it_describes(page: str, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("manual", ROOT / "debian" / "manual.py")
    assert spec is not None
    assert spec.loader is not None
    manual = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(manual)
    manual.reference(tmp_path)
    written = (ROOT / "docs" / "reference" / page).read_text()
    assert written == (tmp_path / page).read_text(), "make reference"
