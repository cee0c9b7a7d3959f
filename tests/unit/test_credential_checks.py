"""[[credential]], next hops and zones: what is refused, in which words, and what is only noted."""

from __future__ import annotations

import os
from pathlib import Path

from zonerelay.config.checks import try_secrets
from zonerelay.config.load import load_text
from zonerelay.config.problems import ConfigError, Report

ZONE = '[[zone]]\nname = "default"\nnext_hop = "[smtp.example.net]:587"\ntls = "verify"\n'
PLAIN = '[[credential]]\nname = "main"\nuser = "relay"\npassword = "/etc/zonerelay/main.password"\n'
USED = 'credentials = ["main"]\n'


def problems(text: str) -> list[str]:
    try:
        load_text(text)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def test_a_password_in_the_file_is_refused_and_not_repeated() -> None:
    found = problems(ZONE + USED + PLAIN.replace("/etc/zonerelay/main.password", "hunter2hunter2"))
    assert found
    assert "hunter2" not in "\n".join(found)


def tried(credential: str, environment: dict[str, str]) -> tuple[list[str], list[str]]:
    report = Report({})
    notes = list(try_secrets(load_text(ZONE + USED + credential), environment, report))
    try:
        report.raise_problems()
    except ConfigError as error:
        return notes, str(error).splitlines()
    return notes, []


def test_secrets_are_tried(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    with_file = PLAIN.replace("/etc/zonerelay/main.password", str(file))
    assert tried(with_file, {}) == (
        [],
        [f"credential[0].password: {file} cannot be read: No such file or directory (line 1)"],
    )
    file.write_text("hunter2\n")
    file.chmod(0o600)
    assert tried(with_file, {}) == ([], [])
    file.chmod(0o644)
    notes, found = tried(with_file, {})
    assert found == []
    assert notes == [f"credential[0].password: every user of this machine can use {file}: chmod o-rwx it"]
    assert os.access(file, os.R_OK)


def test_what_only_the_service_is_given_is_noted_and_not_refused() -> None:
    credential = PLAIN.replace("/etc/zonerelay/main.password", "env:RELAY_PASSWORD")
    notes, found = tried(credential, {})
    assert found == []
    assert notes == [
        "credential[0].password: cannot be tried here: the environment variable RELAY_PASSWORD is not set"
    ]
    assert tried(credential, {"RELAY_PASSWORD": "hunter2"}) == ([], [])
