"""[[dkim]] in the configuration: what is refused, and what check-config finds out by trying."""

from __future__ import annotations

import stat
import time
from pathlib import Path

import pytest

from tests.support.dkim import rsa_pem
from zonerelay.cli.setup.check_config import run
from zonerelay.config.checks import advice
from zonerelay.config.load import ConfigError, load_text

GOOD = '[[dkim]]\ndomain = "example.com"\nselector = "s1"\nkey_file = "s1.key"\n'

REFUSED = [
    ("no domain", GOOD.replace('domain = "example.com"\n', ""), "dkim[0].domain: is required"),
    ("no selector", GOOD.replace('selector = "s1"\n', ""), "dkim[0].selector: is required"),
    ("no key", GOOD.replace('key_file = "s1.key"\n', ""), "dkim[0].key_file: is required"),
    ("everybody", GOOD.replace('"example.com"', '"*"'), 'dkim[0].domain: "*" is not a domain;'),
    ("a literal", GOOD.replace("example.com", "[192.0.2.1]"), "dkim[0].domain: "),
    (
        "a wildcard that signs",
        GOOD + 'signing_domain = "*.example.com"',
        'dkim[0].signing_domain: "*.example.com" is not a signing domain;',
    ),
    (
        "an end before the beginning",
        GOOD + "not_before = 2026-03-02\nnot_after = 2026-03-01",
        "dkim[0].not_after: is not after not_before = 2026-03-02",
    ),
    (
        "no time at all",
        GOOD + "not_before = 2026-03-02\nnot_after = 2026-03-02",
        "dkim[0].not_after: is not after not_before =",
    ),
    ("the same twice", GOOD + GOOD, 'dkim[1].selector: "s1" of example.com is already used by dkim[0]'),
    (
        "two keys for one record",
        GOOD + GOOD.replace("s1.key", "s2.key").replace("example.com", "*.example.com")
        + 'signing_domain = "example.com"',
        'dkim[1].selector: "s1" of example.com is already used by dkim[0]',
    ),
    (
        "a zone that requires what nobody has",
        '[[zone]]\ndkim = "required"',
        "zone[0].dkim: requires a [[dkim]] key: without one,",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("why", "text", "problem"), REFUSED, ids=[case[0] for case in REFUSED])
def test_it_is_refused(why: str, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(text)
    (found,) = caught.value.problems
    assert str(found).startswith(problem)


ACCEPTED = [
    ("one key", GOOD),
    ("two selectors", GOOD + GOOD.replace("s1", "s2")),
    ("one record for all", GOOD + GOOD.replace('"ex', '"*.ex') + 'signing_domain = "example.com"'),
    ("two signing domains", GOOD + GOOD + 'signing_domain = "host.example"'),
    ("a U-label", GOOD.replace("example.com", "bücher.example")),
    ("a zone that requires it", GOOD + '[[zone]]\ndkim = "required"'),
]  # fmt: skip


@pytest.mark.parametrize(("why", "text"), ACCEPTED, ids=[case[0] for case in ACCEPTED])
def test_it_is_accepted(why: str, text: str) -> None:
    load_text(text)


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
