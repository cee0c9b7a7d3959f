"""[[rewrite]] and drop_headers: what is refused, and what is said about rules that never match."""

from __future__ import annotations

from zonerelay.config.checks import advice
from zonerelay.config.load import load_text


def noted(text: str) -> list[str]:
    return [
        line for line in advice(load_text(text), "relay.example.org") if "rewrite" in line or "srs" in line
    ]


def test_many_rules_are_compared_in_no_time() -> None:
    rules = [f'[[rewrite]]\naddress = ["{n}@old.example"]\nto = "@new.example"\n' for n in range(1500)]
    rules.insert(700, '[[rewrite]]\naddress = ["*"]\nto = "@new.example"\n')
    lines = noted("".join(rules))
    assert len(lines) == 800
    assert lines[0].startswith("rewrite[701]: never matches: rewrite[700] ")
