"""conf.d beside the configuration: it is one document with it, and each problem names its file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from zonerelay.cli.main import main
from zonerelay.config.load import ConfigError, load, load_text, read, read_copy
from zonerelay.config.toml_text import effective

MAIN = """\
hostname = "relay.example.org"
[spool]
path = "/queue"
[[zone]]
name = "default"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "relay.toml").write_text(MAIN)
    return tmp_path / "relay.toml"


def add(config: Path, name: str, text: str) -> None:
    (config.parent / "conf.d" / name).write_text(text)


def problems(config: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(config)
    return list(map(str, caught.value.problems))


def test_tables_are_joined_in_the_order_of_names(config: Path) -> None:
    add(config, "20.toml", '[[zone]]\nname = "late"\n[spool]\nbackend = "memory"\n')
    add(config, "10.toml", '[[zone]]\nname = "early"\n[retry]\nmax_age = "1d"\n')
    add(config, "30.off", "not TOML")
    settings = load(config)
    assert [zone.name for zone in settings.zone] == ["default", "early", "late"]
    assert (settings.spool.backend, settings.spool.path) == ("memory", Path("/queue"))
    assert settings.retry.max_age == 86_400


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            '[spool]\npath = "/other"',
            "spool.path: is given again in line 2 of conf.d/a.toml (line 3 of relay.toml)",
        ),
        (
            'hostname = "b.example"',
            "hostname: is given again in line 1 of conf.d/a.toml (line 1 of relay.toml)",
        ),
        ("[zone]\nport = 26", "zone: is given again in line 1 of conf.d/a.toml (line 4 of relay.toml)"),
        ('\n[[zone]]\nname = "x"\ntls = "maybe"', "(line 4 of conf.d/a.toml)"),
        ('[[zone]]\nname = "x"\nprt = 5', "did you mean port? (line 3 of conf.d/a.toml)"),
        ("x = [", "conf.d/a.toml: is not valid TOML"),
    ],
)
def test_a_problem_names_the_file_and_the_line(config: Path, text: str, told: str) -> None:
    add(config, "a.toml", text)
    (problem,) = problems(config)
    assert told in problem


def test_problems_are_in_the_order_of_the_files(config: Path) -> None:
    add(config, "b.toml", "[dns]\ntimeout = 5\n")
    add(config, "a.toml", "\n\n\n[retry]\njitter = 5\n")
    assert [each.partition(":")[0] for each in problems(config)] == ["retry.jitter", "dns.timeout"]


def test_a_folder_that_cannot_be_read_is_a_problem(config: Path) -> None:
    add(config, "a.toml", "")
    (config.parent / "conf.d" / "b.toml").mkdir()
    (problem,) = problems(config)
    assert "b.toml: cannot be read" in problem


def test_what_is_active_names_the_file_of_each_key(config: Path) -> None:
    add(config, "a.toml", '[spool]\nbackend = "memory"\n')
    shown = effective(*read(config)).splitlines()
    assert 'backend = "memory"  # line 2 of conf.d/a.toml' in shown
    assert 'path = "/queue"  # line 3 of relay.toml' in shown


def test_the_copy_for_workers_says_the_same(config: Path) -> None:
    assert read_copy(config)[0] == MAIN.encode()
    add(config, "a.toml", '[[dkim]]\ndomain = "a.example"\nselector = "s"\nkey_file = "/k"\n'
        'not_before = 2026-03-01T12:00:00Z\n[retry]\njitter = 0.5\nschedule = ["1m", "2m"]\n'
        '[bounce]\nenabled = false\n')  # fmt: skip
    copy, settings = read_copy(config)
    assert load_text(copy.decode()) == settings == load(config)


def test_commands_find_the_socket_that_conf_d_names(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add(config, "a.toml", '[admin]\nsocket = "/run/relay-of-the-test.sock"\n')
    assert main(["status", "--config", str(config)]) == 1
    assert "/run/relay-of-the-test.sock" in capsys.readouterr().err
