"""Which zone a recipient's delivery belongs to: the first `[[route]]` whose every condition matches.

Within one condition the values are alternatives. Domains are compared in lower-case ASCII (A-labels);
`*.example.com` matches every name below example.com, not example.com itself; `*` matches any domain. Users
are compared exactly. A header condition is `Name` (present) or `Name: value` (one of the fields with
that name contains the value, case-insensitively). No route matches: the zone named `default`.

Everything is prepared when the settings are loaded; choosing never raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from zonerelay.config.models import RouteSettings, ZoneSettings
from zonerelay.model.address import Mailbox, domain_of
from zonerelay.model.envelope import Envelope
from zonerelay.routing.idna import ascii_domain

DEFAULT_ZONE = "default"

Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a zone was chosen. `rule` counts the `[[route]]` tables from 1; 0 means that none matched."""

    zone: str
    rule: int
    reason: str


class Zones:
    """`configure` takes up other settings at a reload; whoever holds this object sees them."""

    def __init__(self, zones: Sequence[ZoneSettings], routes: Sequence[RouteSettings] = ()) -> None:
        self.configure(zones, routes)

    def configure(self, zones: Sequence[ZoneSettings], routes: Sequence[RouteSettings] = ()) -> None:
        self._zones = {zone.name: zone for zone in zones}
        self._default = self._zones.get(DEFAULT_ZONE) or ZoneSettings(name=DEFAULT_ZONE)
        self._dropped: dict[str, ZoneSettings] = {}
        self._rules = tuple(_Rule(route) for route in routes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._zones)

    def get(self, name: str) -> ZoneSettings:
        """A zone's settings. Mail of a zone that the configuration has dropped goes by the default's."""
        zone = self._zones.get(name) or self._dropped.get(name)
        if zone is None:
            zone = self._dropped[name] = replace(self._default, name=name)
        return zone

    def choose(self, envelope: Envelope, recipient: str, headers: Headers = ()) -> str:
        """The zone for one recipient. `headers` are the message's, for routes that ask for them."""
        if not self._rules:
            return DEFAULT_ZONE
        mail = _Mail.of(envelope.sender, recipient, envelope.origin.user, headers)
        return next((rule.zone for rule in self._rules if rule.matches(mail)), DEFAULT_ZONE)

    def explain(
        self, recipient: str, *, sender: str = "", user: str = "", headers: Headers = ()
    ) -> Explanation:
        """What `choose` would do, and which route and condition decided."""
        mail = _Mail.of(sender, recipient, user, headers)
        for number, rule in enumerate(self._rules, start=1):
            if rule.matches(mail):
                return Explanation(rule.zone, number, rule.reason(mail))
        reason = "no route matches" if self._rules else "there are no routes"
        return Explanation(DEFAULT_ZONE, 0, reason)


@dataclass(frozen=True, slots=True)
class _Mail:
    """What conditions look at, brought into the form in which they compare."""

    recipient_domain: str
    sender_domain: str
    user: str
    headers: Headers

    @classmethod
    def of(cls, sender: str, recipient: str, user: str, headers: Headers) -> _Mail:
        return cls(_domain(recipient), _domain(sender), user, headers)


class _Rule:
    """One `[[route]]`: its conditions in the order of their cost. A route without any matches all mail."""

    def __init__(self, route: RouteSettings) -> None:
        self.zone = route.zone
        self._conditions: list[tuple[str, Callable[[_Mail], str]]] = []
        if route.recipient_domain:
            recipient = _Domains(route.recipient_domain)
            self._conditions.append(("recipient_domain", lambda mail: recipient.match(mail.recipient_domain)))
        if route.sender_domain:
            sender = _Domains(route.sender_domain)
            self._conditions.append(("sender_domain", lambda mail: sender.match(mail.sender_domain)))
        if route.user:
            users = frozenset(route.user)
            self._conditions.append(("user", lambda mail: mail.user if mail.user in users else ""))
        if route.header:
            headers = tuple(_Header(text) for text in route.header)
            self._conditions.append(
                ("header", lambda mail: next((h.text for h in headers if h.match(mail.headers)), ""))
            )

    def matches(self, mail: _Mail) -> bool:
        return all(condition(mail) for _, condition in self._conditions)

    def reason(self, mail: _Mail) -> str:
        matched = [f"{name} matches {condition(mail)}" for name, condition in self._conditions]
        return " and ".join(matched) or "the route has no condition"


class _Domains:
    """Names and wildcards in sets: the cost of a look-up is the number of labels, not of names."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._any = "*" in patterns
        self._below = frozenset(_ascii(pattern[2:]) for pattern in patterns if pattern.startswith("*."))
        self._exact = frozenset(_ascii(pattern) for pattern in patterns if not pattern.startswith("*"))

    def match(self, domain: str) -> str:
        """The pattern that matches, `""` for none."""
        if domain in self._exact:
            return domain
        if self._below:
            parent = domain.partition(".")[2]
            while parent:
                if parent in self._below:
                    return f"*.{parent}"
                parent = parent.partition(".")[2]
        return "*" if self._any and domain else ""


class _Header:
    def __init__(self, text: str) -> None:
        self.text = text
        name, _, value = text.partition(":")
        self._name = name.strip().lower()
        self._value = value.strip().lower()

    def match(self, headers: Headers) -> bool:
        return any(name.lower() == self._name and self._value in value.lower() for name, value in headers)


def _domain(mailbox: str) -> str:
    return _ascii(domain_of(Mailbox(mailbox)))


def _ascii(domain: str) -> str:
    """A domain that has no ASCII form (an address literal, say) is compared as it is written."""
    try:
        return ascii_domain(domain)
    except ValueError:
        return domain.lower()
