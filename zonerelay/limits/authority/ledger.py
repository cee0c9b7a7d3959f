"""The ledger of one zone: which holder has how many units, which wait for more, which give way. Pure.

- The ledger gives units as far as the limits of the zone and of the line allow. Lines at one site share it: a
  limit counts the units of all lines there whose limit is no larger. Holders may run different configurations
  for a moment; the smallest limit of a line, and of the zone, then counts.
- A free unit goes to the waiting line with the fewest units, among equals to the holder with the fewest, then
  to the line that has waited longest. A line whose site is full is passed over.
- When a limit is used up and a line waits, the holder that has at least two units more than the waiting
  holder surrenders units until both are equal (`Share`); the lines of one holder do the same among
  themselves. Where there are fewer units than waiting holders the units circulate: a holder keeps its only
  unit for `QUANTUM`.
- The ledger believes what a holder says it keeps, even beyond a limit, because those connections exist. It
  then gives nothing, and asks the excess (after a limit was lowered) back from the largest holdings.

Promise: units are given within the limits only, and no line waits for ever while units are given back. The
cost of a question grows with what has changed and with the lines that wait, not with what other holders have:
a worker may hold connections to thousands of destinations and ask hundreds of times a second.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from zonerelay.limits.values import Claim, Held


@dataclass(slots=True, eq=False)
class Entry:
    """The units of one holder in one line. `told`: units, surrender and pressed that the holder knows of."""

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
        """Units that are not asked back."""
        return self.units - self.surrender

    @property
    def is_news(self) -> bool:
        """The holder ought to ask: there is more for it, or others need what it has."""
        units, surrender, pressed = self.told
        return self.units != units or self.surrender > surrender or bool(self.pressed and not pressed)


@dataclass(slots=True, eq=False)
class Holder:
    """`until`: when what it has ends unless it is heard of. `pressed_told`: as it was told last. `unheard`:
    entries that may be otherwise than it was told.
    """

    name: str
    zone_limit: int = 0
    until: float = float("inf")
    units: int = 0
    pressed_told: int = 0
    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    unheard: dict[Entry, None] = field(default_factory=dict)


QUANTUM = 1.0
"""Seconds that a unit is left to a holder that has only this one."""

_Place = tuple[int, int, Entry]


class Share:
    """All units of a limit by holder, less those that are asked back. `mark` is told of each entry that
    surrenders.
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
        """Asks `wanted` units back for a line of one holder."""
        for more in range(wanted):
            other = self._richest(waiting.holder)
            if other is None:
                # No other holder has more: one of its own lines that has more gives way.
                if not self._take(waiting.holder, now, least=waiting.units + more + 1, spare=waiting):
                    return
            elif self._take(other, now, least=0, spare=None):
                self._held[waiting.holder] += 1
            else:
                return

    def _richest(self, than: Holder) -> Holder | None:
        """Returns the holder with the most units, if it has two more than `than`, or its only one while
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


MOST_AT_ONCE = 8
"""Units that are asked back for one who waits: there is a next time."""

ASKED_FOR = 50
"""Of those that wait for the zone's units so many have some asked back for them at once."""

MAX_WAITING = 200
"""Lines of one holder that wait in one zone: it asks for the others when some of these are served."""


class Ledger:
    """The ledger of one zone. Call `settle` after every change; it returns the holders that have news."""

    def __init__(self) -> None:
        self.holders: dict[str, Holder] = {}
        self.waiting: dict[Entry, None] = {}
        self.pressed = 0
        """How many wait because all of the zone's units are given away."""
        self._sites: dict[str, dict[str, dict[str, Entry]]] = {}
        self._marked: dict[Entry, None] = {}
        """With `surrender` or `pressed`."""
        self._suspects: dict[str, None] = {}
        """Sites of which too much may be held."""

    # What is said

    def enter(self, name: str, zone_limit: int, until: float) -> Holder:
        holder = self.holders.get(name)
        if holder is None:
            holder = self.holders[name] = Holder(name)
        holder.zone_limit = zone_limit
        holder.until = until
        return holder

    def claim(self, name: str, claim: Claim, now: float) -> None:
        """Takes in the claim of a holder that has entered."""
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
        """Returns the entry of a holder that has entered, a new one if there is none."""
        holder = self.holders[name]
        entry = holder.entries.get((site, line))
        if entry is None:
            entry = holder.entries[site, line] = Entry(holder, site, line)
            self._sites.setdefault(site, {}).setdefault(line, {})[name] = entry
            self._suspects[site] = None
        return entry

    def only(self, name: str, claims: Iterable[Claim]) -> None:
        """A holder has nothing but these: what was given to it meanwhile it has never heard of."""
        said = {(claim.site, claim.line) for claim in claims}
        for key, entry in list(self.holders[name].entries.items()):
            if key not in said:
                self._drop(entry)

    def end(self, name: str) -> None:
        """Removes a holder and everything it has."""
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
        # A line that has gone may have had a smaller limit, or shared another's.
        self._suspects[site] = None
        if not lines[entry.line]:
            del lines[entry.line]
            if not lines:
                del self._sites[site], self._suspects[site]

    # What follows

    def settle(self, now: float, *, give: bool = True, awake: float = float("-inf")) -> set[str]:
        """Gives the units that can be given and asks back those that must be. Returns the holders that have
        not heard of it yet. A holder whose `until` is before `awake` gets nothing: it may have died while it
        waited, and would keep the units of the others for its whole lease.
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
        """Returns what the holder does not know yet, and the entries of `keys` in any case (`None`: all).
        Empty entries are over with this.
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
        """Notes that units of the entry are asked back, or that other lines wait because of them."""
        self._marked[entry] = None
        entry.holder.unheard[entry] = None

    # Giving

    def _awake(self, awake: float) -> list[Entry]:
        """Those that wait and are heard of."""
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
        """Yields each limit that a unit of the line counts for, the units used of it, and the entries that
        use them.
        """
        lines = self._sites[entry.site]
        limits = _limits(lines)
        own = limits[entry.line]
        for limit in {limit for limit in limits.values() if limit >= own}:
            there = _up_to(limit, lines, limits)
            yield limit, sum(each.units for each in there), there

    # Runner back

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
        """Asks `count` units back, each from the entry that has most."""
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
    """What is held of the lines with this limit and smaller ones."""
    return [each for line, entries in lines.items() if limits[line] <= most for each in entries.values()]
