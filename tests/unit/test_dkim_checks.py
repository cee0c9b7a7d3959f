"""[[dkim]] in the configuration: what is refused, and what check-config finds out by trying."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from tests.support.dkim import rsa_pem
from zonerelay.cli.setup.check_config import run
from zonerelay.config.checks import advice
from zonerelay.config.load import load_text

GOOD = '[[dkim]]\ndomain = "example.com"\nselector = "s1"\nkey_file = "s1.key"\n'


# check-config tries the keys.


@pytest.fixture
def config(tmp_path: Path) -> Path:
    key = tmp_path / "s1.key"
    key.write_bytes(rsa_pem())
    key.chmod(0o600)
    path = tmp_path / "zonerelay.toml"
    path.write_text(GOOD.replace('"s1.key"', f'"{key}"'))
    return path


@pytest.mark.parametrize(
    ("domain", "noted"),
    [
        ("relay.example.com", False),
        ("*.example.com", False),
        ("example.com", True),
        ("*.lay.example.com", True),
    ],
)
def test_a_zone_that_requires_signatures_has_reports_to_sign_too(domain: str, noted: bool) -> None:
    text = '[[zone]]\n[[zone]]\nname = "signed"\ndkim = "required"\n' + GOOD.replace("example.com", domain)
    notes = advice(load_text(text), "Relay.example.com")
    assert any(note.startswith("zone[1].dkim: required: bounces are sent from") for note in notes) is noted


def test_a_good_key_says_nothing(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(config) == 0
    out = capsys.readouterr().out
    assert "note: dkim" not in out


def test_a_key_that_everybody_can_read_is_noted(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = config.with_name("s1.key")
    key.chmod(0o644)
    assert run(config) == 0
    assert f"note: dkim[0].key_file: every user of this machine can read {key}" in capsys.readouterr().out
    assert stat.S_IMODE(key.stat().st_mode) == 0o644


def test_a_key_that_is_none_is_a_problem_with_its_line(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.with_name("s1.key").write_text("-----BEGIN PUBLIC KEY-----\n")
    assert run(config) == 2
    error = capsys.readouterr().err
    assert error.startswith("dkim[0].key_file: ")
    assert error.endswith("s1.key is not a private key in PEM (line 4)\n")


def test_every_key_that_is_missing_is_a_problem(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(GOOD.replace("s1.key", "/gone/1") + GOOD.replace("s1", "s2"))
    assert run(config) == 2
    problems = capsys.readouterr().err.splitlines()
    assert [line.partition(":")[0] for line in problems] == ["dkim[0].key_file", "dkim[1].key_file"]


def test_a_key_that_ends_soon_is_noted(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 86_400))
    config.write_text(config.read_text() + f"not_after = {end}\n")
    assert run(config) == 0
    assert "note: dkim[0].not_after: this key ends on" in capsys.readouterr().out
