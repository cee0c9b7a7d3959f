"""The allowance of one worker in one zone: the units it may use now and the units it wishes for. Synchronous.

The scheduler asks before it starts a batch, the pool before it opens a connection. The answer is known at
once; a refusal is also a wish, which `keeper` takes to the authority. Spare units go back when other holders
wait for them, else after `KEEP` seconds, so that the next connection need not ask.

Promise: the worker never has more connections than units. When the authority asks units back, those in use go
back as soon as they are free.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from zonerelay.limits.authority.ledger import MAX_WAITING
from zonerelay.limits.values import Claim, Held

KEEP = 2.0
"""Seconds that units wait for their next use while no other holder wants them."""

LINGER = 0.1
"""Seconds that they wait although another holder wants them: the batch that wished for them is about to
start.
"""


@dataclass(slots=True, eq=False)
class LineAllowance:
    """One line of a site. `batches` and `connections`: as the scheduler and the pool count them.

    `wished`: units that are wanted, since `wished_at`; `surrender`: of `units`, those that are to go when
    they are free; `more`: mail waited for it when its last batch started.
    """

    site: str
    line: str
    limit: int
    units: int = 0
    batches: int = 0
    connections: int = 0
    wished: int = 0
    surrender: int = 0
    back: int = 0
    pressed: int = 0
    said: bool = False
    more: bool = True
    wished_at: float = 0.0
    idle_since: float = 0.0

    @property
    def usable(self) -> int:
        return self.units - self.surrender

    @property
    def spare(self) -> int:
        return max(0, self.units - max(self.batches, self.connections))

    @property
    def is_over(self) -> bool:
        return not (self.units or self.wished or self.back or self.batches or self.connections)

    def give_back(self, count: int) -> None:
        self.units -= count
        self.back += count
        self.surrender = max(0, self.surrender - count)

    def claim(self) -> Claim:
        """Returns the claim for the next request; the units that it gives back are on their way then."""
        back, self.back = self.back, 0
        self.said = True
        return Claim(self.site, self.line, self.limit, self.units, back, max(self.wished, self.units))


class ZoneAllowance:
    """All lines of one zone. `changed` is called when there is something to say."""

    def __init__(self, name: str, changed: Callable[[], None], monotonic: Callable[[], float]) -> None:
        self.name = name
        self.changed = changed
        self.until: float | None = None
        """When the units are not to be used any longer, unless the authority is heard of."""
        self._monotonic = monotonic
        self.zone_limit = 0
        self._zone_limit_said = 0
        self.pressed = 0
        self.holders = 1
        """Workers that share the zone's limits at the moment."""
        self.closed = False
        """The lease may have ended: nothing new may be opened."""
        self._lines: dict[tuple[str, str], LineAllowance] = {}
        self._dirty: dict[LineAllowance, None] = {}
        self._wishes: dict[LineAllowance, None] = {}

    # What may be done

    def may_start(self, site: str, line: str, limit: int, zone_limit: int, waiting: int) -> bool:
        """Returns whether a batch of a line may start, in which `waiting` deliveries wait; a refusal becomes
        a wish.
        """
        found = self._line(site, line, limit, zone_limit)
        if found.batches < found.usable and not self.is_closed:
            return True
        self._wish(found, found.batches + max(1, min(waiting, found.batches)))
        return False

    def may_connect(self, site: str, line: str, limit: int, zone_limit: int) -> bool:
        found = self._line(site, line, limit, zone_limit)
        # A batch that has started before the units were asked back is let through.
        if found.connections < found.units and not self.is_closed:
            return True
        self._wish(found, found.connections + 1)
        return False

    def may_keep(self, site: str, line: str) -> bool:
        """Returns whether a connection whose transaction has ended may stay open; if not, other lines need
        its unit.
        """
        found = self._lines.get((site, line))
        if found is None:
            return True
        is_useless = self._is_wanted(found) and not found.more and found.batches <= 1
        return found.connections <= found.usable and not is_useless and not self.is_closed

    # What has happened

    def started(self, site: str, line: str, *, more: bool = True) -> None:
        """Notes that a batch has started; `more`: further deliveries wait for the line."""
        found = self._known(site, line)
        found.batches += 1
        found.more = more

    def ended(self, site: str, line: str) -> None:
        found = self._known(site, line)
        found.batches -= 1
        self._freed(found)

    def cancel(self, site: str, line: str) -> None:
        """Withdraws the wish of a line in which nothing waits any more, except for a batch that has started:
        its unit may have gone with a lease before its connection was opened.
        """
        found = self._lines.get((site, line))
        if found is not None and found in self._wishes and found.batches <= found.units:
            self._unwish(found)
            self._dirty[found] = None
            self.changed()

    def connected(self, site: str, line: str) -> None:
        self._known(site, line).connections += 1

    def disconnected(self, site: str, line: str) -> None:
        found = self._known(site, line)
        found.connections -= 1
        self._freed(found)

    # What the authority says and is told

    @property
    def wants_exchange(self) -> bool:
        other_limit = self.zone_limit != self._zone_limit_said and bool(self._lines)
        return bool(self._dirty) or other_limit or any(not line.said for line in self._heads())

    @property
    def waits(self) -> bool:
        return bool(self._wishes)

    @property
    def is_empty(self) -> bool:
        return not self._lines

    @property
    def figures(self) -> tuple[int, int, int]:
        """Units held, connections open, units wished for."""
        lines = self._lines.values()
        wished = sum(line.wished - line.units for line in self._wishes)
        return sum(line.units for line in lines), sum(line.connections for line in lines), wished

    def claims(self, *, everything: bool) -> tuple[Claim, ...]:
        self._zone_limit_said = self.zone_limit
        heads = list(self._heads())
        if everything:
            lines = [line for line in self._lines.values() if line.units or line.connections or line in heads]
        else:
            lines = [*self._dirty, *(line for line in heads if line not in self._dirty)]
        self._dirty.clear()
        return tuple(self._claim(line, wanted=line in heads) for line in lines)

    def _claim(self, line: LineAllowance, *, wanted: bool) -> Claim:
        claim = line.claim()
        if not wanted and line in self._wishes:
            line.said = False
            return Claim(line.site, line.line, line.limit, claim.keep, claim.back, claim.keep)
        return claim

    def take_in(self, held: tuple[Held, ...], pressed: int, now: float) -> list[float]:
        """Takes in an answer. Returns, for each wish that was granted at least in part, the seconds that it
        waited.
        """
        self.pressed = pressed
        waited = []
        for each in held:
            line = self._known(each.site, each.line)
            before = line.units
            # What we have begun to give back meanwhile is not ours, whatever the answer says.
            line.units = max(0, each.units - line.back)
            line.surrender = min(each.surrender, line.units)
            line.pressed = each.pressed
            if line.units > before:
                line.idle_since = now
                if line in self._wishes:
                    waited.append(now - line.wished_at)
                    # A busy line goes on wishing for one more: that is another wait.
                    line.wished_at = now
            if line in self._wishes and line.units >= line.wished:
                self._unwish(line)
        return waited

    def tidy(self, now: float) -> None:
        """Gives back the units that are asked back or have been idle for long."""
        for key, line in list(self._lines.items()):
            spare = line.spare
            patience = LINGER if self._is_wanted(line) else KEEP
            if not spare:
                line.idle_since = now
            elif line.surrender:
                self._give_back(line, min(spare, line.surrender))
            elif line.idle_since + patience <= now:
                self._give_back(line, spare)
            if line.is_over and line not in self._dirty:
                del self._lines[key]

    @property
    def is_crowded(self) -> bool:
        """Whether another holder wants units that this worker has."""
        return any(line.surrender or line.pressed for line in self._lines.values())

    def is_pressed(self, site: str, line: str) -> bool:
        """Whether an idle connection of the line has a unit that another line or holder waits for."""
        found = self._lines.get((site, line))
        return bool(self.pressed or (found is not None and found.pressed))

    def forget_units(self) -> None:
        """Forgets all units but those in use, because the lease has ended."""
        for line in self._lines.values():
            line.back = 0
            line.units = line.connections
            line.surrender = 0

    def note_time(self, now: float) -> None:
        """Gives their time to new wishes, which are made without a clock."""
        for line in self._wishes:
            line.wished_at = line.wished_at or now

    @property
    def is_closed(self) -> bool:
        """Nothing new may be opened; also when a process that was stopped has just gone on."""
        return self.closed or (self.until is not None and self._monotonic() >= self.until)

    # Inside

    def _line(self, site: str, line: str, limit: int, zone_limit: int) -> LineAllowance:
        found = self._lines.get((site, line))
        if found is None:
            found = self._lines[site, line] = LineAllowance(site, line, limit)
        elif found.limit != limit:
            found.limit = limit
            self._dirty[found] = None
            self.changed()
        if zone_limit != self.zone_limit:
            self.zone_limit = zone_limit
            self.changed()
        return found

    def _known(self, site: str, line: str) -> LineAllowance:
        return self._lines.get((site, line)) or self._line(site, line, 1, self.zone_limit)

    def _wish(self, line: LineAllowance, units: int) -> None:
        units = min(units, line.limit)
        if units <= max(line.wished, line.units):
            return
        line.wished = units
        line.said = False
        self._wishes[line] = None
        self.changed()

    def _unwish(self, line: LineAllowance) -> None:
        del self._wishes[line]
        line.wished = 0
        line.said = False
        line.wished_at = 0.0

    def _heads(self) -> Iterator[LineAllowance]:
        """The wishes that the authority hears of; the others follow when these have come true."""
        for count, line in enumerate(self._wishes):
            if count >= MAX_WAITING:
                return
            yield line

    def _freed(self, line: LineAllowance) -> None:
        spare = line.spare
        if self.closed:
            line.units = line.connections
        elif spare and line.surrender:
            self._give_back(line, min(spare, line.surrender))
        elif spare and not line.more and self._is_wanted(line):
            self._give_back(line, spare)

    def _is_wanted(self, line: LineAllowance) -> bool:
        """Whether other holders or lines wait for units of this line."""
        return bool(self.pressed or line.pressed)

    def _give_back(self, line: LineAllowance, count: int) -> None:
        line.give_back(count)
        self._dirty[line] = None
        self.changed()
