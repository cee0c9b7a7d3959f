"""Turns that were leased: what stands in a rate's place where several workers share it. Pure but for a clock.

`LeasedTurns` is asked like a `Pacer` (`queue/rates.py`): when may the next batch start, when may its MAIL be
written. The answers are turns that the authority has given; each may be taken from its moment on until the
grace is over, by whatever clock of the two is further.

- Only as many are asked for as batches wait, and of these a *block* at most: twice as many as before when
  more wait, half as many when some were of no use, never more than those of `AHEAD` seconds. The next ones
  are asked for while half a block is left.
- Batches start ahead of their turn by what it lately took to have a connection, so that the turn is not over
  when it stands; and turns are asked for no earlier than such a batch can be ready.
- What turns out not to be needed goes back, so that others have it; what was missed goes back as well, with
  the next question, because nobody has taken it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Hashable

from zonerelay.config.options.units import Rate
from zonerelay.limits.clocks import ClockBounds
from zonerelay.limits.rates import interval, leased_grace
from zonerelay.limits.values import TurnAsk
from zonerelay.model.clock import Clock

AHEAD = 0.25
"""Seconds of turns that one worker asks for at once, if that is more than one: the others wait meanwhile."""

ASK_AGAIN = 1.0
HORIZON = 5.0
TOO_LATE = 0.01
"""Seconds: a turn that is so near is over before anybody else can have it."""

MEMORY = 15.0
"""Seconds in which half of a lead is forgotten, or a few turns if that is longer."""

_FEW = 5

MORE = 1.3

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
        self._grace = min(map(leased_grace, rates))
        self._clock = clock
        self._bounds = bounds
        self._wanted = wanted
        self._turns: list[float] = []
        self._waiting: dict[Hashable, int] = {}
        self._unused: list[float] = []
        self._watching: dict[Callable[[], None], None] = {}
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
        """So many deliveries of the line wait for their start."""
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
        left = len(self._turns) - self.pending
        if left <= self._block // 2 and left < self._demand:
            self._ask()
        return self._start_of(self.pending) if left > 0 else now + ASK_AGAIN

    @property
    def next_turn(self) -> float:
        """When the next turn may be taken."""
        now = self._clock.monotonic()
        self._drop_missed(now)
        if len(self._turns) < self.pending:
            self._ask()
        return self._window(0)[0] if self._turns else now + ASK_AGAIN

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
        self._give_back_surplus()

    def arrived(self, seconds: float) -> None:
        """So long after its start a batch had its connection."""
        now = self._clock.monotonic()
        half = max(MEMORY, _FEW * self.interval)
        self._lead = max(seconds, self._lead * 0.5 ** ((now - self._arrived_at) / half))
        self._arrived_at = now

    def take(self, now: float) -> None:
        """A turn; not before `next_turn`."""
        del now
        if self._turns:
            self.last = self._turns.pop(0)

    def watch(self, call: Callable[[], None]) -> None:
        """Call it when there are new turns, until `unwatch`."""
        self._watching[call] = None

    def unwatch(self, call: Callable[[], None]) -> None:
        self._watching.pop(call, None)

    # As a holder

    @property
    def has_unused(self) -> bool:
        return bool(self._unused)

    def ask(self) -> TurnAsk:
        self.asked = True
        missing = self.pending + self._demand - len(self._turns)
        if self._useless:
            self._block = max(1, self._block // 2)
            self._useless = False
        elif missing > self._block:
            self._block = min(2 * self._block, self._most)
        # A batch that has lost its turn needs one at once.
        after = 0.0 if len(self._turns) < self.pending else self._ahead
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
        """Turns that nobody here has taken or will take. To be said once: they are not ours any longer."""
        unused, self._unused = self._unused, []
        return tuple((self.site, at) for at in unused)

    # Inside

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
        surplus = len(self._turns) - self.pending - self._demand
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
            if not self.pending:
                # Whoever was said to wait has not come.
                self._waiting.clear()
