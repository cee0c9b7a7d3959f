"""[[rewrite]] and drop_headers: what is refused, and what is said about rules that never match."""

from __future__ import annotations

import pytest

from zonerelay.cli.setup.check_config import try_out
from zonerelay.config.checks import advice
from zonerelay.config.load import ConfigError, load_text
from zonerelay.config.problems import Report

RULE = '[[rewrite]]\naddress = ["old.example"]\nto = "@new.example"\n'
USERS = '[[listener]]\nauth = "optional"\ntls = "implicit"\ncertificate = "/a"\n'

REFUSED = [
    ('[[rewrite]]\nto = "@x.example"', "rewrite[0].address", "is required"),
    ('[[rewrite]]\naddress = ["*"]', "rewrite[0].to", "is required"),
    ('[[rewrite]]\naddress = ["a@b", "<>"]\nto = "@c"', "rewrite[0].address[1]", "not rewritten"),
    ('[[rewrite]]\naddress = ["a b@c"]\nto = "@c"', "rewrite[0].address[0]", "not an address pattern"),
    ('[[rewrite]]\naddress = ["*"]\nto = "c"', "rewrite[0].to", "is no address"),
    (f'{RULE}where = "from"', "rewrite[0].where", "must be"),
    (f'{RULE}listener = ["127.0.0.1:2526"]', "rewrite[0].listener[0]", "did you mean 127.0.0.1:2525?"),
    ('[[listener]]\ndrop_headers = ["Bcc:"]', "listener[0].drop_headers[0]", "not the name"),
    ('[[listener]]\ndrop_headers = ["Bcc", "RECEIVED"]', "listener[0].drop_headers[1]", "mail loop"),
    ('[[listener]]\ndrop_headers = ["from"]', "listener[0].drop_headers[0]", "RFC 5322"),
    *(
        (f'[[zone]]\nheader_add = ["{line}"]', "zone[0].header_add[0]", why)
        for line, why in (
            ("X: gr\\u00fcn", "in ASCII"),
            ("X: a\\u0000b", "control"),
            ("X: a\\nb", "control"),
            ("X:", "not a header field"),
            ("X Y: z", "not a header field"),
        )
    ),
    *(
        (f'[[zone]]\n{option} = ["{value}"]', f"zone[0].{option}[0]", "cannot be changed by a rule")
        for name in ("Received", "Return-Path", "DKIM-Signature")
        for option, value in (
            ("header_add", f"{name}: x"),
            ("header_replace", f"{name}: x"),
            ("header_remove", name),
        )
    ),
]

TARGETS = [
    ('"a@c..example"', "is no address"),
    ('"@c_.-example"', "is no address"),
    ('"jü@c.example"', "in ASCII"),
    (f'"@{"a." * 95}example"', "at most 180"),
]

NEVER = "rewrite[1]: never matches: rewrite[0] takes all its addresses before it is asked"
OVERTAKEN = [
    ('address = ["*"]', 'address = ["a@b"]', True, "everything"),
    ('address = ["b"]', 'address = ["a@B", "@b", "x-*@b"]', True, "a domain before its addresses"),
    ('address = ["b"]', 'address = ["a@b", "a@c"]', False, "some of them are left"),
    ('address = ["b"]', 'address = ["*.b"]', False, "the names below are not itself"),
    ('address = ["a@b"]', 'address = ["b"]', False, "one before all"),
    (
        'address = ["*"]\nwhere = "envelope"',
        'address = ["*"]\nwhere = "sender"',
        True,
        "a place among places",
    ),
    ('address = ["*"]\nwhere = "header"', 'address = ["*"]', False, "other places are left"),
    ('address = ["*"]\nuser = ["*"]', 'address = ["*"]\nuser = ["a"]', True, "any user before one"),
    ('address = ["*"]\nuser = ["a"]', 'address = ["*"]\nuser = ["a", "b"]', False, "other users are left"),
    ('address = ["*"]\nuser = ["*"]', 'address = ["*"]', False, "who has not logged in is left"),
    ('address = ["*"]', 'address = ["*"]\nuser = ["a"]', True, "everybody before one"),
    ('address = ["*"]\nlistener = ["127.0.0.1:2525"]', 'address = ["*"]', False, "other listeners are left"),
]


def noted(text: str) -> list[str]:
    return [
        line for line in advice(load_text(text), "relay.example.org") if "rewrite" in line or "srs" in line
    ]


@pytest.mark.parametrize(("text", "where", "words"), REFUSED)
def test_what_cannot_be_meant_is_refused(text: str, where: str, words: str) -> None:
    with pytest.raises(ConfigError) as found:
        load_text(text)
    (line,) = str(found.value).splitlines()
    assert line.startswith(f"{where}: "), line
    assert words in line
    assert "(line " in line


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


@pytest.mark.parametrize(("one", "other", "never", "why"), OVERTAKEN, ids=[why for *_, why in OVERTAKEN])
def test_a_rule_that_is_never_reached_is_said(one: str, other: str, never: bool, why: str) -> None:
    rules = "".join(f'[[rewrite]]\nto = "@new.example"\n{rule}\n' for rule in (one, other))
    assert noted(f'{USERS}address = "127.0.0.1:2525"\n{rules}') == ([NEVER] if never else [])


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
