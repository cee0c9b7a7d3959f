"""The conditions of one `[[route]]`.

Conditions are evaluated for each recipient, in the order of their cost: those about the message first. A
condition returns the text that matched, for display.

Everything is prepared when the settings are loaded. Evaluation never raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

from zonerelay.config.settings import RouteSettings
from zonerelay.model.address import Mailbox, domain_of
from zonerelay.model.envelope import Origin
from zonerelay.model.queue_name import Priority
from zonerelay.routing.addresses import Networks
from zonerelay.routing.zones.address_patterns import AddressPatterns

Headers = Sequence[tuple[str, str]]

_ANY = "*"


@dataclass(eq=False, repr=False)
class RoutedMail:
    """The properties of a message that routes match. `size` is None while it is unknown."""

    sender: str
    origin: Origin
    _: KW_ONLY
    priority: str = Priority.NORMAL
    headers: Headers = ()
    size: int | None = None

    def __post_init__(self) -> None:
        self._fields: dict[str, list[str]] | None = None

    def values(self, name: str) -> Sequence[str]:
        """Return the values of the fields with this name; both are in lower case."""
        if self._fields is None:
            self._fields = {}
            for key, value in self.headers:
                self._fields.setdefault(key.lower(), []).append(value.lower())
        return self._fields.get(name, ())


Ask = Callable[[RoutedMail, str], str]
"""Returns what matches of a message, for one of its recipients, or `""`."""

_OF_MESSAGE = frozenset(("header", "min_size", "max_size", "priority"))
"""Conditions that can be evaluated only when the message has been received."""


class RouteRule:
    """The compiled conditions of one route. `number` counts from 1. Raises ValueError with a message if the
    domain of a pattern is invalid.

    A route without any condition matches all mail.
    """

    def __init__(self, route: RouteSettings, number: int) -> None:
        self.zone = route.zone
        self.number = number
        self.priority = Priority(route.set_priority) if route.set_priority else None
        try:
            self._conditions = tuple(_conditions(route))
        except ValueError as error:
            raise ValueError(f"route[{number - 1}]: {error}") from error
        self.needs_message = any(name in _OF_MESSAGE for name, _ in self._conditions)

    def matches(self, mail: RoutedMail, recipient: str) -> bool:
        for _, ask in self._conditions:  # noqa: SIM110 - all() with a generator takes twice as long
            if not ask(mail, recipient):
                return False
        return True

    def may_match(self, mail: RoutedMail, recipient: str) -> bool:
        """Return whether mail that has not been received yet may match."""
        return _OF_MESSAGE.issuperset(self.unmatched(mail, recipient))

    def reason(self, mail: RoutedMail, recipient: str) -> str:
        """Return the matching values, by condition."""
        said = [f"{name} matches {ask(mail, recipient)}" for name, ask in self._conditions]
        return " and ".join(said) or "the route has no condition"

    def unmatched(self, mail: RoutedMail, recipient: str) -> tuple[str, ...]:
        """Return the names of the conditions that do not match."""
        return tuple(name for name, ask in self._conditions if not ask(mail, recipient))


def _conditions(route: RouteSettings) -> Iterator[tuple[str, Ask]]:
    if route.listener:
        listeners = frozenset(route.listener)
        yield "listener", lambda mail, _: mail.origin.listener if mail.origin.listener in listeners else ""
    if route.priority:
        priorities = frozenset(route.priority)
        yield "priority", lambda mail, _: mail.priority if mail.priority in priorities else ""
    if route.user:
        users = frozenset(route.user)
        yield "user", lambda mail, _: mail.origin.user if mail.origin.user in users or _ANY in users else ""
    if route.certificate:
        certificates = frozenset(route.certificate)
        yield (
            "certificate",
            lambda mail, _: mail.origin.certificate if mail.origin.certificate in certificates else "",
        )
    if route.min_size:
        yield "min_size", lambda mail, _: _size(mail) if (mail.size or 0) >= route.min_size else ""
    if route.max_size:
        yield "max_size", lambda mail, _: _size(mail) if (mail.size or 0) <= route.max_size else ""
    if route.client:
        networks = Networks(route.client)
        yield (
            "client",
            lambda mail, _: mail.origin.client_address if networks.match(mail.origin.client_address) else "",
        )
    if route.sender_domain:
        of_sender = _domain_finder(route.sender_domain)
        yield "sender_domain", lambda mail, _: of_sender(mail.sender)
    if route.sender:
        senders = AddressPatterns(route.sender)
        yield "sender", lambda mail, _: senders.find(mail.sender)
    if route.header:
        of_header = _header_finder(route.header)
        yield "header", lambda mail, _: of_header(mail)
    if route.recipient_domain:
        of_recipient = _domain_finder(route.recipient_domain)
        yield "recipient_domain", lambda _, recipient: of_recipient(recipient)
    if route.recipient:
        recipients = AddressPatterns(route.recipient)
        yield "recipient", lambda _, recipient: recipients.find(recipient)


def _size(mail: RoutedMail) -> str:
    return "" if mail.size is None else f"{mail.size} bytes"


def _header_finder(texts: Sequence[str]) -> Callable[[RoutedMail], str]:
    """Return the look-up of the condition, `Name` or `Name: value`, that matches a field of a message."""
    parts = [(text, text.lower().partition(":")) for text in texts]
    wanted = [(text, name.strip(), value.strip()) for text, (name, _, value) in parts]
    return lambda mail: next(
        (text for text, name, part in wanted if any(part in value for value in mail.values(name))), ""
    )


def _domain_finder(patterns: Sequence[str]) -> Callable[[str], str]:
    """Return the look-up of the pattern that matches a mailbox's domain. A bare postmaster has none."""
    find = AddressPatterns(patterns).find
    return lambda mailbox: find(f"@{domain}") if (domain := domain_of(Mailbox(mailbox))) else ""
