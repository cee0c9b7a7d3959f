"""[[route]], [[access]] and [auth]: the choice of the zone, access rules, and user authentication."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zonerelay.config.options import forms
from zonerelay.config.options.options import (
    DAY,
    MINUTE,
    choice,
    count,
    duration,
    networks,
    path,
    size,
    text,
    texts,
)
from zonerelay.config.problems import KeyPath, Report, did_you_mean, quoted, unreachable
from zonerelay.config.tables.listener import (
    ListenerAuth,
    ListenerSettings,
    Network,
    check_named_listeners,
    has_users,
    in_full,
)
from zonerelay.config.tables.zone import DEFAULT_ZONE, ZoneSettings
from zonerelay.config.units import format_size

# [auth] and [[access]]: the users who may log in, and the clients that may use the relay for a recipient.


class AccessAction(enum.StrEnum):
    """The action of an [[access]] rule on a recipient that it matches."""

    REFUSE = "refuse"
    DEFER = "defer"
    ACCEPT = "accept"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthSettings:
    """User authentication for all listeners (docs/send/users.md)."""

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
    """A rule that allows or rejects recipients. The first rule whose every condition matches decides."""

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


_ANYTHING = frozenset({"*"})
_WITH_ANYTHING = ("recipient_domain", "recipient", "sender_domain", "sender", "user")
Conditions = Mapping[str, frozenset[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSettings:
    """A rule that chooses the zone of a message (docs/deliver/routing.md). The first route whose every
    condition matches counts; other mail goes to the zone named default.
    """

    zone: str = text("default", form=forms.name)
    """The zone that mail goes to when all conditions given match."""
    set_priority: str = text("", form=forms.priority)
    """The priority of mail that goes by this route: high, normal or bulk. Empty: what the user or the
    listener gave it.
    """
    recipient_domain: tuple[str, ...] = texts((), form=forms.domain)
    """The recipient's domain is one of these: "example.com"; "*.example.com" is every name below it; "*" is
    any.
    """
    recipient: tuple[str, ...] = texts((), form=forms.address_pattern)
    """The recipient is one of these: "user@example.com", "example.com", "*.example.com",
    "bounce-*@example.com".
    """
    sender_domain: tuple[str, ...] = texts((), form=forms.domain)
    """The envelope sender's domain is one of these, written as in recipient_domain."""
    sender: tuple[str, ...] = texts((), form=forms.address_pattern)
    """The envelope sender is one of these, written as in recipient; "<>" is the null sender, that of reports
    such as the relay's own.
    """
    user: tuple[str, ...] = texts(())
    """The client authenticated as one of these; "*" is any user."""
    listener: tuple[str, ...] = texts((), form=forms.listen)
    """The mail came in at one of these listeners, each written as its address is."""
    client: tuple[Network, ...] = networks(())
    """The client has one of these addresses, or one in these networks."""
    certificate: tuple[str, ...] = texts((), form=forms.fingerprint)
    """The client showed one of these certificates: SHA-256 fingerprints, as in allow_certificates of
    [[listener]], which is what makes a listener ask for them.
    """
    priority: tuple[str, ...] = texts((), form=forms.priority)
    """The message has one of these priorities: "high", "normal", "bulk"."""
    min_size: int = size(0, least=1, optional=True)
    """The message as it came has at least this size. 0: any."""
    max_size: int = size(0, least=1, optional=True)
    """The message has at most this size. 0: any."""
    header: tuple[str, ...] = texts((), form=forms.header)
    """The message has one of these fields: "X-Stream" (any value) or "X-Stream: bulk" (its value contains the
    text).
    """

    @property
    def conditions(self) -> dict[str, tuple[object, ...]]:
        """The conditions that the route has, by name."""
        named = ((name, getattr(self, name)) for name in _CONDITIONS)
        return {name: value if isinstance(value, tuple) else (value,) for name, value in named if value}


_CONDITIONS = tuple(
    field.name for field in dataclasses.fields(RouteSettings) if field.name not in ("zone", "set_priority")
)


def check_route_zones(routes: Sequence[RouteSettings], zones: Sequence[ZoneSettings], report: Report) -> None:
    """Needs zones whose names are sound."""
    names = dict.fromkeys(zone.name for zone in zones)
    for at, route in enumerate(routes):
        if route.zone not in names and report.sound("route", at, "zone"):
            near = did_you_mean(route.zone, names)
            report.refuse(("route", at, "zone"), f"no zone is named {quoted(route.zone)}{near}")


def check_routes(
    routes: Sequence[RouteSettings], listeners: Sequence[ListenerSettings], report: Report
) -> None:
    for at, route in enumerate(routes):
        if not route.conditions and report.sound("route", at):
            report.refuse(
                ("route", at),
                "has no condition, so no later route would ever be asked: give it one (recipient_domain, "
                f'sender_domain, …); the zone "{DEFAULT_ZONE}" takes what no route matches',
            )
        if route.max_size and route.min_size > route.max_size and report.sound("route", at):
            report.refuse(
                ("route", at, "min_size"),
                f"{format_size(route.min_size)} is more than max_size = {format_size(route.max_size)}, so "
                "this route would never match",
            )
    check_named_listeners("route", [route.listener for route in routes], listeners, report)


def route_advice(routes: Sequence[RouteSettings], listeners: Sequence[ListenerSettings]) -> Iterator[str]:
    conditions = [{name: frozenset(values) for name, values in route.conditions.items()} for route in routes]
    for at, other in unreachable(conditions, _covers, lambda given: _covers(given, {})):
        yield f"route[{at}]: never matches: route[{other}] takes all its mail before it is asked"
    users, certificates = has_users(listeners), any(each.allow_certificates for each in listeners)
    for at, route in enumerate(routes):
        if route.user and not users:
            only = "matches only mail submitted over HTTP"
            yield f'route[{at}].user: {only}: no listener has auth = "optional" or "required"'
        if route.certificate and not certificates:
            yield f"route[{at}].certificate: never matches: no listener asks for one (allow_certificates)"


def _covers(one: Conditions, other: Conditions) -> bool:
    """Return whether all mail that matches the other matches the one too. False where that is hard to say."""
    return all(_covers_condition(name, values, other.get(name)) for name, values in one.items())


def _covers_condition(name: str, values: frozenset[object], other: frozenset[object] | None) -> bool:
    if name == "recipient" and "*" in values:
        return True
    if other is None:
        return name == "recipient_domain" and values >= _ANYTHING
    if name in ("min_size", "max_size"):
        (mine,), (its,) = values, other
        return bool(mine <= its if name == "min_size" else mine >= its)  # type: ignore[operator]  # sizes
    if name in _WITH_ANYTHING and values >= _ANYTHING:
        return "<>" not in other
    return values >= other
