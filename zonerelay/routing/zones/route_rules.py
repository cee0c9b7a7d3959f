"""The conditions of a `[[route]]` or `[[access]]` table, and the index that finds tables that may match.

Conditions are evaluated for each recipient, in the order of their cost: those about the message first. A
condition returns the text that matched, for display.

`RuleIndex` finds the first matching rule without evaluating all rules. Each rule is indexed under one of its
conditions, the one whose values the fewest other rules have. `find` returns the numbers of the rules that may
match, in order, and omits no rule that matches. The caller evaluates those. The cost of a look-up does not
grow with the number of rules, except for rules that have no condition that can be indexed (only headers and
sizes), or the same values as many others.

Everything is prepared when the settings are loaded. Evaluation never raises.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Protocol

from zonerelay.config.settings import AccessSettings, Network, RouteSettings
from zonerelay.model.envelope import Mailbox, Origin, Priority, domain_of
from zonerelay.routing.addresses import Networks
from zonerelay.routing.zones.address_patterns import AddressPatterns, AddressTable

FEW = 8
"""With this number of rules or fewer, evaluating them in turn is faster."""

_ANY = "*"


class ConditionIndex(Protocol):
    """Interface: an index of `[[route]]` or `[[access]]` rules by the values of one condition."""

    # Any: each index has values of its own type.
    def add(self, value: Any, number: int, /) -> None:
        """Add the number of a rule under a value of its condition. Raise ValueError if the value cannot be
        indexed.
        """

    def find(self, asked: str, /) -> Iterable[int]:
        """Return the numbers of the rules whose value matches."""


class TextIndex:
    """An index of rules by strings that must match exactly. `*` matches any text but `""`."""

    def __init__(self) -> None:
        self._numbers: dict[str, list[int]] = {}

    def add(self, value: str, number: int) -> None:
        self._numbers.setdefault(value, []).append(number)

    def find(self, asked: str) -> Iterable[int]:
        if not asked:
            return ()
        return (*self._numbers.get(asked, ()), *self._numbers.get(_ANY, ()))


class RuleIndex:
    """An index of `[[route]]` or `[[access]]` rules, which finds those that may match without evaluating all.
    `shelves` are empty indexes, one for each condition that can be indexed. Each rule has the values of a
    condition in the attribute of its name; a condition without values or attribute always holds.
    """

    def __init__(self, shelves: Mapping[str, ConditionIndex], rules: Sequence[object]) -> None:
        self._others: list[int] = []
        self._shelves: dict[str, ConditionIndex] = {}
        counts = Counter[tuple[str, object]]()
        if len(rules) > FEW:
            counts.update(
                (name, value) for rule in rules for name in shelves for value in getattr(rule, name, ())
            )
        for number, rule in enumerate(rules):
            name = _rarest({name: getattr(rule, name, ()) for name in shelves}, counts)
            try:
                for value in getattr(rule, name) if name else ():
                    shelves[name].add(value, number)
            except ValueError:
                name = ""  # such as an address literal among domains
            if name:
                self._shelves[name] = shelves[name]
            else:
                self._others.append(number)

    def find(self, asked: Mapping[str, str]) -> Sequence[int]:
        """Return the numbers of the rules that may match, in order (from 0)."""
        if not self._shelves:
            return self._others
        found = {number for name, shelf in self._shelves.items() for number in shelf.find(asked[name])}
        found.update(self._others)
        return sorted(found)


def _rarest(rule: Mapping[str, Sequence[object]], counts: Counter[tuple[str, object]]) -> str:
    """Return the name of the rule's most selective condition, or `""` if it has none that can be indexed."""
    found = {
        name: max(counts[name, value] for value in values)
        for name, values in rule.items()
        if values and _ANY not in values
    }
    return min(found, key=found.__getitem__) if counts and found else ""


Headers = Sequence[tuple[str, str]]


@dataclass(eq=False, repr=False)
class RoutedMail:
    """The properties of a message to which the conditions of routes refer. `size` is None while it is
    unknown.
    """

    sender: str
    origin: Origin
    _: KW_ONLY
    priority: str = Priority.NORMAL
    headers: Headers = ()
    size: int | None = None

    def __post_init__(self) -> None:
        self._fields: dict[str, list[str]] | None = None

    def values(self, name: str) -> Sequence[str]:
        """Return the values of the header fields with this name, in lower case."""
        if self._fields is None:
            self._fields = {}
            for key, value in self.headers:
                self._fields.setdefault(key.lower(), []).append(value.lower())
        return self._fields.get(name, ())


Ask = Callable[[RoutedMail, str], str]
"""Returns what matches of a message, for one of its recipients, or `""`."""

_OF_MESSAGE = frozenset(("header", "min_size", "max_size", "priority"))
"""Conditions that can be evaluated only when the message has been received."""
_ADDRESSES = ("sender_domain", "sender", "recipient_domain", "recipient")


class RuleConditions:
    """The compiled conditions of a `[[route]]` or `[[access]]` table. Raises ValueError with a message if the
    domain of a pattern is invalid.

    A rule without any condition matches all mail.
    """

    def __init__(self, rule: RouteSettings | AccessSettings) -> None:
        given = ((name, make, getattr(rule, name, None)) for name, make in _CONDITIONS.items())
        self._conditions = tuple((name, make(values)) for name, make, values in given if values)
        self.needs_message = any(name in _OF_MESSAGE for name, _ in self._conditions)

    def matches(self, mail: RoutedMail, recipient: str) -> bool:
        for _, ask in self._conditions:  # noqa: SIM110 - all() with a generator takes twice as long
            if not ask(mail, recipient):
                return False
        return True

    def may_match(self, mail: RoutedMail, recipient: str) -> bool:
        """Return whether the rule may match a message whose content has not been received yet."""
        return _OF_MESSAGE.issuperset(self.unmatched(mail, recipient))

    def reason(self, mail: RoutedMail, recipient: str) -> str:
        """Describe which value of each condition matches the message."""
        said = [f"{name} matches {ask(mail, recipient)}" for name, ask in self._conditions]
        return " and ".join(said) or "the route has no condition"

    def unmatched(self, mail: RoutedMail, recipient: str) -> tuple[str, ...]:
        """Return the names of the conditions that do not match the mail."""
        return tuple(name for name, ask in self._conditions if not ask(mail, recipient))


class RouteRule(RuleConditions):
    """The compiled conditions of a `[[route]]`. `number` counts from 1. Raises ValueError with a message."""

    def __init__(self, route: RouteSettings, number: int) -> None:
        self.zone = route.zone
        self.number = number
        self.priority = route.set_priority
        try:
            super().__init__(route)
        except ValueError as error:
            raise ValueError(f"route[{number - 1}]: {error}") from error


def index_of(rules: Sequence[RouteSettings] | Sequence[AccessSettings]) -> RuleIndex:
    """Build the index that finds the rules that may match a message. `find` needs the result of `asked`."""
    texts = {name: TextIndex() for name in ("listener", "user", "certificate")}
    addresses = {name: AddressTable() for name in _ADDRESSES}
    return RuleIndex({**texts, "client": Networks(), **addresses}, rules)


def asked(mail: RoutedMail, recipient: str) -> dict[str, str]:
    return {
        "listener": mail.origin.listener,
        "user": mail.origin.user,
        "certificate": mail.origin.certificate,
        "client": mail.origin.client_address,
        "sender_domain": mail.sender,
        "sender": mail.sender,
        "recipient_domain": recipient,
        "recipient": recipient,
    }


def _text(attribute: str) -> Callable[[Sequence[str]], Ask]:
    """Return a function that compiles conditions about one attribute of the message, such as its user. `*`
    matches any text but `""`.
    """
    text_of = attrgetter(attribute)

    def condition(values: Sequence[str]) -> Ask:
        if _ANY in values:
            return lambda mail, _: str(text_of(mail))
        known = frozenset(values)
        return lambda mail, _: text if (text := text_of(mail)) in known else ""

    return condition


def _client(values: Sequence[Network]) -> Ask:
    networks = Networks(values)
    return lambda mail, _: mail.origin.client_address if networks.match(mail.origin.client_address) else ""


def _size(mail: RoutedMail) -> str:
    return "" if mail.size is None else f"{mail.size} bytes"


def _header(texts: Sequence[str]) -> Ask:
    """Return the compiled condition `Name` or `Name: value` about the header fields of the message."""
    parts = [(text, text.lower().partition(":")) for text in texts]
    wanted = [(text, name.strip(), value.strip()) for text, (name, _, value) in parts]

    @lru_cache(maxsize=1)  # for all recipients of a message
    def find(mail: RoutedMail) -> str:
        matching = (text for text, name, part in wanted if any(part in each for each in mail.values(name)))
        return next(matching, "")

    return lambda mail, _: find(mail)


def _sender(find: Callable[[str], str]) -> Ask:
    return lambda mail, _: find(mail.sender)


def _recipient(find: Callable[[str], str]) -> Ask:
    return lambda _, recipient: find(recipient)


def _domain_finder(patterns: Sequence[str]) -> Callable[[str], str]:
    """Return a function that returns the first pattern that matches the domain of an address. The address
    `postmaster` has no domain.
    """
    find = AddressPatterns(patterns).find
    return lambda mailbox: find(f"@{domain}") if (domain := domain_of(Mailbox(mailbox))) else ""


_CONDITIONS: dict[str, Callable[[Any], Ask]] = {  # Any: the values of a condition
    "listener": _text("origin.listener"),
    "priority": _text("priority"),
    "user": _text("origin.user"),
    "certificate": _text("origin.certificate"),
    "min_size": lambda least: lambda mail, _: _size(mail) if (mail.size or 0) >= least else "",
    "max_size": lambda most: lambda mail, _: _size(mail) if (mail.size or 0) <= most else "",
    "client": _client,
    "sender_domain": lambda patterns: _sender(_domain_finder(patterns)),
    "sender": lambda patterns: _sender(AddressPatterns(patterns).find),
    "header": _header,
    "recipient_domain": lambda patterns: _recipient(_domain_finder(patterns)),
    "recipient": lambda patterns: _recipient(AddressPatterns(patterns).find),
}
"""What compiles the values of each condition, in the order of their cost."""
