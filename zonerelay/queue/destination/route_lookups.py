"""The look-ups of routes: which domains are asked for next. Pure.

A bounded number of look-ups is under way. Domains of urgent mail come first; those of fresh mail and those of
mail that has been put off alternate (`order.py`), so that a list for ten thousand domains does not stand
before the mail of others. A domain that waits already when fresh or urgent mail comes for it is put there as
well.
"""

from __future__ import annotations

from collections import OrderedDict

from zonerelay.model.queue_name import Priority
from zonerelay.queue.destination.destinations import Unrouted
from zonerelay.queue.destination.order import FairQueue

AT_ONCE = 50
AGAIN_AT_ONCE = AT_ONCE // 5

KNOWN = 10_000
"""Domains without a route that are remembered."""


class LookUps:
    """The look-ups of one zone."""

    def __init__(self) -> None:
        self._waiting: FairQueue[Unrouted] = FairQueue()
        self._under_way = 0
        self._failed: OrderedDict[str, None] = OrderedDict()
        """Domains whose last look-up brought no route."""
        self._again: dict[Unrouted, None] = {}
        self._again_under_way: set[str] = set()

    def want(self, line: Unrouted) -> None:
        """Mail has come for the domain of the line."""
        if line.is_looked_up:
            return
        if not self._failed.keys().isdisjoint(line.domains):
            self._again[line] = None
        elif line.urgency is Priority.HIGH:
            if not line.is_hurried:
                line.is_hurried = True
                self._waiting.put_first(line)
        elif not line.sought or (line.has_fresh and not line.sought_fresh):
            line.sought_fresh = line.has_fresh
            self._waiting.append(line)
        line.sought = True

    def sort(self) -> None:
        """Sorts anew: fresh mail may be backlog now."""
        for line in self._waiting.sort():
            line.sought_fresh = False

    def take(self) -> list[str]:
        """Domains to ask for now; each must end in `ended`."""
        domains: list[str] = []
        while self._again and self._under_way < AT_ONCE and len(self._again_under_way) < AGAIN_AT_ONCE:
            line = next(iter(self._again))
            del self._again[line]
            self._begin(line, domains)
            self._again_under_way.update(line.domains)
        while self._waiting and self._under_way < AT_ONCE:
            line = self._waiting.pop()
            if not line.is_looked_up:  # it may have stood in another place as well
                self._begin(line, domains)
        return domains

    def _begin(self, line: Unrouted, domains: list[str]) -> None:
        line.is_looked_up = True
        self._under_way += 1
        domains += line.domains

    def ended(self, domain: str, *, found: bool) -> None:
        self._under_way -= 1
        self._again_under_way.discard(domain)
        if found:
            self._failed.pop(domain, None)
            return
        self._failed[domain] = None
        if len(self._failed) > KNOWN:
            self._failed.popitem(last=False)

    @property
    def is_wanted(self) -> bool:
        return bool(self._waiting or self._again)

    def clear(self) -> None:
        """Forgets the domains that wait."""
        self._waiting.clear()
        self._again.clear()
