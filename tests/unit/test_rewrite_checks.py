"""[[rewrite]] and drop_headers: what is refused, and what is said about rules that never match."""

from __future__ import annotations

import pytest

from zonerelay.cli.setup.check_config import try_out
from zonerelay.config.checks import advice
from zonerelay.config.load import ConfigError, load_text
from zonerelay.config.problems import Report

RULE = '[[rewrite]]\naddress = ["old.example"]\nto = "@new.example"\n'
USERS = '[[listener]]\nauth = "optional"\ntls = "implicit"\ncertificate = "/a"\n'


TARGETS = [
    ('"a@c..example"', "is not an address"),
    ('"@c_.-example"', "is not an address"),
    ('"jü@c.example"', "not an ASCII address"),
    (f'"@{"a." * 95}example"', "at most 180"),
]


def noted(text: str) -> list[str]:
    return [
        line for line in advice(load_text(text), "relay.example.org") if "rewrite" in line or "srs" in line
    ]


@pytest.mark.parametrize(("to", "words"), TARGETS)
def test_an_address_that_is_none_is_found_when_it_is_tried(to: str, words: str) -> None:
    settings = load_text(f'[[rewrite]]\naddress = ["*"]\nto = {to}')
    report = Report({})
    try_out(settings, "relay.example.org", report)
    with pytest.raises(ConfigError, match=r"rewrite\[0\]\.to: .*" + words):
        report.raise_problems()


def test_a_pattern_that_can_match_nothing_is_found_when_it_is_tried() -> None:
    report = Report({})
    try_out(load_text('[[rewrite]]\naddress = ["a@b", "c@d..e"]\nto = "@f"'), "relay.example.org", report)
    with pytest.raises(ConfigError, match=r"rewrite\[0\]\.address\[1\]: "):
        report.raise_problems()


def test_a_rule_for_users_where_nobody_can_log_in_is_said() -> None:
    (line,) = noted(f'{RULE}user = ["a"]')
    assert line.startswith("rewrite[0].user: matches only mail submitted over HTTP: no listener has auth")


def test_reports_that_cannot_come_in_are_said() -> None:
    srs = '[srs]\ndomain = "srs.example"\nsecret = "env:S"\n'
    (line,) = noted(USERS.replace("optional", "required") + srs)
    assert line.startswith("srs.domain: reports to rewritten senders cannot come in")
    assert noted(USERS + srs) == noted(srs) == []


def test_a_listener_for_reports_alone_lets_nobody_relay() -> None:
    text = '[[listener]]\naddress = "[::]:25"\nallow_networks = []\n'
    with pytest.raises(ConfigError, match="no client could relay"):
        load_text(text)
    load_text(f'{text}[srs]\ndomain = "srs.example"\nsecret = "env:S"\n')


def test_many_rules_are_compared_in_no_time() -> None:
    rules = [f'[[rewrite]]\naddress = ["{n}@old.example"]\nto = "@new.example"\n' for n in range(1500)]
    rules.insert(700, '[[rewrite]]\naddress = ["*"]\nto = "@new.example"\n')
    lines = noted("".join(rules))
    assert len(lines) == 800
    assert lines[0].startswith("rewrite[701]: never matches: rewrite[700] ")
