"""[[destination]] and mta_sts: what check-config refuses, and what it has to say about the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from zonerelay.cli.setup import check_config
from zonerelay.config.checks import advice
from zonerelay.config.load import ConfigError, load_text

FINGERPRINT = "ab" * 32
ZONES = '[[zone]]\nname = "default"\n[[zone]]\nname = "bulk"\nmax_connections = 5\n'

REFUSED = [
    ('zone = ["blk"]', "destination[0].zone[0]", 'no zone is named "blk"; did you mean bulk?'),
    ('zone = ["bulk", "x"]', "destination[0].zone[1]", 'known names are "default" and "bulk"'),
    ('tls_names = ["example.com"]', "destination[0].tls_names", 'goes with tls = "verify"'),
    (
        f'tls = "required"\ntls_certificates = ["{FINGERPRINT}"]',
        "destination[0].tls_certificates",
        'goes with tls = "verify"',
    ),
    (
        f'tls = "verify"\ntls_names = ["example.com"]\ntls_certificates = ["{FINGERPRINT}"]',
        "destination[0].tls_certificates",
        "these certificates are accepted whatever their names",
    ),
    ('zone = ["bulk"]\nmax_connections = 6', "destination[0].max_connections", "the limit of the whole zone"),
    ("max_connections = 101", "destination[0].max_connections", "101 is more than max_connections = 100"),
]


@pytest.mark.parametrize(("entry", "path", "text"), REFUSED, ids=[row[1] for row in REFUSED])
def test_what_cannot_work_is_refused(entry: str, path: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(f"{ZONES}[[destination]]\n{entry}\n")
    [problem] = caught.value.problems
    assert problem.path == path
    assert text in problem.text
    assert problem.line > 0


def test_what_works_is_taken_without_a_word() -> None:
    text = f"""{ZONES}
[[destination]]
domain = ["partner.example", "*.partner.example"]
tls = "verify"
tls_names = ["*.partner.example"]
max_connections = 2

[[destination]]
mx = ["*.mail.protection.outlook.com"]
zone = ["bulk"]
max_connections = 5
max_rate = "100/1m"

[[destination]]
mx = ["[192.0.2.1]"]
tls = "verify"
tls_certificates = ["{FINGERPRINT}"]

[[destination]]
tls = "required"
"""
    assert advice(load_text(text), "relay.example.org") == ()


NOTED = [
    (
        'next_hop = "smtp.example.net"\n[[destination]]\ndomain = ["example.com"]',
        "destination[0].domain: never matches: mail of zone default is sent to a next hop",
    ),
    (
        '[[destination]]\nmx = ["*.example"]\n[[destination]]\nmx = ["*.example"]\nzone = ["default"]',
        "destination[1]: never matches: destination[0] takes all its mail",
    ),
    ("[[destination]]\n[[destination]]\nmax_connections = 1", "destination[1]: never matches"),
    ('next_hop = "smtp.example.net"\nmta_sts = true', "zone[0].mta_sts: has no effect"),
]


@pytest.mark.parametrize(("text", "note"), NOTED, ids=[row[1] for row in NOTED])
def test_what_has_no_effect_is_noted(text: str, note: str) -> None:
    [found] = advice(load_text(f'[[zone]]\nname = "default"\n{text}\n'), "relay.example.org")
    assert found.startswith(note)


def test_entries_that_only_look_alike_are_not_noted() -> None:
    text = (
        '[[destination]]\nmx = ["a.example"]\ndomain = ["b.example"]\n'
        '[[destination]]\nmx = ["a.example"]\n[[destination]]\nzone = ["default"]\n[[destination]]\n'
    )
    assert advice(load_text(f"{ZONES}{text}"), "relay.example.org") == ()


def test_a_pattern_that_no_name_can_match_is_found_when_the_file_is_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "zonerelay.toml"
    config.write_text(
        f'hostname = "relay.example.org"\n[spool]\npath = "{tmp_path}/spool"\n'
        '[[destination]]\ndomain = ["example.com"]\nmx = ["ü..example"]\n'
    )
    assert check_config.run(config) == 2
    assert 'destination[0].mx[0]: "ü..example" cannot be matched' in capsys.readouterr().err
