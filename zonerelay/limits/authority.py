"""Allocates the connection slots and send times of one zone to workers: who has how many, who waits, and who
must return some. Pure.

`Ledger` assigns units:

- It assigns units within the limits of the zone and of the line. Lines at one site share these: a limit
  counts the units of all lines there whose limit is no larger. For a moment holders may have different
  configurations; the smallest limit of a line, and of the zone, then applies.
- A free unit goes to the waiting line with the fewest units; among equals to the holder with the fewest, then
  to the line that has waited longest. A line whose site has no free unit is skipped.
- If a limit is used up and a line waits, a holder with at least two units more than the waiting holder must
  give units back until both are equal (`Share`). The lines of one holder do the same among themselves. If
  there are fewer units than waiting holders, the units circulate: a holder keeps its only unit for `QUANTUM`.
- A holder's declaration of what it keeps is accepted, even beyond a limit, because those connections exist.
  Then no unit is assigned, and the excess (after a limit was lowered) is reclaimed from the largest holdings.

Promise: units are assigned only within the limits, and no line waits for ever while units are given back. The
cost of a request grows with what has changed and with the waiting lines, not with what other holders have: a
worker may hold connections to thousands of destinations and send hundreds of requests per second.

`Book` is the state of one zone: its ledger of units, its calendars of turns, and their encoding. The same
code decides in every authority: in memory, behind a Unix socket, and over a row or a key that several
machines share. A `Calendar` holds the turns of the rates at one site, or of the whole zone, over all workers:

- Two turns of one line are at least one interval of that line apart. Two turns of different lines are at
  least the shorter of their intervals apart. So no line exceeds its own rate, and all lines together never
  exceed the fastest rate.
- Turns are assigned in the order of the requests. A turn may also be assigned in a gap between turns of a
  slower line.
- The calendar only assigns moments; the holder takes them in time (`worker/allowance.py`).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from zonerelay.limits.values import Answer, Claim, Held, Request, TurnAsk
from zonerelay.model.clock import Clock


@dataclass(slots=True, eq=False)
class Entry:
    """The connection slots of one worker for one destination. `told` is what the holder received last: its
    units, how many of them must be given back, and how many lines wait for them.
    """

    holder: Holder = field(repr=False)
    site: str
    line: str
    limit: int = 0
    units: int = 0
    want: int = 0
    since: float = 0.0
    surrender: int = 0
    pressed: int = 0
    told: tuple[int, int, int] = (0, 0, 0)

    @property
    def left(self) -> int:
        """The number of slots that are not being reclaimed."""
        return self.units - self.surrender

    @property
    def is_news(self) -> bool:
        """Whether the holder should send a request, because it has more slots, or others need its slots."""
        units, surrender, pressed = self.told
        return self.units != units or self.surrender > surrender or bool(self.pressed and not pressed)


@dataclass(slots=True, eq=False)
class Holder:
    """A worker that uses connection slots. `until` is when it loses everything unless it sends a request.
    `pressed_told` is the last value that it received. `unheard` are entries that may have changed since it
    received them.
    """

    name: str
    zone_limit: int = 0
    until: float = float("inf")
    units: int = 0
    pressed_told: int = 0
    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    unheard: dict[Entry, None] = field(default_factory=dict)


QUANTUM = 1.0
"""Seconds for which a holder keeps its only unit."""

_Place = tuple[int, int, Entry]


class Share:
    """The slots of one limit by worker, without those that are being reclaimed. `mark` is called with each
    entry that must give units back.
    """

    def __init__(self, entries: Iterable[Entry], mark: Callable[[Entry], None]) -> None:
        # The largest come first. A place may be out of date, because other shares take from the same entries.
        self._of: dict[Holder, list[_Place]] = {}
        self._held: Counter[Holder] = Counter()
        self._mark = mark
        for number, entry in enumerate(entries):
            self._of.setdefault(entry.holder, []).append((-entry.left, number, entry))
            self._held[entry.holder] += entry.left
        for places in self._of.values():
            heapq.heapify(places)

    def ask(self, waiting: Entry, wanted: int, now: float) -> None:
        """Reclaim `wanted` slots for a waiting entry."""
        for more in range(wanted):
            other = self._richest(waiting.holder)
            if other is None:
                # No other holder has more, so one of its own lines that has more gives way.
                if not self._take(waiting.holder, now, least=waiting.units + more + 1, spare=waiting):
                    return
            elif self._take(other, now, least=0, spare=None):
                self._held[waiting.holder] += 1
            else:
                return

    def _richest(self, than: Holder) -> Holder | None:
        """Return the holder with the most slots, if it has at least two more than `than`, or has one while
        `than` has none.
        """
        mine = self._held[than]
        other = max(
            (each for each in self._of if each is not than), key=lambda each: self._held[each], default=None
        )
        if other is None or (self._held[other] < mine + 2 and (mine or self._held[other] != 1)):
            return None
        return other

    def _take(self, holder: Holder, now: float, *, least: int, spare: Entry | None) -> bool:
        """Reclaim a slot from a holder's largest entry other than `spare`."""
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
        """Remove and return the first position that is up to date."""
        while places:
            negative, number, entry = place = heapq.heappop(places)
            if negative == -entry.left:
                return place
            heapq.heappush(places, (-entry.left, number, entry))
        return None


MOST_AT_ONCE = 8
"""Units that are reclaimed at once for one waiting line. More are reclaimed next time."""

ASKED_FOR = 50
"""The number of lines waiting for the zone's units for which units are reclaimed at the same time."""

MAX_WAITING = 200
"""Lines of one holder that may wait in one zone. The holder requests units for others when some of these are
served.
"""


class Ledger:
    """Allocates the connection slots of one zone. Call `settle` after every change; it returns the holders
    that have news.
    """

    def __init__(self) -> None:
        self.holders: dict[str, Holder] = {}
        self.waiting: dict[Entry, None] = {}
        self.pressed = 0
        """The number of lines that wait because all units of the zone are assigned."""
        self._sites: dict[str, dict[str, dict[str, Entry]]] = {}
        self._marked: dict[Entry, None] = {}
        """Entries with `surrender` or `pressed`."""
        self._suspects: dict[str, None] = {}
        """Sites at which too many units may be held."""

    # Declarations

    def enter(self, name: str, zone_limit: int, until: float) -> Holder:
        holder = self.holders.get(name)
        if holder is None:
            holder = self.holders[name] = Holder(name)
        holder.zone_limit = zone_limit
        holder.until = until
        return holder

    def claim(self, name: str, claim: Claim, now: float) -> None:
        """Apply the claim of a holder that has entered."""
        entry = self.entry(name, claim.site, claim.line)
        units = max(entry.units - claim.back, claim.keep)
        entry.holder.units += units - entry.units
        if units > entry.units:
            entry.since = now
        entry.units = units
        entry.limit = claim.limit
        entry.want = claim.want
        if entry.want <= units or claim.back:
            self.waiting.pop(entry, None)
        if entry.want > units:
            self.waiting.setdefault(entry)
        self._suspects[claim.site] = None

    def entry(self, name: str, site: str, line: str) -> Entry:
        """Return the entry of a holder that has entered, creating it if needed."""
        holder = self.holders[name]
        entry = holder.entries.get((site, line))
        if entry is None:
            entry = holder.entries[site, line] = Entry(holder, site, line)
            self._sites.setdefault(site, {}).setdefault(line, {})[name] = entry
            self._suspects[site] = None
        return entry

    def only(self, name: str, claims: Iterable[Claim]) -> None:
        """Remove all entries of a holder except the claimed ones. It never received what was assigned to it
        in between.
        """
        said = {(claim.site, claim.line) for claim in claims}
        for key, entry in list(self.holders[name].entries.items()):
            if key not in said:
                self._drop(entry)

    def end(self, name: str) -> None:
        """Remove a holder and everything it has."""
        holder = self.holders.get(name)
        if holder is not None:
            for entry in list(holder.entries.values()):
                self._drop(entry)
            del self.holders[name]

    def expire(self, now: float) -> None:
        for name in [name for name, holder in self.holders.items() if holder.until <= now]:
            self.end(name)

    def _drop(self, entry: Entry) -> None:
        holder, site = entry.holder, entry.site
        del holder.entries[site, entry.line]
        holder.units -= entry.units
        holder.unheard.pop(entry, None)
        self.waiting.pop(entry, None)
        self._marked.pop(entry, None)
        lines = self._sites[site]
        del lines[entry.line][holder.name]
        # A line that was removed may have had a smaller limit, or shared that of another line.
        self._suspects[site] = None
        if not lines[entry.line]:
            del lines[entry.line]
            if not lines:
                del self._sites[site], self._suspects[site]

    # Decisions

    def settle(self, now: float, *, give: bool = True, awake: float = float("-inf")) -> set[str]:
        """Assign free slots, and reclaim those that exceed a limit or that others need more. Return the
        holders that have not been notified yet. A holder whose `until` is before `awake` gets nothing: it may
        have died while it waited, and would keep the units from the others for its whole lease.
        """
        if give:
            self._give(now, awake)
        self.pressed = 0
        for entry in self._marked:
            entry.surrender = entry.pressed = 0
            entry.holder.unheard[entry] = None
        self._marked.clear()
        self._ask_back_excess()
        if self.waiting:
            self._ask_back(now, awake)
        return {name for name, holder in self.holders.items() if self._has_news(holder)}

    def tell(self, name: str, keys: Iterable[tuple[str, str]] | None) -> list[Held]:
        """Return the entries that the holder does not know yet, and those of `keys` in any case (all if
        None). Empty entries are removed.
        """
        holder = self.holders[name]
        asked = dict.fromkeys(holder.entries if keys is None else keys)
        told = [entry for key in asked if (entry := holder.entries.get(key)) is not None]
        told += [entry for entry in holder.unheard if (entry.site, entry.line) not in asked]
        found = []
        for entry in told:
            now = (entry.units, entry.surrender, entry.pressed)
            if now != entry.told or (entry.site, entry.line) in asked:
                entry.told = now
                found.append(Held(entry.site, entry.line, *now))
            if not entry.units and not entry.want:
                self._drop(entry)
        holder.unheard.clear()
        holder.pressed_told = self.pressed
        if not holder.entries:
            del self.holders[name]
        return found

    def _has_news(self, holder: Holder) -> bool:
        if holder.units and self.pressed and not holder.pressed_told:
            return True
        return any(entry.is_news for entry in holder.unheard)

    def _mark(self, entry: Entry) -> None:
        """Mark an entry whose slots are reclaimed, or whose slots others wait for."""
        self._marked[entry] = None
        entry.holder.unheard[entry] = None

    # Assigning

    def _awake(self, awake: float) -> list[Entry]:
        """Return the waiting entries of holders that have been active recently."""
        return [entry for entry in self.waiting if entry.holder.until >= awake]

    def _give(self, now: float, awake: float) -> None:
        left = self._zone_limit() - self._in_use() if self.waiting else 0
        if left <= 0:
            return
        queue = [(*_rank(entry), number, entry) for number, entry in enumerate(self._awake(awake))]
        heapq.heapify(queue)
        while queue and left > 0:
            units, holds, number, entry = heapq.heappop(queue)
            if (units, holds) != _rank(entry):
                heapq.heappush(queue, (*_rank(entry), number, entry))
                continue
            if any(used >= most for most, used, _ in self._at_site(entry)):
                continue
            entry.units += 1
            entry.since = now
            entry.holder.units += 1
            entry.holder.unheard[entry] = None
            left -= 1
            if entry.units < entry.want:
                heapq.heappush(queue, (*_rank(entry), number, entry))
            else:
                del self.waiting[entry]

    def _zone_limit(self) -> int:
        return min((holder.zone_limit for holder in self.holders.values() if holder.entries), default=0)

    def _in_use(self) -> int:
        return sum(holder.units for holder in self.holders.values())

    def _at_site(self, entry: Entry) -> Iterator[tuple[int, int, list[Entry]]]:
        """Yield each limit that applies to a slot of the entry, the slots used of it, and the entries that
        use them.
        """
        lines = self._sites[entry.site]
        limits = _limits(lines)
        own = limits[entry.line]
        for limit in {limit for limit in limits.values() if limit >= own}:
            there = _up_to(limit, lines, limits)
            yield limit, sum(each.units for each in there), there

    # Reclaiming

    def _ask_back_excess(self) -> None:
        excess = self._in_use() - self._zone_limit()
        if excess > 0:
            everywhere = [each for holder in self.holders.values() for each in holder.entries.values()]
            self._surrender(everywhere, excess)
        for site in list(self._suspects):
            lines = self._sites[site]
            limits = _limits(lines)
            found = False
            for most in sorted(set(limits.values())):
                there = _up_to(most, lines, limits)
                found = found or sum(each.units for each in there) > most
                excess = sum(each.left for each in there) - most
                if excess > 0:
                    self._surrender(there, excess)
            if not found:
                del self._suspects[site]

    def _surrender(self, entries: Collection[Entry], count: int) -> None:
        """Reclaim `count` slots, each from the entry with the most slots."""
        for _ in range(count):
            entry = max(entries, key=lambda each: each.left)
            entry.surrender += 1
            self._mark(entry)

    def _ask_back(self, now: float, awake: float) -> None:
        waiting = self._awake(awake)
        everywhere: Share | None = None
        if self._in_use() >= self._zone_limit():
            self.pressed = len(waiting)
            everywhere = Share(
                (each for holder in self.holders.values() for each in holder.entries.values() if each.units),
                self._mark,
            )
        for number, entry in enumerate(waiting):
            wanted = min(entry.want - entry.units, MOST_AT_ONCE)
            if everywhere is not None and number < ASKED_FOR:
                everywhere.ask(entry, wanted, now)
            for most, used, there in self._at_site(entry):
                if used < most:
                    continue
                for other in there:
                    other.pressed += 1
                    self._mark(other)
                Share(there, self._mark).ask(entry, wanted, now)


def _rank(entry: Entry) -> tuple[int, int]:
    return entry.units, entry.holder.units


def _limits(lines: dict[str, dict[str, Entry]]) -> dict[str, int]:
    return {line: min(each.limit for each in entries.values()) for line, entries in lines.items()}


def _up_to(most: int, lines: dict[str, dict[str, Entry]], limits: dict[str, int]) -> list[Entry]:
    """Return the entries with this limit or a smaller one."""
    return [each for line, entries in lines.items() if limits[line] <= most for each in entries.values()]


LAST_KEPT = 10.0
"""The minimum time in seconds for which the last turn is kept, because a rate that has just become slower is
measured from it.
"""

_ROUNDING = 1e-6
"""Sums of clock readings are not more exact than this."""


class Turn(Struct, frozen=True, array_like=True, order=True):
    """An assigned send time of a rate. `at` is a reading of the authority's clock."""

    at: float
    interval: float
    line: str


class Calendar:
    """The assigned send times in order, without those that are too old to delay a later one."""

    def __init__(self, turns: list[Turn] | None = None) -> None:
        self.turns = turns or []
        self._longest = max((turn.interval for turn in self.turns), default=0.0)

    @property
    def binds_until(self) -> float:
        return self.turns[-1].at + self._longest if self.turns else float("-inf")

    def earliest(self, at: float, interval: float, line: str) -> float:
        """Return the first possible send time at or after `at`."""
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
        # This includes turns assigned before this calendar was created, which delay later ones like any
        # other.
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
"""The maximum number of turns in one answer to one request."""

SILENT = 2.0
"""Seconds. A waiting holder sends requests more often than this. One that is silent for longer gets nothing
until it sends one.
"""

ZONE = ""
"""The name of the zone's own calendar, next to those of its sites."""


class Book:
    """The shared limits of one zone: its connection slots and its send times."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.calendars: dict[str, Calendar] = {}

    def exchange(
        self, name: str, request: Request, now: float, *, until: float = float("inf"), give: bool = True
    ) -> tuple[Answer, set[str]]:
        """Return the response for the holder `name`, and the other holders that should send a request. If
        `give` is false, nothing is assigned to any holder.
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
        """Remove a holder. Return the holders that should send a request."""
        self.ledger.end(name)
        return self.ledger.settle(now, give=give)

    @property
    def is_empty(self) -> bool:
        return not self.ledger.holders and not self.calendars

    @property
    def binds_until(self) -> float:
        """The time until which the assigned send times restrict later ones."""
        return max((calendar.binds_until for calendar in self.calendars.values()), default=float("-inf"))

    # Turns

    def _declare(self, ask: TurnAsk, moments: tuple[float, ...]) -> None:
        """Add send times that were assigned before a restart, unless they are already known."""
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
        """Return the first send time that is possible for both the site and the zone."""
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

    # Encoding

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
        """Decode the stored limits of a zone. No data is an empty book. Raise ValueError."""
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
            # What is to be given back is not stored, and is determined again.
            entry.holder.unheard[entry] = None
        ledger.waiting = {ledger.entry(*each): None for each in written.waiting}
        book.calendars = {site: Calendar(turns) for site, turns in written.turns.items()}
        return book


class _Written(msgspec.Struct, frozen=True, array_like=True):
    """The stored form of a zone's limits. New fields may only be appended, with defaults, because nodes of
    several versions read it.
    """

    holders: list[tuple[str, int, float, int]]
    entries: list[tuple[str, str, str, int, int, int, float, tuple[int, int, int]]]
    waiting: list[tuple[str, str, str]]
    turns: dict[str, list[Turn]]


# The authority in memory: the books of all zones, and the connected holders. No I/O.
#
# After a start it can assign nothing for `quiet` seconds, during which the holders of its previous run
# declare what they have. An authority that has no previous holders needs no quiet time.


class LimitTable:
    """The shared limits of all zones, in memory. `news(holder, zone)` is called when a holder should send a
    request.
    """

    def __init__(self, clock: Clock, *, quiet: float = 0.0) -> None:
        self._clock = clock
        self._quiet_until = clock.monotonic() + quiet
        self._books: dict[str, Book] = {}
        self._listeners: dict[str, Callable[[str], None]] = {}

    def enter(self, holder: str, news: Callable[[str], None]) -> None:
        """Add a holder and its callback. If several use one name, the last one counts."""
        self._listeners[holder] = news

    def leave(self, holder: str) -> None:
        """Remove a holder and free all its slots."""
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
