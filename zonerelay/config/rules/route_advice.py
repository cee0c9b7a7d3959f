"""[[route]] tables that can never match, because of those before them or of the listeners. See `advice`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zonerelay.config.rules.listener_advice import has_users
from zonerelay.config.settings import RouteSettings, Settings

MAX_COMPARED = 300
"""Routes of which each is compared with all before it; of more, only with those that take everything."""

_ANYTHING = frozenset({"*"})
_WITH_ANYTHING = ("recipient_domain", "recipient", "sender_domain", "sender", "user")

Conditions = Mapping[str, frozenset[object]]


def route_advice(settings: Settings) -> Iterator[str]:
    yield from _unreachable(settings.route)
    users, certificates = has_users(settings), any(each.allow_certificates for each in settings.listener)
    for at, route in enumerate(settings.route):
        if route.user and not users:
            yield f'route[{at}].user: never matches: no listener has auth = "optional" or "required"'
        if route.certificate and not certificates:
            yield f"route[{at}].certificate: never matches: no listener asks for one (allow_certificates)"


def _unreachable(routes: tuple[RouteSettings, ...]) -> Iterator[str]:
    earlier: list[tuple[int, Conditions]] = []
    for at, route in enumerate(routes):
        conditions = {name: frozenset(values) for name, values in route.conditions.items()}
        if not conditions:
            continue  # refused
        other = next((place for place, taken in earlier if _covers(taken, conditions)), None)
        if other is not None:
            yield f"route[{at}]: never matches: route[{other}] takes all its mail before it is asked"
        elif len(routes) <= MAX_COMPARED or _covers(conditions, {}):
            earlier.append((at, conditions))


def _covers(one: Conditions, other: Conditions) -> bool:
    """Whether all mail that matches the other matches the one too. False where that is hard to say."""
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
