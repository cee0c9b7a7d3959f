"""Defines a suspension or hold rule of an operator, and its effect on mail. Pure: `now` is a parameter.

Mail of a suspended zone, destination or domain waits in the store, as the zone's `OrderGate` says. Orders
about senders, users or recipients, and hold rules, need the envelope: a delivery is held under the id of its
order when it would be attempted. The same applies to deliveries to a domain in a zone with one next hop,
where all mail waits in one line.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from zonerelay.model.envelope import Mailbox, domain_of
from zonerelay.model.pattern import is_like

if TYPE_CHECKING:  # answers to operators import orders, but must not load the settings
    from zonerelay.config.settings import ZoneSettings

SUSPEND = "suspend"
HOLD = "hold"
SELECTORS = ("zone", "destination", "domain", "sender", "user", "recipient")
MAX_HOSTS = 16


class OrderFields(msgspec.Struct, frozen=True, kw_only=True):
    """The public fields of a suspension or hold rule. All given selectors must match; `*` stands for any
    text. Answers to operators have the same fields (`operations.answers.OrderRow`), so their names are a
    public interface.
    """

    id: str
    effect: str
    reason: str
    who: str
    since: float
    until: float | None = None
    zone: str | None = None
    destination: str | None = None
    domain: str | None = None
    sender: str | None = None
    user: str | None = None
    recipient: str | None = None
    everything: bool = False
    refuse: bool = False
    stop_clock: bool = False

    @property
    def selectors(self) -> tuple[str | None, ...]:
        return tuple(getattr(self, name) for name in SELECTORS)

    @property
    def about(self) -> str:
        """The selectors of the suspension or hold rule, as a string."""
        given = zip(SELECTORS, self.selectors, strict=True)
        # Not `name=value`, which the log's redaction would take for an address.
        return " ".join(f"{name} {value or '<>'}" for name, value in given if value is not None) or "all mail"


class Order(OrderFields, frozen=True, kw_only=True, omit_defaults=True):
    """An operator's suspension or hold rule. `hosts` are the hosts that were known for `destination` when the
    order was given. `ended` is the time at which it ended.
    """

    hosts: tuple[str, ...] = ()
    ended: float | None = None

    @property
    def needs_envelope(self) -> bool:
        return self.effect == HOLD or any(each is not None for each in self.selectors[3:])

    def is_in_force(self, now: float) -> bool:
        return self.ended is None and (self.until is None or now < self.until)

    def is_about_zone(self, zone: str) -> bool:
        return self.zone is None or self.zone == zone

    def is_about_destination(self, name: str, label: str) -> bool:
        """Return whether the `destination` selector of the suspension or hold rule matches a destination.
        `name` is its display name, and `label` its hosts with ports.
        """
        wanted = self.destination
        if wanted is None or label in self.hosts:
            return True
        return any(is_like(wanted, text) for text in _texts_of(name, label))

    def is_about_client(self, sender: str, user: str) -> bool:
        bare = None if self.sender is None else self.sender.removeprefix("<").removesuffix(">")
        return is_like(bare, sender) and is_like(self.user, user)

    def is_about_recipient(self, recipient: str) -> bool:
        return is_like(self.domain, domain_of(Mailbox(recipient))) and is_like(self.recipient, recipient)


class Subject(NamedTuple):
    """The properties of mail with which the selectors of suspensions and hold rules are compared.
    `destination` is its display name, and `label` its hosts with ports, or "" while they are unknown.
    """

    zone: str
    recipient: str
    sender: str
    user: str
    destination: str = ""
    label: str = ""


def _texts_of(name: str, label: str) -> tuple[str, ...]:
    """Return the names that an operator may use for a destination: its display name and its hosts."""
    hosts = label.partition(" ")[0].split(",")
    return name, label, *hosts, *(host.rpartition(":")[0] for host in hosts)


class OrderIndex:
    """An index that finds the suspensions and hold rules that may match a delivery. There may be a thousand
    of them, and every delivery is compared.
    """

    def __init__(self, orders: Sequence[Order], names: Sequence[str]) -> None:
        self._orders = orders
        self._numbers: dict[tuple[str, str], list[int]] = {}
        for number, order in enumerate(orders):
            for key in _keys(order, names):
                self._numbers.setdefault(key, []).append(number)

    def find(self, **texts: Collection[str]) -> list[Order]:
        """Return the suspensions and hold rules that may match these values of selectors, in their original
        order.
        """
        if not all(text.isascii() for some in texts.values() for text in some):
            return list(self._orders)
        keys = {(name, text.lower()) for name, some in texts.items() for text in some} | {_ANY}
        found = {number for key in keys for number in self._numbers.get(key, ())}
        return [self._orders[number] for number in sorted(found)]


_ANY = ("", "")


def _keys(order: Order, names: Sequence[str]) -> list[tuple[str, str]]:
    name = next((name for name in names if getattr(order, name) is not None), "")
    text = getattr(order, name) if name else "*"
    if name == "sender":
        text = text.removeprefix("<").removesuffix(">")
    hosts = order.hosts if name == "destination" else ()
    if "*" in text or not all(map(str.isascii, (text, *hosts))):
        return [_ANY]
    return [(name, each.lower()) for each in (text, *hosts)]


class OrderGate:
    """Decides which deliveries of a zone stay in the store because of suspensions. If it `is_closed`, all of
    them do.
    """

    def __init__(self, orders: tuple[Order, ...] = ()) -> None:
        self.orders = orders
        self.is_closed = any(each.domain is None and each.destination is None for each in orders)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OrderGate) and self.orders == other.orders

    def __hash__(self) -> int:
        return hash(self.orders)

    @cached_property
    def _by_domain(self) -> OrderIndex:
        return OrderIndex([each for each in self.orders if each.domain is not None], ("domain",))

    @cached_property
    def _by_destination(self) -> OrderIndex:
        some = [each for each in self.orders if each.destination is not None]
        return OrderIndex(some, ("destination",))

    def keeps_domain(self, domain: str) -> Order | None:
        """Return the suspension of a recipient domain, which is checked before the domain is looked up, or
        None.
        """
        some = self._by_domain.find(domain=(domain,))
        return next((each for each in some if is_like(each.domain, domain)), None)

    def keeps(self, name: str, label: str) -> Order | None:
        """Return the suspension of a destination, or None."""
        some = self._by_destination.find(destination=_texts_of(name, label))
        return next((each for each in some if each.is_about_destination(name, label)), None)


OPEN = OrderGate()


class OrderTable:
    """The active suspensions and hold rules, and earlier ones during which mail did not age. A table is
    immutable; a change creates a new one.
    """

    def __init__(self, orders: Iterable[Order] = (), now: float = 0.0) -> None:
        every = list(orders)
        self.orders = tuple(order for order in every if order.is_in_force(now))
        self.pauses = tuple(order for order in every if order.stop_clock)
        self.refusing = tuple(order for order in self.orders if order.refuse)
        self.by_envelope = any(order.needs_envelope or order.domain is not None for order in self.orders)
        """Whether the envelope has to be checked before an attempt."""
        self.ids = frozenset(order.id for order in self.orders)
        self._index = OrderIndex(self.orders, ("recipient", "sender", "user", "domain"))

    def gate(self, zone: ZoneSettings) -> OrderGate:
        some = (each for each in self.orders if not each.needs_envelope and each.is_about_zone(zone.name))
        return OrderGate(tuple(each for each in some if not (zone.next_hop and each.domain is not None)))

    def about(self, mail: Subject) -> list[Order]:
        """Return all suspensions and hold rules that apply to this mail."""
        some = self._may_match(mail.recipient, mail.sender, mail.user)
        return [order for order in some if _matches(order, mail)]

    def _may_match(self, recipient: str, sender: str, user: str) -> list[Order]:
        domain = domain_of(Mailbox(recipient))
        return self._index.find(recipient=(recipient,), sender=(sender,), user=(user,), domain=(domain,))

    def keeping(self, mail: Subject) -> Order | None:
        """Return a suspension that applies to this mail whatever its sender is, or None."""
        return next((each for each in self.about(mail) if not each.needs_envelope), None)

    def holding(self, mail: Subject, act: str) -> Order | None:
        """Return the suspension or hold rule that requires a delivery to be held now, or None. A hold rule
        does not apply to mail that an operator's `act` has released individually.
        """
        for order in self.about(mail):
            if order.effect != HOLD or act in ("", order.id):
                return order
        return None

    def refuses(
        self, sender: str, user: str, recipient: str | None = None, zone: str | None = None
    ) -> Order | None:
        """Return the suspension or hold rule because of which a client's mail is rejected, or None. Without a
        recipient, check those that apply at MAIL.
        """
        for order in self._may_match(recipient or "", sender, user):
            at_mail = order.zone is None and order.domain is None and order.recipient is None
            if not order.refuse or at_mail is not (recipient is None):
                continue
            if not order.is_about_client(sender, user):
                continue
            if recipient is None or (order.is_about_recipient(recipient) and order.zone in (None, zone)):
                return order
        return None

    def paused(self, mail: Subject, created: float, now: float) -> float:
        """Return the number of seconds that do not count towards the age of mail because of suspensions.
        Overlapping ones are counted once.
        """
        seconds = over = 0.0
        for order in self.pauses:  # sorted by the time at which they were given
            if _matches(order, mail):
                began = max(order.since, created, over)
                over = max(over, min(order.ended or now, order.until or now))
                seconds += max(0.0, over - began)
        return seconds


def _matches(order: Order, mail: Subject) -> bool:
    return (
        order.is_about_zone(mail.zone)
        and order.is_about_client(mail.sender, mail.user)
        and order.is_about_recipient(mail.recipient)
        and order.is_about_destination(mail.destination, mail.label)
    )
