"""Who holds how many units of one zone, who waits for more, and who is to give way. Pure: `now` is handed in.

- Units are given as long as the zone's limit and the line's allow. Lines at one site share it: a limit counts
  the units of all lines there whose limit is no larger. Holders may go by different configurations for a
  moment: of one line, and of the zone, the smallest limit counts.
- A unit goes to the line that has fewest of those that wait, then to the holder that has fewest, then to who
  has waited longest. One whose site is full is passed by those whose is not.
- Somebody waits and a limit is used up: who holds more of it than the one who waits, by two or more, is told
  to surrender until they are equal; and so are a holder's own lines. Where there are fewer units than wishes
  they go round: who has one gives way after `QUANTUM`.
- What a holder says it keeps is believed even beyond a limit: those connections exist. Nothing is given then,
  and what is too much (a limit has been lowered) is asked back from whoever has most, also if nobody waits.

Promise: units are only ever given within the limits, and no one waits for ever while units are given back.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from zonerelay.limits.values import Claim, Held

QUANTUM = 1.0
"""Seconds that a unit is left to a holder that has only this one."""

MOST_AT_ONCE = 8
"""Units that are asked back for one who waits: there is a next time."""

MAX_WAITING = 200
"""Lines of one holder that wait in one zone: it asks for the others when some of these are served."""


@dataclass(slots=True)
class Entry:
    """What one holder has of one line. `told`: as the holder was told last."""

    limit: int = 0
    units: int = 0
    want: int = 0
    since: float = 0.0
    surrender: int = 0
    pressed: int = 0
    told: tuple[int, int, int] = (0, 0, 0)


@dataclass(slots=True)
class Holder:
    """`until`: when what it has ends unless it is heard of. `pressed_told`: as it was told last."""

    zone_limit: int = 0
    until: float = float("inf")
    units: int = 0
    pressed_told: int = 0
    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)


Waiting = tuple[str, str, str]


class Ledger:
    """One zone's. Call `settle` after every change; who must look again then is in its answer."""

    def __init__(self) -> None:
        self.holders: dict[str, Holder] = {}
        self.sites: dict[str, dict[str, dict[str, Entry]]] = {}
        self.waiting: dict[Waiting, None] = {}
        self.pressed = 0
        """How many wait because all of the zone's units are given away."""

    # What is said

    def enter(self, name: str, zone_limit: int, until: float) -> Holder:
        holder = self.holders.get(name)
        if holder is None:
            holder = self.holders[name] = Holder()
        holder.zone_limit = zone_limit
        holder.until = until
        return holder

    def claim(self, name: str, claim: Claim, now: float) -> None:
        """Of a holder that has entered."""
        holder = self.holders[name]
        key = (claim.site, claim.line)
        entry = holder.entries.get(key)
        if entry is None:
            entry = holder.entries[key] = Entry()
            self.sites.setdefault(claim.site, {}).setdefault(claim.line, {})[name] = entry
        units = max(entry.units - claim.back, claim.keep)
        holder.units += units - entry.units
        if units > entry.units:
            entry.since = now
        entry.units = units
        entry.limit = claim.limit
        entry.want = claim.want
        waiting = (name, *key)
        if entry.want <= units or claim.back:
            self.waiting.pop(waiting, None)
        if entry.want > units:
            self.waiting.setdefault(waiting)

    def only(self, name: str, claims: Iterable[Claim]) -> None:
        """A holder has nothing but these: what was given to it meanwhile it has never heard of."""
        said = {(claim.site, claim.line) for claim in claims}
        for key in [key for key in self.holders[name].entries if key not in said]:
            self._drop(name, key)

    def end(self, name: str) -> None:
        """A holder is gone."""
        holder = self.holders.get(name)
        if holder is not None:
            for key in list(holder.entries):
                self._drop(name, key)
            del self.holders[name]

    def expire(self, now: float) -> None:
        for name in [name for name, holder in self.holders.items() if holder.until <= now]:
            self.end(name)

    def _drop(self, name: str, key: tuple[str, str]) -> None:
        holder = self.holders[name]
        holder.units -= holder.entries.pop(key).units
        site, line = key
        self.waiting.pop((name, site, line), None)
        lines = self.sites[site]
        del lines[line][name]
        if not lines[line]:
            del lines[line]
            if not lines:
                del self.sites[site]

    # What follows

    def settle(self, now: float, *, give: bool = True) -> set[str]:
        """Give what can be given, ask back what must be. Returns holders that have not heard of it yet."""
        if give:
            self._give(now)
        self.pressed = 0
        for holder in self.holders.values():
            for entry in holder.entries.values():
                entry.surrender = entry.pressed = 0
        self._ask_back_excess()
        if self.waiting:
            self._ask_back(now)
        return {name for name in self.holders if self._has_news(name)}

    def tell(self, name: str, keys: Iterable[tuple[str, str]] | None) -> list[Held]:
        """What the holder does not know yet, and of `keys` in any case (`None`: all). Empty entries are over
        with this.
        """
        holder = self.holders[name]
        wanted = None if keys is None else set(keys)
        found = []
        for key, entry in list(holder.entries.items()):
            now = (entry.units, entry.surrender, entry.pressed)
            if wanted is None or now != entry.told or key in wanted:
                entry.told = now
                found.append(Held(*key, *now))
            if not entry.units and not entry.want:
                self._drop(name, key)
        holder.pressed_told = self.pressed
        if not holder.entries:
            del self.holders[name]
        return found

    def _has_news(self, name: str) -> bool:
        holder = self.holders[name]
        if holder.units and self.pressed and not holder.pressed_told:
            return True
        for entry in holder.entries.values():
            units, surrender, pressed = entry.told
            if entry.units != units or entry.surrender > surrender or (entry.pressed and not pressed):
                return True
        return False

    # Giving

    def _give(self, now: float) -> None:
        queue = [self._rank(waiting, number) for number, waiting in enumerate(self.waiting)]
        heapq.heapify(queue)
        left = self._zone_limit() - self._in_use() if queue else 0
        while queue and left > 0:
            rank = heapq.heappop(queue)
            waiting = rank[3]
            name, site, line = waiting
            entry = self.sites[site][line][name]
            if rank != (current := self._rank(waiting, rank[2])):
                heapq.heappush(queue, current)
                continue
            if any(used >= most for most, used, _ in self._at_site(site, line)):
                continue
            entry.units += 1
            entry.since = now
            self.holders[name].units += 1
            left -= 1
            if entry.units < entry.want:
                heapq.heappush(queue, self._rank(waiting, rank[2]))
            else:
                del self.waiting[waiting]

    def _rank(self, waiting: Waiting, number: int) -> tuple[int, int, int, Waiting]:
        name, site, line = waiting
        return self.sites[site][line][name].units, self.holders[name].units, number, waiting

    def _zone_limit(self) -> int:
        return min((holder.zone_limit for holder in self.holders.values() if holder.entries), default=0)

    def _in_use(self) -> int:
        return sum(holder.units for holder in self.holders.values())

    def _at_site(self, site: str, line: str) -> Iterator[tuple[int, int, list[str]]]:
        """What a unit of the line counts for there: a limit, what is used of it, the lines that share it."""
        lines = self.sites[site]
        limits = {each: min(entry.limit for entry in entries.values()) for each, entries in lines.items()}
        own = limits[line]
        for limit in {limit for limit in limits.values() if limit >= own}:
            together = [each for each in lines if limits[each] <= limit]
            yield limit, sum(entry.units for each in together for entry in lines[each].values()), together

    # Asking back

    def _ask_back_excess(self) -> None:
        excess = self._in_use() - self._zone_limit()
        if excess > 0:
            _surrender([each for holder in self.holders.values() for each in holder.entries.values()], excess)
        for lines in self.sites.values():
            if _is_within(lines):
                continue
            limits = {line: min(each.limit for each in entries.values()) for line, entries in lines.items()}
            for most in sorted(set(limits.values())):
                there = [
                    each
                    for line, entries in lines.items()
                    if limits[line] <= most
                    for each in entries.values()
                ]
                excess = sum(each.units - each.surrender for each in there) - most
                if excess > 0:
                    _surrender(there, excess)

    def _ask_back(self, now: float) -> None:
        zone_is_full = self._in_use() >= self._zone_limit()
        everywhere = Share(
            (name, key, entry)
            for name, holder in self.holders.items()
            for key, entry in holder.entries.items()
            if entry.units and zone_is_full
        )
        for name, site, line in self.waiting:
            entry = self.sites[site][line][name]
            wanted = min(entry.want - entry.units, MOST_AT_ONCE)
            if zone_is_full:
                self.pressed += 1
                everywhere.ask(name, (site, line), wanted, now)
            for most, used, together in self._at_site(site, line):
                if used < most:
                    continue
                there = [
                    (holder, (site, each), other)
                    for each in together
                    for holder, other in self.sites[site][each].items()
                ]
                for _, _, other in there:
                    other.pressed += 1
                Share(there).ask(name, (site, line), wanted, now)


def _is_within(lines: dict[str, dict[str, Entry]]) -> bool:
    """All of a site's together are no more than its smallest limit: so it is nearly everywhere, and this is
    asked of every site at every question.
    """
    used, least = 0, float("inf")
    for entries in lines.values():
        for entry in entries.values():
            used += entry.units
            least = min(least, entry.limit)
    return used <= least


def _surrender(entries: Collection[Entry], count: int) -> None:
    """So many units, from who has most."""
    for _ in range(count):
        max(entries, key=lambda entry: entry.units - entry.surrender).surrender += 1


class Share:
    """All units of one limit that is used up, and who has how many of them, less what is asked back."""

    def __init__(self, entries: Iterable[tuple[str, tuple[str, str], Entry]]) -> None:
        self._of: dict[str, dict[tuple[str, str], Entry]] = {}
        self._held: Counter[str] = Counter()
        for name, key, entry in entries:
            self._of.setdefault(name, {})[key] = entry
            self._held[name] += entry.units - entry.surrender

    def ask(self, name: str, key: tuple[str, str], wanted: int, now: float) -> None:
        """So many for a line of one holder."""
        own = self._of.get(name, {}).get(key)
        lines_units = 0 if own is None else own.units
        for more in range(wanted):
            other = self._richest(name)
            if other is None:
                # Nobody has more: then one of its own lines that has.
                if not self._take(name, now, least=lines_units + more + 1, spare=key):
                    return
            elif self._take(other, now, least=0, spare=None):
                self._held[name] += 1
            else:
                return

    def _richest(self, than: str) -> str | None:
        """Who has two more; or the only one, where the other has none."""
        mine = self._held[than]
        other = max(
            (name for name in self._of if name != than), key=lambda name: self._held[name], default=None
        )
        if other is None or (self._held[other] < mine + 2 and (mine or self._held[other] != 1)):
            return None
        return other

    def _take(self, name: str, now: float, *, least: int, spare: tuple[str, str] | None) -> bool:
        """One unit of a holder's richest line."""
        entries = [entry for key, entry in self._of.get(name, {}).items() if key != spare]
        entry = max(entries, key=lambda entry: entry.units - entry.surrender, default=None)
        left = 0 if entry is None else entry.units - entry.surrender
        if entry is None or left <= 0 or (least and left < least + (least > 1)):
            return False
        if left == 1 and now - entry.since < QUANTUM:
            return False
        entry.surrender += 1
        self._held[name] -= 1
        return True
