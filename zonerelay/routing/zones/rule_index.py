"""Finds the first matching rule without evaluating all rules.

Each rule is indexed under one of its conditions, the one whose values the fewest other rules have. `find`
returns the numbers of the rules that may match, in order, and omits no rule that matches. The caller
evaluates those. The cost of a look-up does not grow with the number of rules, except for rules that have no
condition that can be indexed (only headers and sizes), or the same values as many others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from zonerelay.config.settings import Network
from zonerelay.routing.addresses import address_number

FEW = 8
"""With this number of rules or fewer, evaluating them in turn is faster."""

_ANY = "*"


class ConditionIndex(Protocol):
    """An index of rules by the values of one condition, such as `address_patterns.AddressTable`."""

    # Any: each index has values of its own type.
    def add(self, value: Any, number: int, /) -> None:
        """Add a rule under a value. Raise ValueError if the value cannot be indexed."""

    def find(self, asked: str, /) -> Iterable[int]:
        """Return the numbers of the rules whose value matches."""


class TextIndex:
    """An index of rules by text. `*` is any text but `""`."""

    def __init__(self) -> None:
        self._numbers: dict[str, list[int]] = {}

    def add(self, value: str, number: int) -> None:
        self._numbers.setdefault(value, []).append(number)

    def find(self, asked: str) -> Iterable[int]:
        if not asked:
            return ()
        return (*self._numbers.get(asked, ()), *self._numbers.get(_ANY, ()))


class NetworkIndex:
    """An index of rules by network. The argument of a look-up is the address of a client."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, int], dict[int, list[int]]] = {}

    def add(self, value: Network, number: int) -> None:
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
    can be indexed. Each rule has the values of a condition in the attribute of its name; a condition without
    values or attribute always holds.
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
        """Return the numbers of the rules that may match, from 0, in order."""
        if not self._shelves:
            return self._others
        found = {number for name, shelf in self._shelves.items() for number in shelf.find(asked[name])}
        found.update(self._others)
        return sorted(found)


def _rarest(rule: Mapping[str, Sequence[object]], counts: Counter[tuple[str, object]]) -> str:
    """Return the condition under which to index the rule, or `""`."""
    found = {
        name: max(counts[name, value] for value in values)
        for name, values in rule.items()
        if values and _ANY not in values
    }
    return min(found, key=found.__getitem__) if counts and found else ""
