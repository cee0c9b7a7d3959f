"""[auth] and [[access]]: the users who may log in, and the clients that may use the relay for a recipient."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zonerelay.config.options import forms
from zonerelay.config.options.options import DAY, MINUTE, choice, count, duration, networks, path, text, texts
from zonerelay.config.problems import KeyPath, Report
from zonerelay.config.tables.listener import (
    ListenerAuth,
    ListenerSettings,
    Network,
    has_users,
    in_full,
)


class AccessAction(enum.StrEnum):
    """The action of an [[access]] rule on a recipient that it matches."""

    REFUSE = "refuse"
    DEFER = "defer"
    ACCEPT = "accept"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthSettings:
    """[auth]: one file for all listeners."""

    credentials: Path = path(Path("/etc/zonerelay/credentials"))
    """Users and the argon2 hashes of their passwords, kept by zonerelay user. Read when a listener has auth;
    a changed file is taken up at the next log-in.
    """
    max_client_failures: int = count(10)
    """Failed log-ins from one client (an IPv4 address, an IPv6 /64) within forget_failures; then it is
    answered 454 4.7.0 without a look at its password. Users who have logged in from its network lately have
    counters of their own.
    """
    max_network_failures: int = count(50)
    """The same for one network (an IPv4 /24, an IPv6 /48), whatever the client."""
    max_account_failures: int = count(100)
    """The same for one account, wherever from. It never keeps users out of networks from which they have
    logged in lately.
    """
    forget_failures: float = duration(15 * MINUTE, most=DAY)
    """How long a failed log-in counts against its client."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AccessSettings:
    """[[access]]. All conditions that are given must match; the first rule that matches decides."""

    client: tuple[Network, ...] = networks(())
    """Addresses and networks of clients."""
    sender: tuple[str, ...] = texts((), form=forms.address_pattern)
    """Envelope senders: "user@example.com", "example.com", "*.example.com" (every name below it),
    "bounce-*@example.com", "<>" (the null sender).
    """
    recipient: tuple[str, ...] = texts((), form=forms.address_pattern)
    """Recipients, in the same forms."""
    user: tuple[str, ...] = texts(())
    """Users who have logged in; "*" is any of them."""
    action: AccessAction = choice(AccessAction.REFUSE)
    """What happens to this recipient. refuse: 550 5.7.1; defer: 450 4.7.1, the client tries again; accept: no
    later rule is asked. accept lets no client relay that could not without it.
    """
    reply: str = text("", form=forms.reply)
    """Another reply: "554 5.7.1 Ask postmaster@example.org" (5yz) for refuse, 4yz for defer."""


def check_access(rules: tuple[AccessSettings, ...], report: Report) -> None:
    for at, rule in enumerate(rules):
        if not any((rule.client, rule.sender, rule.recipient, rule.user)) and report.sound("access", at):
            report.refuse(
                ("access", at),
                "has no condition, so it would match all mail: give it one (client, sender, recipient, user)",
            )
        if rule.reply and report.sound("access", at):
            _check_reply(rule, ("access", at, "reply"), report)


def _check_reply(rule: AccessSettings, path: KeyPath, report: Report) -> None:
    suits = {AccessAction.REFUSE: "5", AccessAction.DEFER: "4"}.get(rule.action)
    if suits is None:
        report.refuse(path, 'is not used with action = "accept": leave one of the two out')
    elif not rule.reply.startswith(suits):
        other = "defer" if suits == "5" else "refuse"
        report.refuse(
            path,
            f'action = "{rule.action}" is answered with a code from {suits}00 to {suits}99: write one, or '
            f'action = "{other}"',
        )
    elif rule.reply.startswith("421"):
        report.refuse(path, "421 says that the connection is closed, which no rule does: write 450 or 451")


def auth_advice(auth: AuthSettings, listeners: Sequence[ListenerSettings]) -> Iterator[str]:
    needed = any(listener.auth is not ListenerAuth.OFF for listener in listeners)
    if needed and not auth.credentials.is_absolute():
        yield f"auth.credentials: {in_full(auth.credentials)}"
    if not needed and auth != AuthSettings():
        yield 'auth: only for mail over HTTP: no listener has auth = "optional" or "required"'


def access_advice(rules: Sequence[AccessSettings], listeners: Sequence[ListenerSettings]) -> Iterator[str]:
    if rules and rules[-1].action is AccessAction.ACCEPT:
        yield (
            f"access[{len(rules) - 1}].action: accept as the last rule changes nothing: what no rule matches "
            "is let through; a rule that refuses the rest has to follow"
        )
    if not has_users(listeners):
        yield from (
            f'access[{at}].user: only matches mail over HTTP: no listener has auth = "optional" or "required"'
            for at, rule in enumerate(rules)
            if rule.user
        )
