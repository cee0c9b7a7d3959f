"""Manages the allowance of one worker in one zone: the slots it may use now, and the slots it requests.
Synchronous.

The scheduler checks it before it starts a batch, and the pool before it opens a connection. The result is
known at once. A refusal also records a request, which `keeper` sends to the authority. Spare units are given
back when other holders wait for them, or else after `KEEP` seconds, so that the next connection needs no
request.

Promise: the worker never has more connections than units. If the authority asks for units back, those in use
are given back as soon as they are free.

`LeasedTurns` are the turns that a worker has leased. If several workers share a rate, they replace the
worker's own pace and answer the questions of a `Pacer` (`queue/destination/rates`): when the next batch may
start, and when its MAIL may be written. Each answer is a turn that the authority has assigned. A turn may be
taken from its moment until its grace has passed, by the later and the earlier bound of the authority's clock
(`ClockBounds`).

- A worker requests as many turns as batches wait, but at most a *block*. The block doubles when more batches
  wait, halves when turns were unused, and never exceeds the turns of `AHEAD` seconds. The worker requests the
  next block while half of the present one is left.
- A batch starts before its turn by the time that recent connections took, so that its turn has not passed
  when the connection is established. Turns are requested no earlier than such a batch can be ready.
- Turns that no batch needs are given back for other workers. Missed turns are given back as well, with the
  next request, because no transaction used them.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from zonerelay.config.units import Rate
from zonerelay.limits.authority import MAX_WAITING
from zonerelay.limits.values import Claim, Held, TurnAsk, interval, leased_grace
from zonerelay.model.clock import Clock

CLOCK_MEMORY = 60.0
"""Seconds for which the bounds from an answer are used."""


class ClockBounds:
    """The limits within which the authority's clock is ahead of the worker's, in seconds: `low <= theirs -
    ours <= high`.

    Each answer bounds the difference, because the authority read its clock after the request was sent and
    before the answer arrived. The tightest bounds of the last `CLOCK_MEMORY` seconds count. When a clock is
    set, old and new bounds contradict each other, and only the newest count.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float, float]] = deque()
        self.low = float("-inf")
        self.high = float("inf")

    def note(self, asked: float, theirs: float, heard: float) -> None:
        low, high = theirs - heard, theirs - asked
        while self._seen and self._seen[0][0] < heard - CLOCK_MEMORY:
            self._seen.popleft()
        if self._seen and (low > self.high or high < self.low):
            self._seen.clear()
        # Only tighter bounds are worth storing.
        if (
            not self._seen
            or low > self.low
            or high < self.high
            or heard > self._seen[-1][0] + CLOCK_MEMORY / 4
        ):
            self._seen.append((heard, low, high))
        self.low = max(low for _, low, _ in self._seen)
        self.high = min(high for _, _, high in self._seen)

    def window(self, theirs: float, grace: float) -> tuple[float, float]:
        """Return the first moment of our clock that is certainly not before `theirs`, and the last one that
        is certainly not `grace` seconds after it.
        """
        return theirs - self.low, theirs + grace - self.high


AHEAD = 0.25
"""Seconds of turns that one worker requests at once, if that is more than one turn. Other workers wait during
this time.
"""

ASK_AGAIN = 1.0
HORIZON = 5.0
TOO_LATE = 0.01
"""Seconds. A turn this close has passed before another worker can get it."""

LEAD_MEMORY = 15.0
"""Seconds in which half of a lead is forgotten, or a few turns if that is longer."""

_FEW = 5

MORE = 1.3

_NEVER = float("-inf")


class LeasedTurns:
    """The reserved send times of one destination. `site` and `line` are empty if only the zone has a rate."""

    def __init__(
        self,
        site: str,
        line: str,
        rate: Rate | None,
        zone_rate: Rate | None,
        *,
        clock: Clock,
        bounds: ClockBounds,
        wanted: Callable[[LeasedTurns], None],
    ) -> None:
        rates = [each for each in (rate, zone_rate) if each is not None]
        self.site, self.line = site, line
        self._site_interval = interval(rate) if rate is not None else 0.0
        self._zone_interval = interval(zone_rate) if zone_rate is not None else 0.0
        self.interval = max(self._site_interval, self._zone_interval)
        self._grace = min(map(leased_grace, rates))
        self._clock = clock
        self._bounds = bounds
        self._wanted = wanted
        self._turns: list[float] = []
        self._waiting: dict[Hashable, int] = {}
        self._unused: list[float] = []
        self._watching: dict[Callable[[], None], bool] = {}
        """The waiters for a turn. The value is true for a further turn of a batch, which `pending` no longer
        counts.
        """
        self._most = max(1, int(AHEAD / self.interval))
        self._block = 1
        self._useless = False
        self._most_pending = max(1, int(HORIZON / self.interval))
        self._lead = 0.0
        self._arrived_at = clock.monotonic()
        self.asked = False
        self.pending = 0
        self.last = _NEVER

    # As a Pacer

    def expect(self, line: Hashable, waiting: int) -> None:
        """Note that `waiting` deliveries are waiting for a send time."""
        if waiting:
            self._waiting[line] = waiting
        else:
            self._waiting.pop(line, None)
            self._give_back_surplus()

    @property
    def due(self) -> float:
        """When the next batch may start. It is later than now if that is not known yet."""
        now = self._clock.monotonic()
        self._drop_missed(now)
        left = len(self._turns) - self._started
        if left <= self._block // 2 and left < self._demand:
            self._ask()
        return self._start_of(self._started) if left > 0 else now + ASK_AGAIN

    @property
    def next_turn(self) -> float:
        """Return the next available send time."""
        now = self._clock.monotonic()
        self._drop_missed(now)
        if len(self._turns) < max(1, self.pending):
            self._ask()
        return self._window(0)[0] if self._turns else now + ASK_AGAIN

    @property
    def is_crowded(self) -> bool:
        return self.pending >= self._most_pending

    def is_over(self, now: float) -> bool:
        self._drop_missed(now)
        return not self._started and not self._turns

    def start(self, now: float) -> None:
        del now
        self.pending += 1

    def give_back(self) -> None:
        """Return a start that led to no transaction."""
        self.pending -= 1
        self._give_back_surplus()

    def arrived(self, seconds: float) -> None:
        """Note that the connection of a batch was established `seconds` after its start."""
        now = self._clock.monotonic()
        half = max(LEAD_MEMORY, _FEW * self.interval)
        self._lead = max(seconds, self._lead * 0.5 ** ((now - self._arrived_at) / half))
        self._arrived_at = now

    def take(self, now: float) -> None:
        """Use the next send time. Call it no earlier than `next_turn`."""
        del now
        if self._turns:
            self.last = self._turns.pop(0)

    def watch(self, call: Callable[[], None], *, further: bool) -> None:
        """Call `call` when new send times are available, until `unwatch`. `further` says that the batch has
        had its first turn.
        """
        self._watching[call] = further

    def unwatch(self, call: Callable[[], None]) -> None:
        self._watching.pop(call, None)

    # As a holder

    def ask(self) -> TurnAsk:
        self.asked = True
        missing = self._started + self._demand - len(self._turns)
        if self._useless:
            self._block = max(1, self._block // 2)
            self._useless = False
        elif missing > self._block:
            self._block = min(2 * self._block, self._most)
        # A batch that has lost its turn needs one at once.
        after = 0.0 if len(self._turns) < self._started else self._ahead
        count = max(0, min(missing, self._block))
        return TurnAsk(self.site, self.line, self._site_interval, self._zone_interval, count, after)

    def given(self, turns: tuple[float, ...]) -> None:
        self.asked = False
        for at in turns:
            insort(self._turns, at)
        self._give_back_surplus()
        for call in self._watching:
            call()

    @property
    def known(self) -> tuple[TurnAsk, tuple[float, ...]] | None:
        """Return the last used send time and the remaining ones, for an authority that has lost its state."""
        turns = (*((self.last,) if self.last != _NEVER else ()), *self._turns)
        if not turns:
            return None
        return TurnAsk(self.site, self.line, self._site_interval, self._zone_interval, 0), turns

    def idle_for(self, now: float) -> float:
        """Return the seconds since the last used send time."""
        return float("inf") if self.last == _NEVER else now - self._bounds.window(self.last, 0.0)[0]

    def unused(self) -> tuple[tuple[str, float], ...]:
        """Return the send times that this worker will not use, each with its site, and forget them."""
        unused, self._unused = self._unused, []
        return tuple((self.site, at) for at in unused)

    # Internals

    @property
    def _started(self) -> int:
        """The number of started batches that have no send time yet or wait for another one."""
        return self.pending + sum(self._watching.values())

    @property
    def _demand(self) -> int:
        return sum(self._waiting.values())

    def _window(self, number: int) -> tuple[float, float]:
        return self._bounds.window(self._turns[number], self._grace)

    def _start_of(self, number: int) -> float:
        return self._window(number)[0] - self._ahead

    @property
    def _ahead(self) -> float:
        """The lead of a batch. The next connection may take a little longer than any before."""
        return min(MORE * self._lead, HORIZON)

    def _ask(self) -> None:
        if not self.asked:
            self._wanted(self)

    def _give_back_surplus(self) -> None:
        """Return surplus send times if other workers can still use them."""
        surplus = len(self._turns) - self._started - self._demand
        if surplus <= 0:
            return
        now = self._clock.monotonic()
        while surplus and self._window(-1)[0] > now + TOO_LATE:
            self._unused.append(self._turns.pop())
            self._useless = True
            surplus -= 1
        if self._unused:
            self._ask()

    def _drop_missed(self, now: float) -> None:
        while self._turns and self._window(0)[1] < now:
            self._unused.append(self._turns.pop(0))
            self._useless = True
            if not self._started:
                # The expected deliveries have not come.
                self._waiting.clear()


KEEP = 2.0
"""Seconds that units wait for their next use while no other holder wants them."""

LINGER = 0.1
"""Seconds that units wait although another holder wants them, because the batch that requested them is about
to start.
"""


@dataclass(slots=True, eq=False)
class LineAllowance:
    """The slots of one destination that a worker may use, and how many of them it must return when they are
    free. `batches` and `connections` are the counts of the scheduler and the pool.

    `wished` is the number of units wanted, since `wished_at`. `more` says that mail waited for the line when
    its last batch started.
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
        """Return the claim for the next request, which also returns slots."""
        back, self.back = self.back, 0
        self.said = True
        return Claim(self.site, self.line, self.limit, self.units, back, max(self.wished, self.units))


class ZoneAllowance:
    """A worker's slots and send times in one zone. `changed` is called when there is something to send."""

    def __init__(self, name: str, changed: Callable[[], None], monotonic: Callable[[], float]) -> None:
        self.name = name
        self.changed = changed
        self.until: float | None = None
        """The time at which the units must no longer be used unless the authority answers."""
        self._monotonic = monotonic
        self.zone_limit = 0
        self._zone_limit_said = 0
        self.pressed = 0
        self.holders = 1
        """The number of workers that share the zone's limits at present."""
        self.closed = False
        """Whether the lease may have ended, so that no connection may be opened."""
        self._lines: dict[tuple[str, str], LineAllowance] = {}
        self._dirty: dict[LineAllowance, None] = {}
        self._wishes: dict[LineAllowance, None] = {}

    # Permissions

    def may_start(self, site: str, line: str, limit: int, zone_limit: int, waiting: int) -> bool:
        """Return whether a batch to a destination with `waiting` deliveries may start. A refusal records a
        request.
        """
        found = self._line(site, line, limit, zone_limit)
        if found.batches < found.usable and not self.is_closed:
            return True
        self._wish(found, found.batches + max(1, min(waiting, found.batches)))
        return False

    def may_connect(self, site: str, line: str, limit: int, zone_limit: int) -> bool:
        found = self._line(site, line, limit, zone_limit)
        # A batch that started before the units were to be given back is allowed.
        if found.connections < found.units and not self.is_closed:
            return True
        self._wish(found, found.connections + 1)
        return False

    def may_keep(self, site: str, line: str) -> bool:
        """Return whether a connection may stay open after its transaction, because its slot is not needed
        elsewhere.
        """
        found = self._lines.get((site, line))
        if found is None:
            return True
        is_useless = self._is_wanted(found) and not found.more and found.batches <= 1
        return found.connections <= found.usable and not is_useless and not self.is_closed

    # Events

    def started(self, site: str, line: str, *, more: bool = True) -> None:
        """Note that a batch has started. `more` says that further deliveries wait for the line."""
        found = self._known(site, line)
        found.batches += 1
        found.more = more

    def ended(self, site: str, line: str) -> None:
        found = self._known(site, line)
        found.batches -= 1
        self._freed(found)

    def cancel(self, site: str, line: str) -> None:
        """Withdraw the request for a destination without waiting deliveries, except for a started batch whose
        slot may have been lost with a lease.
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

    # Exchange with the authority

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
        """Return the numbers of slots held, connections open and slots requested."""
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
        """Apply an answer. Return the waiting time in seconds of each request that was granted at least in
        part.
        """
        self.pressed = pressed
        waited = []
        for each in held:
            line = self._known(each.site, each.line)
            before = line.units
            # Units that we have begun to give back are not ours, whatever the answer contains.
            line.units = max(0, each.units - line.back)
            line.surrender = min(each.surrender, line.units)
            line.pressed = each.pressed
            if line.units > before:
                line.idle_since = now
                if line in self._wishes:
                    waited.append(now - line.wished_at)
                    # A busy line requests one more unit, which starts another wait.
                    line.wished_at = now
            if line in self._wishes and line.units >= line.wished:
                self._unwish(line)
        return waited

    def tidy(self, now: float) -> None:
        """Return slots that were reclaimed or have been idle for long."""
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
        """Whether another worker waits for slots of this worker."""
        return any(line.surrender or line.pressed for line in self._lines.values())

    def is_pressed(self, site: str, line: str) -> bool:
        """Return whether another destination or worker waits for the slot of an idle connection."""
        found = self._lines.get((site, line))
        return bool(self.pressed or (found is not None and found.pressed))

    def forget_units(self) -> None:
        """Forget all slots except those in use, because the lease has expired."""
        for line in self._lines.values():
            line.back = 0
            line.units = line.connections
            line.surrender = 0

    def note_time(self, now: float) -> None:
        """Set the time of new requests, which are recorded without a clock."""
        for line in self._wishes:
            line.wished_at = line.wished_at or now

    @property
    def is_closed(self) -> bool:
        """Whether no connection may be opened. This also holds when a process continues after having been
        stopped.
        """
        return self.closed or (self.until is not None and self._monotonic() >= self.until)

    # Internals

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
        """Yield the requests that the authority receives. The others follow when these are granted."""
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
        """Return whether other workers or destinations wait for slots of this destination."""
        return bool(self.pressed or line.pressed)

    def _give_back(self, line: LineAllowance, count: int) -> None:
        line.give_back(count)
        self._dirty[line] = None
        self.changed()
