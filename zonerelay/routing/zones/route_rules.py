"""The conditions of one `[[route]]`.

Most conditions are about the message and are evaluated once for it. `recipient_domain` and `recipient` are
evaluated for each recipient. Both kinds are evaluated in the order of their cost. A condition returns the
text that matched, for display.

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

    _: KW_ONLY
    sender: str
    user: str = ""
    listener: str = ""
    client: str = ""
    certificate: str = ""
    priority: str = Priority.NORMAL
    headers: Headers = ()
    size: int | None = None

    def __post_init__(self) -> None:
        self._fields: dict[str, list[str]] | None = None

    @classmethod
    def of(cls, origin: Origin, sender: str) -> RoutedMail:
        """Return what is known before the message is received."""
        return cls(
            sender=sender,
            user=origin.user,
            listener=origin.listener,
            client=origin.client_address,
            certificate=origin.certificate,
        )

    def values(self, name: str) -> Sequence[str]:
        """Return the values of the fields with this name; both are in lower case."""
        if self._fields is None:
            self._fields = {}
            for key, value in self.headers:
                self._fields.setdefault(key.lower(), []).append(value.lower())
        return self._fields.get(name, ())


AboutMail = Callable[[RoutedMail], str]
AboutRecipient = Callable[[str], str]


class RouteRule:
    """The compiled conditions of one route. `number` counts from 1. Raises ValueError with a message if the
    domain of a pattern is invalid.

    A route without any condition matches all mail.
    """

    def __init__(self, route: RouteSettings, number: int) -> None:
        self.zone = route.zone
        self.number = number
        self.priority = Priority(route.set_priority) if route.set_priority else None
        self.needs_message = bool(route.header or route.min_size or route.max_size or route.priority)
        """Whether the route can be evaluated only when the message has been received."""
        try:
            self._about_mail = tuple(_about_mail(route))
            self.about_recipient = tuple(_about_recipient(route))
        except ValueError as error:
            raise ValueError(f"route[{number - 1}]: {error}") from error

    def takes(self, mail: RoutedMail) -> bool:
        """Return whether every condition on the message matches. The recipient decides then."""
        for _, ask in self._about_mail:  # noqa: SIM110 - all() with a generator takes twice as long
            if not ask(mail):
                return False
        return True

    def goes_to(self, recipient: str) -> bool:
        for _, ask in self.about_recipient:  # noqa: SIM110 - as above
            if not ask(recipient):
                return False
        return True

    def said_of_mail(self, mail: RoutedMail) -> tuple[str, ...]:
        """Return the matching values, by condition."""
        asked = ((name, ask(mail)) for name, ask in self._about_mail)
        return tuple(f"{name} matches {what}" for name, what in asked if what)

    def said_of_recipient(self, recipient: str) -> tuple[str, ...]:
        asked = ((name, ask(recipient)) for name, ask in self.about_recipient)
        return tuple(f"{name} matches {what}" for name, what in asked if what)

    def unmatched(self, mail: RoutedMail, recipient: str) -> tuple[str, ...]:
        """Return the names of the conditions that do not match."""
        of_mail = [name for name, ask in self._about_mail if not ask(mail)]
        return (*of_mail, *(name for name, ask in self.about_recipient if not ask(recipient)))


def reason(said: Sequence[str]) -> str:
    return " and ".join(said) or "the route has no condition"


def _about_mail(route: RouteSettings) -> Iterator[tuple[str, AboutMail]]:
    if route.listener:
        listeners = frozenset(route.listener)
        yield "listener", lambda mail: mail.listener if mail.listener in listeners else ""
    if route.priority:
        priorities = frozenset(route.priority)
        yield "priority", lambda mail: mail.priority if mail.priority in priorities else ""
    if route.user:
        users = frozenset(route.user)
        yield "user", lambda mail: mail.user if mail.user in users or _ANY in users else ""
    if route.certificate:
        certificates = frozenset(route.certificate)
        yield "certificate", lambda mail: mail.certificate if mail.certificate in certificates else ""
    if route.min_size:
        yield "min_size", lambda mail: _size(mail) if (mail.size or 0) >= route.min_size else ""
    if route.max_size:
        yield "max_size", lambda mail: _size(mail) if (mail.size or 0) <= route.max_size else ""
    if route.client:
        networks = Networks(route.client)
        yield "client", lambda mail: mail.client if networks.match(mail.client) else ""
    if route.sender_domain:
        find = _domain_finder(route.sender_domain)
        yield "sender_domain", lambda mail: find(mail.sender)
    if route.sender:
        senders = AddressPatterns(route.sender)
        yield "sender", lambda mail: senders.find(mail.sender)
    if route.header:
        headers = tuple(_HeaderCondition(text) for text in route.header)
        yield "header", lambda mail: next((header.text for header in headers if header.match(mail)), "")


def _about_recipient(route: RouteSettings) -> Iterator[tuple[str, AboutRecipient]]:
    if route.recipient_domain:
        yield "recipient_domain", _domain_finder(route.recipient_domain)
    if route.recipient:
        yield "recipient", AddressPatterns(route.recipient).find


def _size(mail: RoutedMail) -> str:
    return "" if mail.size is None else f"{mail.size} bytes"


class _HeaderCondition:
    """A condition on a header field."""

    def __init__(self, text: str) -> None:
        self.text = text
        name, _, value = text.partition(":")
        self._name = name.strip().lower()
        self._value = value.strip().lower()

    def match(self, mail: RoutedMail) -> bool:
        return any(self._value in value for value in mail.values(self._name))


def _domain_finder(patterns: Sequence[str]) -> AboutRecipient:
    """Return the look-up of the pattern that matches a mailbox's domain. A bare postmaster has none."""
    find = AddressPatterns(patterns).find
    return lambda mailbox: find(f"@{domain}") if (domain := domain_of(Mailbox(mailbox))) else ""
