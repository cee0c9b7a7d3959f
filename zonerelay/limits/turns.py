"""Turns that were leased: what stands in a rate's place where several workers share it. Pure but for a clock.

`LeasedTurns` is asked like a `Pacer` (`queue/rates.py`): when may the next batch start, when may its MAIL be
written. The answers are turns that the authority has given; each may be taken from its moment on until the
grace is over, by whatever clock of the two is further. What is not taken in that time is lost.

- As many are asked for as were used last time, and twice as many when all were, up to those of `AHEAD`
  seconds; the next ones while some are left.
- Batches start ahead of their turn by what it lately took to have a connection, so that the turn is not over
  when it stands.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from zonerelay.config.units import Rate
from zonerelay.limits.clocks import ClockBounds
from zonerelay.limits.rates import grace, interval
from zonerelay.limits.values import TurnAsk
from zonerelay.model.clock import Clock

AHEAD = 1.0
"""Seconds of turns that one worker holds at most, if that is more than one: the others wait meanwhile."""

ASK_AGAIN = 1.0
HORIZON = 5.0
SOON = 0.02
_FORGET = 0.9

_NEVER = float("-inf")


class LeasedTurns:
    """Of the lines that count for the same rates. `site` and `line` are empty where only the zone has one."""

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
        self._grace = min(map(grace, rates))
        self._clock = clock
        self._bounds = bounds
        self._wanted = wanted
        self._turns: deque[float] = deque()
        self._most = max(1, int(AHEAD / self.interval))
        self._block = 1
        self._used = 0
        self._most_pending = max(1, int(HORIZON / self.interval))
        self._lead = 0.0
        self.asked = False
        self.pending = 0
        self.last = _NEVER

    # As a Pacer

    @property
    def due(self) -> float:
        """When the next batch may start: later than now when that is not known yet."""
        now = self._clock.monotonic()
        self._drop_missed(now)
        self._ask_ahead()
        if self.pending < len(self._turns):
            lead = min(max(self._lead, 0.0), HORIZON)
            return self._bounds.window(self._turns[self.pending], self._grace)[0] - lead
        return now + ASK_AGAIN

    @property
    def next_turn(self) -> float:
        """When the next turn may be taken."""
        now = self._clock.monotonic()
        self._drop_missed(now)
        self._ask_ahead()
        if self._turns:
            return self._bounds.window(self._turns[0], self._grace)[0]
        return now + SOON

    @property
    def is_crowded(self) -> bool:
        return self.pending >= self._most_pending

    def is_over(self, now: float) -> bool:
        self._drop_missed(now)
        return not self.pending and not self._turns

    def start(self, now: float) -> None:
        del now
        self.pending += 1

    def give_back(self) -> None:
        """A start that led to nothing."""
        self.pending -= 1

    def arrived(self, seconds: float) -> None:
        """So long after its start a batch had its connection."""
        self._lead = max(seconds, self._lead * _FORGET)

    def take(self, now: float) -> None:
        """A turn; not before `next_turn`."""
        del now
        if self._turns:
            self.last = self._turns.popleft()
        self._used += 1

    # As a holder

    def ask(self) -> TurnAsk:
        if self._used >= self._block:
            self._block = min(2 * self._block, self._most)
        else:
            self._block = max(1, self._used)
        self._used = 0
        self.asked = True
        return TurnAsk(self.site, self.line, self._site_interval, self._zone_interval, self._block)

    def given(self, turns: tuple[float, ...]) -> None:
        self.asked = False
        self._turns.extend(turns)

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

    def surrender(self) -> list[tuple[str, float]]:
        """All that are left."""
        left = [(self.site, at) for at in self._turns]
        self._turns.clear()
        return left

    def _ask_ahead(self) -> None:
        left = len(self._turns) - self.pending
        if not self.asked and (left <= 0 or (self._block > 1 and 2 * left <= self._block)):
            self._wanted(self)

    def _drop_missed(self, now: float) -> None:
        while self._turns and self._bounds.window(self._turns[0], self._grace)[1] < now:
            self.last = self._turns.popleft()
