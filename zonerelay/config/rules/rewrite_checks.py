"""[[rewrite]] and drop_headers: what must hold, and which rules can never match.

That rules run in circles is not checked, for they cannot: an address is looked up once, and what it becomes
is not looked up again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from zonerelay.config.options.problems import Report
from zonerelay.config.options.toml_lines import KeyPath
from zonerelay.config.options.wording import did_you_mean, in_words, quoted
from zonerelay.config.rules.listener_advice import has_users
from zonerelay.config.settings import ListenerAuth, RewriteSettings, RewriteWhere, Settings

MAX_COMPARED = 300
"""Rules of which each is compared with all before it; of more, only with those that take every address."""

_ANY = "*"
_NULL_SENDER = "<>"
_FIELD_NAME = re.compile(r"[!-9;-~]{1,76}", re.ASCII)
_NEEDED = {
    "received": "it is what ends a mail loop (RFC 5321 6.3)",
    "from": "no message may be without it (RFC 5322 3.6)",
}
_PLACES = {
    RewriteWhere.ALL: {"sender", "recipient", "header"},
    RewriteWhere.ENVELOPE: {"sender", "recipient"},
}


def check_rewrites(settings: Settings, report: Report) -> None:
    for at, rule in enumerate(settings.rewrite):
        if report.sound("rewrite", at):
            _check_rule(rule, ("rewrite", at), report)
    _check_listeners(settings, report)
    for at, listener in enumerate(settings.listener):
        if report.sound("listener", at, "drop_headers"):
            for index, name in enumerate(listener.drop_headers):
                _check_dropped(name, ("listener", at, "drop_headers", index), report)


def rewrite_advice(settings: Settings) -> Iterator[str]:
    yield from _unreachable(settings.rewrite)
    users = has_users(settings)
    for at, rule in enumerate(settings.rewrite):
        if rule.user and not users:
            yield f'rewrite[{at}].user: never matches: no listener has auth = "optional" or "required"'
    if settings.srs.domain and all(each.auth is ListenerAuth.REQUIRED for each in settings.listener):
        yield (
            "srs.domain: reports to rewritten senders cannot come in: they are from strangers, and every "
            'listener has auth = "required"'
        )


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


def _check_listeners(settings: Settings, report: Report) -> None:
    known = [listener.address for listener in settings.listener]
    if not all(report.sound("listener", at, "address") for at in range(len(known))):
        return
    for at, rule in enumerate(settings.rewrite):
        if not report.sound("rewrite", at, "listener"):
            continue
        for index, address in enumerate(rule.listener):
            if address not in known:
                near = did_you_mean(address, known) or f"; there is {in_words(known)}"
                text = f"no [[listener]] has the address {quoted(address)}{near}"
                report.refuse(("rewrite", at, "listener", index), text)


def _check_dropped(name: str, path: KeyPath, report: Report) -> None:
    if not _FIELD_NAME.fullmatch(name):
        report.refuse(path, f'{quoted(name)} is not the name of a header field: write it as in "Bcc"')
    elif name.lower() in _NEEDED:
        report.refuse(path, f"{quoted(name)} cannot be dropped: {_NEEDED[name.lower()]}")


def _unreachable(rules: tuple[RewriteSettings, ...]) -> Iterator[str]:
    earlier: list[int] = []
    for at, rule in enumerate(rules):
        other = next((place for place in earlier if _covers(rules[place], rule)), None)
        if other is not None:
            yield f"rewrite[{at}]: never matches: rewrite[{other}] takes all its addresses before it is asked"
        elif len(rules) <= MAX_COMPARED or _ANY in rule.address:
            earlier.append(at)


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
