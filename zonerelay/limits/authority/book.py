"""The book of one zone: its ledger of units, its calendars of turns, and their written form. Pure.

The same code decides in every authority: in memory, behind a Unix socket, and over a row or a key that
several machines share. A calendar holds the turns of the rates at one site, or of the whole zone, over all
workers:

- Two turns of one line are at least an interval of that line apart; two turns of different lines are apart by
  the shorter of their intervals. So no line exceeds its own rate, and all lines together never exceed the
  fastest rate.
- The authority gives turns in the order of the requests. It also gives a turn that fits into a gap between
  turns of a slower line.
- The calendar only assigns moments; the holder takes them in time (`worker/turns`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

import msgspec
from msgspec import Struct

from zonerelay.limits.authority.ledger import Ledger
from zonerelay.limits.values import Answer, Request, TurnAsk
from zonerelay.model.clock import Clock

LAST_KEPT = 10.0
"""Seconds that the last turn is known at least: a rate that has just become slower counts from it."""

_ROUNDING = 1e-6
"""Sums of clock readings are no more exact than this."""


class Turn(Struct, frozen=True, array_like=True, order=True):
    """`at` is a reading of the authority's clock."""

    at: float
    interval: float
    line: str


class Calendar:
    """Turns in their order, without those that are too old to bind a later one."""

    def __init__(self, turns: list[Turn] | None = None) -> None:
        self.turns = turns or []
        self._longest = max((turn.interval for turn in self.turns), default=0.0)

    @property
    def binds_until(self) -> float:
        return self.turns[-1].at + self._longest if self.turns else float("-inf")

    def earliest(self, at: float, interval: float, line: str) -> float:
        """The first moment from `at` on that a turn may have."""
        self._longest = max(self._longest, interval)
        turns = self.turns
        index = bisect_left(turns, at - self._longest, key=_moment)
        while index < len(turns) and turns[index].at < at + self._longest:
            turn = turns[index]
            apart = interval if turn.line == line else min(interval, turn.interval)
            index += 1
            if abs(turn.at - at) < apart - _ROUNDING:
                at = turn.at + apart
                index = bisect_left(turns, at - self._longest, key=_moment)
        return at

    def add(self, at: float, interval: float, line: str) -> None:
        # Also of one that was given before this calendar was begun: it binds as long as any other.
        self._longest = max(self._longest, interval)
        insort(self.turns, Turn(at, interval, line))

    def has(self, at: float, line: str) -> bool:
        return any(turn.at == at and turn.line == line for turn in self.turns)

    def remove(self, at: float) -> None:
        self.turns = [turn for turn in self.turns if turn.at != at]

    def forget(self, now: float) -> None:
        old = bisect_left(self.turns, now - self._longest, key=_moment)
        if old == len(self.turns) and old and self.turns[-1].at > now - LAST_KEPT:
            old -= 1
        del self.turns[:old]
        if not self.turns:
            self._longest = 0.0


def _moment(turn: Turn) -> float:
    return turn.at


MAX_TURNS = 200
"""Turns that are given in one answer to one question."""

SILENT = 2.0
"""Seconds. A holder that waits asks again more often; one that is silent for longer gets nothing until it
asks.
"""

ZONE = ""
"""The name of the zone's own calendar, among those of its sites."""


class Book:
    def __init__(self) -> None:
        self.ledger = Ledger()
        self.calendars: dict[str, Calendar] = {}

    def exchange(
        self, name: str, request: Request, now: float, *, until: float = float("inf"), give: bool = True
    ) -> tuple[Answer, set[str]]:
        """Returns the answer for the holder `name`, and the other holders that ought to ask again. With
        `give` false no holder gets anything.
        """
        ledger = self.ledger
        ledger.expire(now)
        ledger.enter(name, request.zone_limit, until)
        for claim in request.claims:
            ledger.claim(name, claim, now)
        if request.everything:
            ledger.only(name, request.claims)
        news = ledger.settle(now, give=give, awake=until - SILENT)
        for site, at in request.unused:
            self._take_back(site, at)
        for ask, moments in request.known_turns:
            self._declare(ask, moments)
        turns = tuple(self._turns(ask, now) if give else () for ask in request.turns)
        said = None if request.everything else ((claim.site, claim.line) for claim in request.claims)
        holders = len(ledger.holders)
        held = tuple(ledger.tell(name, said))
        return Answer(now, held, turns, ledger.pressed, holders), news - {name}

    def end(self, name: str, now: float, *, give: bool = True) -> set[str]:
        """Removes a holder. Returns the holders that ought to ask again."""
        self.ledger.end(name)
        return self.ledger.settle(now, give=give)

    @property
    def is_empty(self) -> bool:
        return not self.ledger.holders and not self.calendars

    @property
    def binds_until(self) -> float:
        """When the last of its turns is over."""
        return max((calendar.binds_until for calendar in self.calendars.values()), default=float("-inf"))

    # Turns

    def _declare(self, ask: TurnAsk, moments: tuple[float, ...]) -> None:
        """Enters turns that were given before this book was begun; those that are in it stay."""
        for at in moments:
            name, line = (ask.site, ask.line) if ask.interval else (ZONE, ZONE)
            if not self._calendar(name).has(at, line):
                self._add(ask, at)

    def _turns(self, ask: TurnAsk, now: float) -> tuple[float, ...]:
        for calendar in self.calendars.values():
            calendar.forget(now)
        self.calendars = {site: calendar for site, calendar in self.calendars.items() if calendar.turns}
        found: list[float] = []
        at = now + ask.after
        while len(found) < min(ask.count, MAX_TURNS):
            at = self._earliest(ask, at)
            self._add(ask, at)
            found.append(at)
        return tuple(found)

    def _earliest(self, ask: TurnAsk, at: float) -> float:
        """The first moment that the site and the zone both have."""
        while True:
            before = at
            if ask.interval:
                at = self._calendar(ask.site).earliest(at, ask.interval, ask.line)
            if ask.zone_interval:
                at = self._calendar(ZONE).earliest(at, ask.zone_interval, ZONE)
            if at == before:
                return at

    def _add(self, ask: TurnAsk, at: float) -> None:
        if ask.interval:
            self._calendar(ask.site).add(at, ask.interval, ask.line)
        if ask.zone_interval:
            self._calendar(ZONE).add(at, ask.zone_interval, ZONE)

    def _take_back(self, site: str, at: float) -> None:
        for name in (site, ZONE):
            calendar = self.calendars.get(name)
            if calendar is not None:
                calendar.remove(at)

    def _calendar(self, name: str) -> Calendar:
        return self.calendars.setdefault(name, Calendar())

    # Written down

    def encode(self) -> bytes:
        ledger = self.ledger
        return msgspec.msgpack.encode(
            _Written(
                holders=[
                    (name, holder.zone_limit, holder.until, holder.pressed_told)
                    for name, holder in ledger.holders.items()
                ],
                entries=[
                    (name, *key, each.limit, each.units, each.want, each.since, each.told)
                    for name, holder in ledger.holders.items()
                    for key, each in holder.entries.items()
                ],
                waiting=[(each.holder.name, each.site, each.line) for each in ledger.waiting],
                turns={site: calendar.turns for site, calendar in self.calendars.items()},
            )
        )

    @classmethod
    def decode(cls, data: bytes | None) -> Book:
        """Decodes a book; no data is an empty book. Raises ValueError."""
        book = cls()
        if not data:
            return book
        written = msgspec.msgpack.decode(data, type=_Written)
        ledger = book.ledger
        for name, zone_limit, until, pressed in written.holders:
            ledger.enter(name, zone_limit, until).pressed_told = pressed
        for name, site, line, limit, units, want, since, told in written.entries:
            entry = ledger.entry(name, site, line)
            entry.limit, entry.units, entry.want, entry.since, entry.told = limit, units, want, since, told
            entry.holder.units += units
            # What was asked back is not written down, and is found out anew.
            entry.holder.unheard[entry] = None
        ledger.waiting = {ledger.entry(*each): None for each in written.waiting}
        book.calendars = {site: Calendar(turns) for site, turns in written.turns.items()}
        return book


class _Written(msgspec.Struct, frozen=True, array_like=True):
    """Fields may be added behind the others, with defaults: nodes of several versions read it."""

    holders: list[tuple[str, int, float, int]]
    entries: list[tuple[str, str, str, int, int, int, float, tuple[int, int, int]]]
    waiting: list[tuple[str, str, str]]
    turns: dict[str, list[Turn]]


# The authority in memory: the books of all zones, and the holders that are there. No I/O.
#
# After a start it may give nothing for `quiet` seconds, in which the holders of its previous run declare what
# they have. An authority that knows that there are none passes no quiet time.


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
