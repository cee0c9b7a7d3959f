"""[[rewrite]]: addresses that are changed when mail comes in, and the rules that can never match.

Rules cannot run in circles: an address is looked up once, and what it becomes is not looked up again.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from zonerelay.config.options import forms
from zonerelay.config.options.options import choice, text, texts
from zonerelay.config.problems import KeyPath, Report
from zonerelay.config.tables.entries import unreachable
from zonerelay.config.tables.inbound.listener import ListenerSettings, check_named_listeners, has_users

_ANY = "*"
_NULL_SENDER = "<>"


class RewriteWhere(enum.StrEnum):
    """Which addresses a [[rewrite]] changes."""

    ALL = "all"
    ENVELOPE = "envelope"
    SENDER = "sender"
    RECIPIENT = "recipient"
    HEADER = "header"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteSettings:
    """[[rewrite]]: other addresses for those that match, when mail comes in; the first match counts."""

    address: tuple[str, ...] = texts((), form=forms.address_pattern)
    """Addresses to change: "user@old.example", "old.example" (every user there), "*.old.example",
    "app-*@example.com".
    """
    to: str = text("", form=forms.replacement)
    """What they become: "user@example.com", or "@example.com" to keep what is before the @."""
    where: RewriteWhere = choice(RewriteWhere.ALL)
    """sender, recipient: of the envelope; envelope: both; header: From, Sender, Reply-To, To and Cc; all:
    everywhere.
    """
    user: tuple[str, ...] = texts(())
    """Only in mail of these logged-in users; "*" is any of them."""
    listener: tuple[str, ...] = texts((), form=forms.listen)
    """Only in mail that came in at these listeners, each written as its address is."""


_PLACES = {
    RewriteWhere.ALL: {"sender", "recipient", "header"},
    RewriteWhere.ENVELOPE: {"sender", "recipient"},
}


def check_rewrites(
    rules: Sequence[RewriteSettings], listeners: Sequence[ListenerSettings], report: Report
) -> None:
    for at, rule in enumerate(rules):
        if report.sound("rewrite", at):
            _check_rule(rule, ("rewrite", at), report)
    check_named_listeners("rewrite", [rule.listener for rule in rules], listeners, report)


def rewrite_advice(rules: Sequence[RewriteSettings], listeners: Sequence[ListenerSettings]) -> Iterator[str]:
    for at, other in unreachable(rules, _covers, lambda rule: _ANY in rule.address):
        yield f"rewrite[{at}]: never matches: rewrite[{other}] takes all its addresses before it is asked"
    users = has_users(listeners)
    for at, rule in enumerate(rules):
        if rule.user and not users:
            only = "only matches mail over HTTP"
            yield f'rewrite[{at}].user: {only}: no listener has auth = "optional" or "required"'


def _check_rule(rule: RewriteSettings, path: KeyPath, report: Report) -> None:
    if not rule.address:
        text = 'is missing: say which addresses are changed, as in ["old.example"], or ["*"] for all'
        report.refuse((*path, "address"), text)
    if not rule.to:
        text = 'is missing: say what they become, "user@example.com" or "@example.com"'
        report.refuse((*path, "to"), text)
    for index, pattern in enumerate(rule.address):
        if pattern == _NULL_SENDER:
            text = '"<>" would never match: reports come from the null sender, which is not rewritten'
            report.refuse((*path, "address", index), text)


def _covers(one: RewriteSettings, other: RewriteSettings) -> bool:
    """Whether every address that the other changes is changed by the one. False where that is hard to say."""
    return (
        _places(one) >= _places(other)
        and _among(other.listener, one.listener)
        and (_among(other.user, one.user) or (bool(other.user) and _ANY in one.user))
        and (_ANY in one.address or _taken(other.address, one.address))
    )


def _places(rule: RewriteSettings) -> set[str]:
    return _PLACES.get(rule.where, {rule.where.value})


def _among(values: tuple[str, ...], allowed: tuple[str, ...]) -> bool:
    """Of two conditions; none allows everything."""
    return not allowed or (bool(values) and set(values) <= set(allowed))


def _taken(patterns: tuple[str, ...], by: tuple[str, ...]) -> bool:
    taken = {pattern.lower().removeprefix("@") for pattern in by}
    return all(
        pattern.lower().removeprefix("@") in taken or pattern.lower().rpartition("@")[2] in taken
        for pattern in patterns
    )
