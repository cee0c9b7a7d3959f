"""[[credential]], next hops and zones: what is refused, in which words, and what is only noted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zonerelay.config.checks import advice, try_secrets
from zonerelay.config.load import load_text
from zonerelay.config.problems import ConfigError, Report

ZONE = '[[zone]]\nname = "default"\nnext_hop = "[smtp.example.net]:587"\ntls = "verify"\n'
PLAIN = '[[credential]]\nname = "main"\nuser = "relay"\npassword = "/etc/zonerelay/main.password"\n'
OAUTH = (
    '[[credential]]\nname = "main"\nuser = "relay@example.org"\ntoken_url = "https://login.example/token"\n'
    'client_id = "app"\nclient_secret = "env:SECRET"\n'
)
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


MICROSOFT = "[smtp.office365.com]:587"
ENDING = "zone[0].credentials: main is a password for"


@pytest.mark.parametrize(
    ("next_hop", "said"),
    [
        (MICROSOFT, "smtp.office365.com: Microsoft 365 disables password logins by"),
        ("SMTP.office365.com", "smtp.office365.com: Microsoft 365 disables password logins by"),
        (
            f"[other.example]:587, {MICROSOFT}",
            "smtp.office365.com: Microsoft 365 disables password logins by",
        ),
        (
            "[smtp-mail.outlook.com]:587",
            "smtp-mail.outlook.com: Outlook.com has not accepted passwords since",
        ),
        ("[outlook.com.example.net]:587", ""),
        ("[notoffice365.com]:587", ""),
        ("example-com.mail.protection.outlook.com", ""),  # offers no AUTH
        ("192.0.2.1:587", ""),
    ],
)
def test_a_password_that_its_provider_gives_up_is_noted(next_hop: str, said: str) -> None:
    zone = ZONE.replace("[smtp.example.net]:587", next_hop)
    ending = [each for each in advice(load_text(zone + USED + PLAIN), "relay.example.org") if ENDING in each]
    assert len(ending) == bool(said), ending
    assert all(each.startswith(f"{ENDING} {said}") and "XOAUTH2" in each for each in ending)
    notes = advice(load_text(zone + USED + OAUTH + 'grant = "client_credentials"\n'), "relay.example.org")
    assert not [each for each in notes if "password for" in each]


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
