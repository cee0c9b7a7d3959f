"""The restart policy of one worker: what to do with its process, and when. Pure.

The supervisor reports what happened to the worker and asks which action is due.

Policy: a worker that dies is started again, at once if it was healthy for a minute, otherwise after a pause
that doubles. A worker that hangs gets SIGTERM, and SIGKILL when it does not end; a worker that takes too
long to stop gets SIGKILL. After the supervisor itself was held up (a suspended machine) a worker's silence
is no hang.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
WELL_AFTER = 60.0
"""Seconds of running after which a death is not the former one's continuation."""
HUNG_GRACE = 5.0
"""A hung worker's time to obey SIGTERM: its loop may go on."""


class Phase(enum.StrEnum):
    DOWN = "down"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    HUNG = "hung"
    OVER = "over"


class Action(enum.Enum):
    START = enum.auto()
    TERMINATE = enum.auto()
    KILL = enum.auto()


@dataclass(frozen=True, slots=True)
class WorkerTimeouts:
    """Seconds that a worker may take until it is ready, may be silent, and may take to stop."""

    start: float
    silence: float
    stop: float


class RestartPolicy:
    """The policy for one worker over all its processes; `starts` counts them."""

    def __init__(self, timeouts: WorkerTimeouts, now: float) -> None:
        self.timeouts = timeouts
        self.phase = Phase.DOWN
        self.since = now
        self.starts = 0
        self.deaths = 0
        """Ends in a row that the supervisor did not ask for."""
        self._next = now
        self._heard = now
        self._ready = now
        self._wanted = True
        self._killed = False

    @property
    def restarts(self) -> int:
        return max(self.starts - 1, 0)

    @property
    def next_start(self) -> float:
        return self._next

    @property
    def wanted(self) -> bool:
        return self._wanted

    def is_well(self, now: float) -> bool:
        """Return whether the worker runs, and was not restarted a moment ago: its death would be news."""
        return self.phase is Phase.RUNNING and (self.deaths == 0 or now - self._ready > WELL_AFTER)

    # What is due

    def due(self, now: float, *, late: bool = False) -> Action | None:
        """Returns the action that is due. `late`: the caller itself was held up since its last call."""
        if late:
            self._heard = now
        match self.phase:
            case Phase.DOWN if self._wanted and now >= self._next:
                return Action.START
            case Phase.STARTING if now - self.since > self.timeouts.start:
                return self._kill()
            case Phase.RUNNING if now - self._heard > self.timeouts.silence:
                self._enter(Phase.HUNG, now)
                return Action.TERMINATE
            case Phase.HUNG if now - self.since > min(HUNG_GRACE, self.timeouts.silence):
                return self._kill()
            case Phase.STOPPING if now - self.since > self.timeouts.stop:
                return self._kill()
        return None

    def _kill(self) -> Action | None:
        """Kills only once: SIGKILL cannot be sped up."""
        first, self._killed = not self._killed, True
        return Action.KILL if first else None

    # What is wanted

    def stop(self, now: float) -> Action | None:
        """Stops the worker for good. Returns the action for its process."""
        self._wanted = False
        return self._end(now)

    def want(self) -> None:
        """Let the worker run; one that is stopping is started again, one that is over is not."""
        self._wanted = True

    def replace(self, now: float) -> Action | None:
        """Stops the worker, and starts it again at once. Returns the action for its process."""
        return self._end(now)

    def _end(self, now: float) -> Action | None:
        if self.phase in (Phase.STARTING, Phase.RUNNING):
            self._enter(Phase.STOPPING, now)
            return Action.TERMINATE
        if self.phase is Phase.DOWN:
            self._next = now
            if not self._wanted:
                self._enter(Phase.OVER, now)
        return None

    # What happened

    def started(self, now: float) -> None:
        self.starts += 1
        self._heard = now
        self._killed = False
        self._enter(Phase.STARTING, now)

    def ready(self, now: float) -> None:
        self._heard = now
        if self.phase is Phase.STARTING:
            self._ready = now
            self._enter(Phase.RUNNING, now)

    def heard(self, now: float) -> None:
        self._heard = now

    def stopping(self, now: float) -> None:
        """Note that the worker stops because another process than the supervisor wants it to."""
        if self.phase in (Phase.STARTING, Phase.RUNNING):
            self._enter(Phase.STOPPING, now)

    def ended(self, now: float, *, finished: bool = False) -> None:
        """Note that the process has ended. `finished`: there is nothing left to do for this worker."""
        asked = self.phase is Phase.STOPPING
        ran_well = self.phase in (Phase.RUNNING, Phase.HUNG) and now - self._ready > WELL_AFTER
        if finished or not self._wanted:
            self._enter(Phase.OVER, now)
            return
        self.deaths = 0 if asked else (1 if ran_well else self.deaths + 1)
        self._next = now + (0.0 if asked else pause(self.deaths))
        self._enter(Phase.DOWN, now)

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase, self.since = phase, now


def pause(deaths: int) -> float:
    """Returns the seconds before the next start, after so many deaths in a row."""
    return 0.0 if deaths == 0 else float(min(FIRST_PAUSE * 2.0 ** min(deaths - 1, 20), LONGEST_PAUSE))
