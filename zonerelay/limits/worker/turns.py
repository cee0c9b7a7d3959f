"""The turns that a worker has leased: they replace its own pace where several workers share a rate.

`LeasedTurns` answers the questions of a `Pacer` (`queue/destination/rates`): when may the next batch start,
and when may its MAIL be written. Each answer is a turn that the authority has given. A turn may be taken from
its moment on until its grace is over, by the later and the earlier bound of the authority's clock
(`ClockBounds`).

- A worker asks for as many turns as batches wait, at most a *block*: the block doubles when more batches
  wait, halves when turns went unused, and never exceeds the turns of `AHEAD` seconds. The worker asks for the
  next block while half of the present one is left.
- A batch starts ahead of its turn by the time that recent connections took, so that its turn is not over when
  the connection stands; turns are asked for no earlier than such a batch can be ready.
- Turns that no batch needs go back, so that other workers have them. Missed turns go back as well, with the
  next request, because no transaction used them.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable

from zonerelay.config.units import Rate
from zonerelay.limits.values import TurnAsk, interval, leased_grace
from zonerelay.model.clock import Clock

CLOCK_MEMORY = 60.0
"""Seconds for which the bounds that an answer gave are used."""


class ClockBounds:
    """Bounds, in seconds, of how far the authority's clock is ahead of ours: `low <= theirs - ours <= high`.

    Each answer bounds the difference: the authority read its clock after the request was sent and before the
    answer arrived. The tightest bounds of the last `CLOCK_MEMORY` seconds count. When a clock is set, old and
    new bounds contradict each other, and only the newest count.
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
        # Only what is tighter than before is worth its place.
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
        """Returns the first moment of our clock that is surely not before `theirs`, and the last one that is
        surely not `grace` seconds after it.
        """
        return theirs - self.low, theirs + grace - self.high


AHEAD = 0.25
"""Seconds of turns that one worker asks for at once, if that is more than one: the others wait meanwhile."""

ASK_AGAIN = 1.0
HORIZON = 5.0
TOO_LATE = 0.01
"""Seconds: a turn that is so near is over before another worker can have it."""

LEAD_MEMORY = 15.0
"""Seconds in which half of a lead is forgotten, or a few turns if that is longer."""

_FEW = 5

MORE = 1.3

_NEVER = float("-inf")


class LeasedTurns:
    """The leased turns of a line. `site` and `line` are empty where only the zone has a rate."""

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
        """Who waits for a turn; true for a further turn of a batch, which `pending` no longer counts."""
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
        """Notes that `waiting` deliveries of the line wait for their start."""
        if waiting:
            self._waiting[line] = waiting
        else:
            self._waiting.pop(line, None)
            self._give_back_surplus()

    @property
    def due(self) -> float:
        """When the next batch may start: later than now when that is not known yet."""
        now = self._clock.monotonic()
        self._drop_missed(now)
        left = len(self._turns) - self._started
        if left <= self._block // 2 and left < self._demand:
            self._ask()
        return self._start_of(self._started) if left > 0 else now + ASK_AGAIN

    @property
    def next_turn(self) -> float:
        """When the next turn may be taken."""
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
        """Takes a start back that led to no transaction."""
        self.pending -= 1
        self._give_back_surplus()

    def arrived(self, seconds: float) -> None:
        """Notes that a batch had its connection `seconds` after its start."""
        now = self._clock.monotonic()
        half = max(LEAD_MEMORY, _FEW * self.interval)
        self._lead = max(seconds, self._lead * 0.5 ** ((now - self._arrived_at) / half))
        self._arrived_at = now

    def take(self, now: float) -> None:
        """Takes the next turn; call it no earlier than `next_turn`."""
        del now
        if self._turns:
            self.last = self._turns.pop(0)

    def watch(self, call: Callable[[], None], *, further: bool) -> None:
        """Call it when there are new turns, until `unwatch`. `further`: the batch has had its first turn."""
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
        """For an authority that has forgotten: what was taken last and what is left."""
        turns = (*((self.last,) if self.last != _NEVER else ()), *self._turns)
        if not turns:
            return None
        return TurnAsk(self.site, self.line, self._site_interval, self._zone_interval, 0), turns

    def idle_for(self, now: float) -> float:
        """Seconds since the last of them."""
        return float("inf") if self.last == _NEVER else now - self._bounds.window(self.last, 0.0)[0]

    def unused(self) -> tuple[tuple[str, float], ...]:
        """Returns the turns that this worker will not take, each with its site, and forgets them."""
        unused, self._unused = self._unused, []
        return tuple((self.site, at) for at in unused)

    # Inside

    @property
    def _started(self) -> int:
        """Batches that have started and have no turn, or wait for a further one."""
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
        """The next connection may take a little longer than any before."""
        return min(MORE * self._lead, HORIZON)

    def _ask(self) -> None:
        if not self.asked:
            self._wanted(self)

    def _give_back_surplus(self) -> None:
        """The last ones, if there is time for others to have them."""
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
                # The deliveries that were expected have not come.
                self._waiting.clear()
