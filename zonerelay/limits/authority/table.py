"""The authority in memory: the books of all zones, and the holders that are there. No I/O.

After a start it may give nothing for `quiet` seconds, in which the holders of its previous run declare what
they have. An authority that knows that there are none passes no quiet time.
"""

from __future__ import annotations

from collections.abc import Callable

from zonerelay.limits.authority.book import Book
from zonerelay.limits.values import Answer, Request
from zonerelay.model.clock import Clock


class LimitTable:
    """`news(holder, zone)` is called when a holder ought to ask again."""

    def __init__(self, clock: Clock, *, quiet: float = 0.0) -> None:
        self._clock = clock
        self._quiet_until = clock.monotonic() + quiet
        self._books: dict[str, Book] = {}
        self._listeners: dict[str, Callable[[str], None]] = {}

    def enter(self, holder: str, news: Callable[[str], None]) -> None:
        """Adds a holder; of several under one name the last one counts."""
        self._listeners[holder] = news

    def leave(self, holder: str) -> None:
        """Removes a holder and frees all its units."""
        self._listeners.pop(holder, None)
        now = self._clock.monotonic()
        for zone, book in list(self._books.items()):
            self._tell(zone, book.end(holder, now, give=self._gives(now)))
            self._drop_empty(zone)

    def exchange(self, holder: str, zone: str, request: Request) -> Answer:
        now = self._clock.monotonic()
        book = self._books.setdefault(zone, Book())
        answer, news = book.exchange(holder, request, now, give=self._gives(now))
        self._tell(zone, news)
        self._drop_empty(zone)
        return answer

    def _gives(self, now: float) -> bool:
        return now >= self._quiet_until

    def _tell(self, zone: str, holders: set[str]) -> None:
        for holder in holders:
            listener = self._listeners.get(holder)
            if listener is not None:
                listener(zone)

    def _drop_empty(self, zone: str) -> None:
        if self._books[zone].is_empty:
            del self._books[zone]
