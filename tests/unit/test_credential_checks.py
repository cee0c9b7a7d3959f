"""[[credential]], next hops and zones: what is refused, in which words, and what is only noted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zonerelay.config.checks import advice
from zonerelay.config.load import load_text
from zonerelay.config.problems import ConfigError, Report
from zonerelay.config.tables.credential import try_credentials

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


@pytest.mark.parametrize(
    "text",
    [
        ZONE + USED + PLAIN,
        ZONE + USED + OAUTH + 'refresh_token = "credential:refresh"\n',
        ZONE + USED + OAUTH + 'grant = "client_credentials"\n',
        ZONE.replace("verify", "required") + USED + PLAIN,
    ],
)
def test_what_is_right_is_accepted(text: str) -> None:
    assert problems(text) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            ZONE + 'credentials = ["mian"]\n' + PLAIN,
            'zone[0].credentials[0]: no [[credential]] has this name "mian"; did you mean main?',
        ),
        (ZONE + USED, 'zone[0].credentials[0]: no [[credential]] has this name "main"'),
        (
            ZONE + 'credentials = ["main", "main"]\n' + PLAIN,
            'zone[0].credentials[1]: "main" is in the list twice',
        ),
        (
            ZONE.replace("verify", "opportunistic") + USED + PLAIN,
            "zone[0].tls: is opportunistic, but credentials are never sent in clear text",
        ),
        (
            ZONE.replace("verify", "none") + USED + PLAIN,
            "zone[0].tls: is none, but credentials are never sent in clear text",
        ),
        (
            '[[zone]]\nname = "default"\ntls = "verify"\n' + USED + PLAIN,
            "zone[0].credentials: would be sent to every MX",
        ),
        (ZONE + PLAIN + PLAIN, 'credential[1].name: "main" is the name of credential[0] already'),
        (ZONE + PLAIN.replace('name = "main"\n', ""), "credential[0].name: is required"),
        (ZONE + PLAIN.replace('user = "relay"\n', ""), "credential[0].user: is missing"),
        (
            ZONE + PLAIN.replace('password = "/etc/zonerelay/main.password"\n', ""),
            "credential[0].password: is required",
        ),
        (ZONE + PLAIN + 'scope = "mail"\n', "credential[0].scope: goes with token_url alone"),
        (ZONE + PLAIN + 'mechanism = "xoauth2"\n', "credential[0].token_url: is missing"),
        (ZONE + OAUTH, "credential[0].refresh_token: is missing"),
        (
            ZONE + OAUTH + 'refresh_token = "env:T"\nmechanism = "plain"\n',
            "credential[0].mechanism: plain does not support access tokens",
        ),
        (
            ZONE + OAUTH + 'refresh_token = "env:T"\npassword = "env:P"\n',
            "credential[0].password: a password cannot be used with",
        ),
        (
            ZONE + OAUTH.replace('client_id = "app"\n', "") + 'refresh_token = "env:T"\n',
            "credential[0].client_id: is missing",
        ),
        (
            ZONE + OAUTH.replace('client_secret = "env:SECRET"\n', "") + 'grant = "client_credentials"\n',
            "credential[0].client_secret: is missing",
        ),
        (
            ZONE + OAUTH + 'grant = "client_credentials"\nrefresh_token = "env:T"\n',
            "credential[0].refresh_token: is not used",
        ),
        (
            ZONE.replace("[smtp.example.net]:587", "[a.example]:25, [A.example]:25"),
            "zone[0].next_hop: [A.example]:25 is in the list twice",
        ),
        (
            ZONE
            + USED
            + PLAIN
            + '[[destination]]\nmx = ["smtp.example.net"]\nzone = ["default"]\ntls = "opportunistic"\n',
            "destination[0].tls: opportunistic: zone default logs in",
        ),
    ],
)
def test_what_is_wrong_is_refused_in_words(text: str, problem: str) -> None:
    found = problems(text)
    assert [line for line in found if line.startswith(problem)], found
    assert all("(line " in line for line in found)


def test_a_password_in_the_file_is_refused_and_not_repeated() -> None:
    found = problems(ZONE + USED + PLAIN.replace("/etc/zonerelay/main.password", "hunter2hunter2"))
    assert found
    assert "hunter2" not in "\n".join(found)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (ZONE + PLAIN, "credential[0]: no zone logs in as main"),
        (
            ZONE.replace("verify", "required") + USED + PLAIN,
            "zone[0].tls: required: an attacker who can redirect its connections",
        ),
        (
            ZONE + USED + PLAIN + 'sender = ["example.org"]\n',
            "zone[0].credentials: each is for some senders only",
        ),
        (ZONE + "next_hop_share = true\n", "zone[0].next_hop_share: has no effect"),
    ],
)
def test_what_may_surprise_is_noted(text: str, note: str) -> None:
    notes = advice(load_text(text), "relay.example.org")
    assert [each for each in notes if each.startswith(note)], notes


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
    notes = list(try_credentials(load_text(ZONE + USED + credential).credential, environment, report))
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
