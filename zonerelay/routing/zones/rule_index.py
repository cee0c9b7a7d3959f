"""Finds the first matching rule without evaluating all rules.

Each rule is indexed under one of its conditions, the one whose values the fewest other rules have. `find`
returns the numbers of the rules that may match, in order, and omits no rule that matches. The caller
evaluates those. The cost of a look-up does not grow with the number of rules, except for rules that have no
condition that can be indexed (only headers and sizes), or the same values as many others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from zonerelay.config.settings import Network
from zonerelay.routing.addresses import address_number
from zonerelay.routing.zones.address_patterns import AddressTable

FEW = 8
"""With this number of rules or fewer, evaluating them in turn is faster."""

_ANY = "*"
_NULL_SENDER = "<>"

Conditions = Mapping[str, Sequence[str] | Sequence[Network]]
"""The values of a rule by the name of the condition. A condition without values always holds."""


class ConditionIndex(Protocol):
    """An index of rules by the values of one condition."""

    def add(self, value: str | Network, number: int) -> None:
        """Add a rule under a value. Raise ValueError if the value cannot be indexed."""

    def find(self, asked: str) -> Iterable[int]:
        """Return the numbers of the rules whose value matches."""


class TextIndex:
    """An index of rules by text. `*` is any text but `""`."""

    def __init__(self) -> None:
        self._numbers: dict[str, list[int]] = {}

    def add(self, value: str | Network, number: int) -> None:
        self._numbers.setdefault(str(value), []).append(number)

    def find(self, asked: str) -> Iterable[int]:
        if not asked:
            return ()
        return (*self._numbers.get(asked, ()), *self._numbers.get(_ANY, ()))


class AddressIndex:
    """An index of rules by address pattern (`address_patterns`). The argument of a look-up is a mailbox."""

    def __init__(self) -> None:
        self._table = AddressTable()
        self._null: list[int] = []

    def add(self, value: str | Network, number: int) -> None:
        if value == _NULL_SENDER:
            self._null.append(number)
        else:
            self._table.add(str(value), number)

    def find(self, asked: str) -> Iterable[int]:
        return self._table.find(asked) if asked else self._null


class NetworkIndex:
    """An index of rules by network. The argument of a look-up is the address of a client."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], dict[int, list[int]]] = {}

    def add(self, value: str | Network, number: int) -> None:
        assert not isinstance(value, str)
        shift = value.max_prefixlen - value.prefixlen
        found = self._numbers.setdefault((value.version, shift), {})
        found.setdefault(int(value.network_address) >> shift, []).append(number)

    def find(self, asked: str) -> Iterable[int]:
        version, address = address_number(asked)
        return [
            number
            for (of, shift), numbers in self._numbers.items()
            if of == version
            for number in numbers.get(address >> shift, ())
        ]


class RuleIndex:
    """An index that finds the first matching rule. `shelves` are empty indexes, one for each condition that
    can be indexed.
    """

    def __init__(self, shelves: Mapping[str, ConditionIndex], rules: Sequence[Conditions]) -> None:
        self._others: list[int] = []
        self._shelves: dict[str, ConditionIndex] = {}
        counts = Counter[tuple[str, object]]()
        if len(rules) > FEW:
            for rule in rules:
                counts.update((name, value) for name, values in rule.items() for value in values)
        for number, rule in enumerate(rules):
            name = _rarest(rule, counts)
            try:
                for value in rule[name] if name else ():
                    shelves[name].add(value, number)
            except ValueError:
                name = ""  # such as an address literal among domains
            if name:
                self._shelves[name] = shelves[name]
            else:
                self._others.append(number)

    def find(self, asked: Mapping[str, str]) -> Sequence[int]:
        """Return the numbers of the rules that may match, from 0, in order."""
        if not self._shelves:
            return self._others
        found = {number for name, shelf in self._shelves.items() for number in shelf.find(asked[name])}
        found.update(self._others)
        return sorted(found)


def _rarest(rule: Conditions, counts: Counter[tuple[str, object]]) -> str:
    """Return the condition under which to index the rule, or `""`."""
    found = {
        name: max(counts[name, value] for value in values)
        for name, values in rule.items()
        if values and _ANY not in values
    }
    return min(found, key=found.__getitem__) if counts and found else ""
