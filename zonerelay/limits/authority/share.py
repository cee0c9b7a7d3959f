"""Who is to give way where the units of one limit are used up. Pure.

Who holds more of it than the one who waits, by two or more, surrenders until they are equal; and so do a
holder's own lines. Where there are fewer units than wishes they go round: who has one gives way after
`QUANTUM`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable

from zonerelay.limits.authority.entries import Entry, Holder

QUANTUM = 1.0
"""Seconds that a unit is left to a holder that has only this one."""

_Place = tuple[int, int, Entry]


class Share:
    """All units of the limit, and who has how many of them, less what is asked back. `mark` is told of each
    entry that surrenders.
    """

    def __init__(self, entries: Iterable[Entry], mark: Callable[[Entry], None]) -> None:
        # What has most is first. A place may be out of date: others take from the same entries.
        self._of: dict[Holder, list[_Place]] = {}
        self._held: Counter[Holder] = Counter()
        self._mark = mark
        for number, entry in enumerate(entries):
            self._of.setdefault(entry.holder, []).append((-entry.left, number, entry))
            self._held[entry.holder] += entry.left
        for places in self._of.values():
            heapq.heapify(places)

    def ask(self, waiting: Entry, wanted: int, now: float) -> None:
        """So many for a line of one holder."""
        for more in range(wanted):
            other = self._richest(waiting.holder)
            if other is None:
                # Nobody has more: then one of its own lines that has.
                if not self._take(waiting.holder, now, least=waiting.units + more + 1, spare=waiting):
                    return
            elif self._take(other, now, least=0, spare=None):
                self._held[waiting.holder] += 1
            else:
                return

    def _richest(self, than: Holder) -> Holder | None:
        """Who has two more; or the only one, where the other has none."""
        mine = self._held[than]
        other = max(
            (each for each in self._of if each is not than), key=lambda each: self._held[each], default=None
        )
        if other is None or (self._held[other] < mine + 2 and (mine or self._held[other] != 1)):
            return None
        return other

    def _take(self, holder: Holder, now: float, *, least: int, spare: Entry | None) -> bool:
        """One unit of a holder's richest line but `spare`."""
        places = self._of.get(holder, [])
        kept = self._pop(places)
        place = kept
        if kept is not None and kept[2] is spare:
            place = self._pop(places)
            heapq.heappush(places, kept)
        if place is None:
            return False
        _, number, entry = place
        left = entry.left
        is_due = left > 1 or now - entry.since >= QUANTUM
        if left <= 0 or (least and left < least + (least > 1)) or not is_due:
            heapq.heappush(places, place)
            return False
        entry.surrender += 1
        self._mark(entry)
        heapq.heappush(places, (-entry.left, number, entry))
        self._held[holder] -= 1
        return True

    @staticmethod
    def _pop(places: list[_Place]) -> _Place | None:
        """The first that is up to date."""
        while places:
            negative, number, entry = place = heapq.heappop(places)
            if negative == -entry.left:
                return place
            heapq.heappush(places, (-entry.left, number, entry))
        return None
