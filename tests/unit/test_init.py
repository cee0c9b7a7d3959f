"""`zonerelay init`: nothing is overwritten, and a relay of the machine keeps its mail where its unit says."""

from __future__ import annotations

from pathlib import Path

import pytest

from zonerelay.cli.main import main
from zonerelay.cli.setup.init import configuration
from zonerelay.config.load import load_text
from zonerelay.config.settings import Settings


@pytest.mark.parametrize("existing", ["zonerelay.toml", "zonerelay.socket"])
def test_a_file_that_exists_is_named_and_no_other_is_written(
    existing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / existing).write_text("mine")
    assert main(["init", str(tmp_path)]) == 1
    assert f"{tmp_path / existing} already exists" in capsys.readouterr().err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {existing: "mine"}


def test_a_path_that_a_unit_would_have_to_quote_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / "my mail")]) == 2
    assert "the path may contain" in capsys.readouterr().err


def test_the_configuration_of_the_machine_is_the_default_but_for_comments() -> None:
    assert load_text(configuration(None)) == Settings()
