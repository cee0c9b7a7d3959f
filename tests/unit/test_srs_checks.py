"""[srs] in a configuration: what is refused, and where the secrets come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from zonerelay.cli.setup.check_config import try_out
from zonerelay.config.load import ConfigError, load_text
from zonerelay.config.problems import Report
from zonerelay.config.settings import Settings, SrsSettings
from zonerelay.config.tables.rewrite import srs_secrets

SECRET = "sixteen letters."


def test_a_zone_with_srs_and_all_it_needs_is_taken() -> None:
    text = (
        '[[zone]]\nsrs = true\n[srs]\ndomain = "SRS.example.com"\nsecret = "env:S"\nold_secrets = ["env:T"]'
    )
    assert load_text(text).srs.domain == "srs.example.com"


def test_the_secret_that_signs_is_first(tmp_path: Path) -> None:
    file = tmp_path / "old"
    file.write_text(f"{SECRET[::-1]}\n")
    settings = SrsSettings(domain="srs.example.com", secret="env:NEW", old_secrets=(str(file),))
    assert srs_secrets(settings, {"NEW": SECRET}) == (SECRET, SECRET[::-1])


def test_a_start_and_check_config_say_the_same_about_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "short"
    file.write_text("too short")
    srs = SrsSettings(domain="srs.example.com", secret="env:MISSING", old_secrets=(str(file),))
    monkeypatch.delenv("MISSING", raising=False)
    report = Report({})
    try_out(Settings(hostname="relay.example.com", srs=srs), "relay.example.com", report)
    with pytest.raises(ConfigError) as refused:
        report.raise_problems()
    assert [str(problem) for problem in refused.value.problems] == [
        f"srs.old_secrets[0]: {file} has fewer than 16 characters (line 1)",
        "srs.secret: the environment variable MISSING is not set (line 1)",
    ]
    with pytest.raises(ValueError, match=r"^srs\.secret: the environment variable MISSING is not set$"):
        srs_secrets(srs, {})
    with pytest.raises(ValueError, match=r"^srs\.old_secrets\[0\]: .* fewer than 16 characters$") as short:
        srs_secrets(srs, {"MISSING": SECRET})
    assert "too short" not in str(short.value)
