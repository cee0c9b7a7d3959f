"""Chooses the zone of a recipient's delivery: the first `[[route]]` whose conditions all match.

Within one condition the values are alternatives. Domains are compared in lower-case ASCII (A-labels);
`*.example.com` matches every name below example.com, not example.com itself; `*` matches any domain. Users
are compared exactly; `*` is any user. A header condition is `Name` (present) or `Name: value` (one of the
fields with that name contains the value, case-insensitively). Sizes are those of the message as received. If
no route matches, the zone is `default`. A zone that the message names itself takes precedence over the
routes, if its client may name zones and the zone exists.

`zone_notes` lists the choices for `queue trace`: one line for each zone and reason, those for most recipients
first. It is bounded, because a client may send a message with many recipients, and the notes are stored with
the message.

Everything is prepared when the settings are loaded. Choosing never raises.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from zonerelay.config.settings import RouteSettings, ZoneSettings
from zonerelay.model.envelope import Envelope, Origin, Priority
from zonerelay.routing.zones.route_rules import Headers, RoutedMail, RouteRule, asked, index_of

DEFAULT_ZONE = "default"
BY_HEADER = "zone-header"
NO_ROUTE = "no route"
MAX_NAME = 64  # characters of a name that a message gives: no zone has a longer one


class ZoneChoice(NamedTuple):
    """The zone that was chosen for a recipient, and the reason (`route=2 sender matches …`, or `""`).

    If `priority` is None, the message's own priority applies.
    """

    zone: str
    why: str
    priority: Priority | None = None


ZoneOf = Callable[[str], ZoneChoice]
"""Returns the choice for a recipient of one message."""


class ChooseZone(Protocol):
    """Interface: returns the function that chooses the zone of each recipient of a message. It is called when
    a message has been received completely.

    `named` is the zone that the header of a trusted client names, or `""`.
    """

    def __call__(
        self, envelope: Envelope, /, *, headers: tuple[tuple[str, str], ...], size: int, named: str = ""
    ) -> ZoneOf: ...


_NOTHING_TO_CHOOSE = ZoneChoice(DEFAULT_ZONE, "")
_NO_ROUTE = ZoneChoice(DEFAULT_ZONE, NO_ROUTE)


class RuleCheck(msgspec.Struct, frozen=True):
    """The result of evaluating one `[[route]]` for a message. `unmatched` names the conditions that do not
    match, none if the route matches.
    """

    rule: int
    zone: str
    unmatched: tuple[str, ...] = ()


class ZoneExplanation(msgspec.Struct, frozen=True):
    """The zone of a recipient with the reason for the choice. `rule` counts the `[[route]]` tables from 1; 0
    means that none matched.

    `checks` are the routes that were evaluated, in order, up to the one that matches.
    """

    zone: str
    rule: int
    reason: str
    checks: tuple[RuleCheck, ...] = ()
    priority: Priority | None = None


class Zones:
    """The zones and routes of the configuration, which choose the zone of each delivery. `take_up` replaces
    them at a reload, so that holders of this object see the new ones.

    Raises ValueError with a message if a pattern of a route cannot be used.
    """

    def __init__(self, zones: Sequence[ZoneSettings], routes: Sequence[RouteSettings] = ()) -> None:
        self._rules = tuple(RouteRule(route, number) for number, route in enumerate(routes, start=1))
        self._index = index_of(routes)
        self._zones = {zone.name: zone for zone in zones}
        self._default = self._zones.get(DEFAULT_ZONE) or ZoneSettings(name=DEFAULT_ZONE)

    def take_up(self, other: "Zones") -> None:
        """Replace the zones and routes by those of another `Zones`, after a reload."""
        self._rules, self._index = other._rules, other._index
        self._zones, self._default = other._zones, other._default

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._zones)

    def get(self, name: str) -> ZoneSettings:
        """Return the settings of a zone that was chosen. Only the default zone need not be configured."""
        return self._zones.get(name, self._default)

    def known_before(self, origin: Origin, sender: str, recipient: str) -> str | None:
        """Return a recipient's zone before the message is received, or None if it depends on the message."""
        mail = RoutedMail(sender, origin)
        for at in self._index.find(asked(mail, recipient)):
            rule = self._rules[at]
            if rule.may_match(mail, recipient):
                return None if rule.needs_message else rule.zone
        return DEFAULT_ZONE

    def choose(self, envelope: Envelope, /, *, headers: Headers, size: int, named: str = "") -> ZoneOf:
        """Return the function that chooses the zone of each recipient of a message. `named` is the zone in
        its zone header, or `""` if it may not name one.
        """
        if named:
            return self._named(named, envelope, headers, size)
        if not self._rules:
            return _always(_NOTHING_TO_CHOOSE)
        priority = envelope.priority
        return self._by_routes(
            RoutedMail(envelope.sender, envelope.origin, priority=priority, headers=headers, size=size)
        )

    def _by_routes(self, mail: RoutedMail) -> ZoneOf:
        rules, index = self._rules, self._index

        def choose(recipient: str) -> ZoneChoice:
            for at in index.find(asked(mail, recipient)):
                rule = rules[at]
                if rule.matches(mail, recipient):
                    why = f"route={rule.number} {rule.reason(mail, recipient)}"
                    return ZoneChoice(rule.zone, why, rule.priority)
            return _NO_ROUTE

        return choose

    def _named(self, name: str, envelope: Envelope, headers: Headers, size: int) -> ZoneOf:
        if name in self._zones:
            return _always(ZoneChoice(name, BY_HEADER))
        zone_of = self.choose(envelope, headers=headers, size=size)
        shown = name[:MAX_NAME] + ("…" if len(name) > MAX_NAME else "")
        mark = f'the zone header contains an unknown zone: "{shown}"'

        def otherwise(recipient: str) -> ZoneChoice:
            choice = zone_of(recipient)
            return choice._replace(why=f"{mark}; {choice.why or NO_ROUTE}")

        return otherwise

    def explain(self, recipient: str, mail: RoutedMail, *, named: str = "") -> ZoneExplanation:
        """Choose a zone like `choose`, and return also the deciding route and why earlier routes did not
        match.
        """
        if named in self._zones:
            return ZoneExplanation(named, 0, "the zone was chosen by the zone header")
        checks: list[RuleCheck] = []
        for rule in self._rules:
            unmatched = rule.unmatched(mail, recipient)
            checks.append(RuleCheck(rule.number, rule.zone, unmatched))
            if not unmatched:
                why = rule.reason(mail, recipient)
                return ZoneExplanation(rule.zone, rule.number, why, tuple(checks), rule.priority)
        why = "no route matches" if self._rules else "there are no routes"
        return ZoneExplanation(DEFAULT_ZONE, 0, why, tuple(checks))


def _always(choice: ZoneChoice) -> ZoneOf:
    return lambda recipient: choice


MAX_NOTES = 20
MAX_NAMED = 5  # recipients in one note
MAX_NOTE = 500  # characters


def zone_notes(choices: Iterable[tuple[str, ZoneChoice]]) -> tuple[str, ...]:
    """Return the notes for a message's trace that explain why its zones were chosen."""
    chosen: dict[ZoneChoice, list[str]] = {}
    for recipient, choice in choices:
        if choice.why:
            chosen.setdefault(choice, []).append(recipient)
    if len(chosen) == 1:
        (choice,) = chosen
        return (_note(choice, ()),)
    most_first = sorted(chosen.items(), key=lambda item: -len(item[1]))
    notes = [_note(choice, recipients) for choice, recipients in most_first[:MAX_NOTES]]
    left = sum(len(recipients) for _, recipients in most_first[MAX_NOTES:])
    if left:
        notes.append(f"{left} more recipients by other routes")
    return tuple(notes)


def _note(choice: ZoneChoice, recipients: Iterable[str]) -> str:
    names = list(recipients)
    whom = f": {', '.join(names[:MAX_NAMED])}" if names else ""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    text = f"zone={choice.zone} {choice.why}{whom}"
    room = MAX_NOTE - len(more)
    return (text if len(text) <= room else f"{text[: room - 1]}…") + more
