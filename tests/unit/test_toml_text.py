"""What `config show` prints is read back as the same settings, and says where each key is from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from zonerelay.cli.main import main
from zonerelay.config import toml_text
from zonerelay.config.load import load_text, read
from zonerelay.config.settings import Settings
from zonerelay.config.toml_text import defaults

FILES = [path.read_text() for path in sorted((Path(__file__).parents[2] / "config").rglob("*.toml"))]
RICH = """\
hostname = "relay.example.org"
workers = "auto"
[spool]
backend = "postgres"
min_free_space = "1.5 GB"
[postgres]
password = "env:DATABASE_PASSWORD"
[[listener]]
address = "[::1]:2525"
allow_networks = ["192.0.2.0/24", "2001:db8::/32"]
[[zone]]
name = "default"
max_connections = 5
schedule = ["90s", "2h", "0.25s"]
[[zone]]
name = "bulk"
max_rate = "100/1m"
mix_domains = true
header_add = ['X-Said: "quoted \\ text"']
[[dkim]]
domain = "example.org"
selector = "s1"
key_file = "/etc/zonerelay/s1.pem"
not_before = 2026-03-01T12:00:00+02:00
[[route]]
recipient = ["*@example.com"]
min_size = "1 MB"
zone = "bulk"
"""
UNFIT = ['[retry]\npolicy = "exponential"\n', '[retry]\nbackoff = "m:f"\n']
"""A default that is written out beside these is refused."""


@pytest.mark.parametrize("text", [*FILES, RICH, *UNFIT, ""])
def test_what_is_shown_reads_back_as_the_same_settings(text: str, tmp_path: Path) -> None:
    (path := tmp_path / "relay.toml").write_text(text)
    settings, report = read(path)
    for shown in (toml_text.effective(settings, report), toml_text.changed(settings, report)):
        assert load_text(shown) == settings


def test_the_defaults_read_back_and_name_every_table() -> None:
    shown = defaults()
    assert load_text(shown) == Settings()
    assert "#[[route]]\n" in shown
    assert "\n[[zone]]\n" in shown


def test_only_what_differs_has_a_line_or_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "relay.toml").write_text(RICH)
    assert main(["config", "show", "--changed", "--config", str(path)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert 'min_free_space = "1536 MB"  # line 5' in shown
    assert "max_connections_per_destination = 5  # depends on other options" in shown
    assert 'name = "default"  # line 12' in shown
    assert not [line for line in shown if "port" in line]


def test_a_secret_is_shown_as_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_PASSWORD", "hunter2")
    (path := tmp_path / "relay.toml").write_text(RICH)
    assert main(["config", "show", "--json", "--config", str(path)]) == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out
    assert json.loads(out)["postgres"]["password"] == "env:DATABASE_PASSWORD"
    assert json.loads(out)["zone"][1]["max_rate"] == "100/1m"


def test_a_wrong_file_is_a_list_of_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "relay.toml").write_text('wokers = 2\n[retry]\njitter = "x"\n')
    assert main(["config", "show", "--config", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
