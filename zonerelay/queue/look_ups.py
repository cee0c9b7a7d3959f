"""Which domains' routes are asked for next. Pure.

A bounded number is under way. Domains of urgent mail come first; those of fresh mail and those of mail that
has been put off take turns (`rows.py`), so that a list for ten thousand domains does not stand before the
mail of others. A domain that waits already when fresh or urgent mail comes for it is put there as well.
"""

from __future__ import annotations

from zonerelay.model.priority import Priority
from zonerelay.queue.destinations import Unrouted
from zonerelay.queue.rows import Turns

AT_ONCE = 50


class LookUps:
    """Of one zone."""

    def __init__(self) -> None:
        self._waiting: Turns[Unrouted] = Turns()
        self._under_way = 0

    def want(self, line: Unrouted) -> None:
        """Something has come for the domain."""
        if line.is_looked_up:
            return
        if line.urgency is Priority.HIGH:
            if not line.is_hurried:
                line.is_hurried = True
                self._waiting.put_first(line)
        elif not line.sought or (line.has_fresh and not line.sought_fresh):
            line.sought_fresh = line.has_fresh
            self._waiting.append(line)
        line.sought = True

    def sort(self) -> None:
        """What was fresh may be backlog now."""
        for line in self._waiting.sort():
            line.sought_fresh = False

    def take(self) -> list[str]:
        """Domains to ask for now; each must end in `ended`."""
        domains: list[str] = []
        while self._waiting and self._under_way < AT_ONCE:
            line = self._waiting.pop()
            if line.is_looked_up:  # it stood in another place as well
                continue
            line.is_looked_up = True
            self._under_way += 1
            domains += line.domains
        return domains

    def ended(self) -> None:
        self._under_way -= 1

    @property
    def is_wanted(self) -> bool:
        return bool(self._waiting)

    @property
    def is_under_way(self) -> bool:
        return self._under_way > 0

    def clear(self) -> None:
        """Nothing waits any more."""
        self._waiting.clear()
