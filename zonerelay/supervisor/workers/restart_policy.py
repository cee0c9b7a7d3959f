"""Decides when a worker's process is started, stopped or killed, and which one is replaced next in a rolling
restart. Pure.

The supervisor reports what happened to the worker and asks which action is due.

Policy: a worker that dies is restarted, at once if it was healthy for a minute, otherwise after a pause that
doubles each time. A worker that hangs gets SIGTERM, then SIGKILL if it does not end. A worker that takes too
long to stop gets SIGKILL. If the supervisor itself was not running for a while (a suspended machine), the
silence of a worker does not count as a hang.

In a rolling restart, workers are replaced one at a time, and only while another worker accepts connections,
so that clients hardly wait. The restart does not wait for workers that die at each start. A successor counts
as up when it has run for `STEADY` seconds, because one that dies with its first client is not a success. If a
successor does not come up, or dies while others are still being replaced, the remaining workers are not
replaced and the restart has failed, unless that worker was failing before.
"""

import enum
from collections.abc import Callable, Generator, Iterable, Mapping

import msgspec

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0
WELL_AFTER = 60.0
"""Seconds of running after which a death no longer counts as a consequence of the previous one."""
HUNG_GRACE = 5.0
"""Seconds that a hung worker has to obey SIGTERM, because its event loop may recover."""
STEADY = 1.0
"""Seconds for which a successor must run before the next worker is replaced."""
HOPELESS = 3
"""Consecutive deaths after which a rolling restart does not wait for a worker."""


class WorkerPhase(enum.StrEnum):
    """The phase of a worker's process."""

    DOWN = "down"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    HUNG = "hung"
    OVER = "over"


class Action(enum.Enum):
    """The actions that a restart policy requests for a worker's process."""

    START = enum.auto()
    TERMINATE = enum.auto()
    KILL = enum.auto()


class WorkerTimeouts(msgspec.Struct, frozen=True):
    """The time limits of a worker in seconds: to become ready, between heartbeats, and to stop."""

    start: float
    silence: float
    stop: float


class RestartPolicy:
    """Decides when one worker is started, stopped and restarted. `starts` counts its starts."""

    def __init__(self, timeouts: WorkerTimeouts, now: float) -> None:
        self.timeouts = timeouts
        self.phase = WorkerPhase.DOWN
        self.since = now
        self.starts = 0
        self.deaths = 0
        """Consecutive ends that the supervisor did not request."""
        self.next_start = now
        self._heard = now
        self._ready = now
        self.wanted = True
        """Whether the worker is to run; one that has finished is not. One that is stopping, or over, is
        started again if it is wanted.
        """

    @property
    def restarts(self) -> int:
        return max(self.starts - 1, 0)

    def is_well(self, now: float) -> bool:
        """Return whether the worker is running and its last death, if any, is long enough ago that another
        one would be a new problem.
        """
        return self.phase is WorkerPhase.RUNNING and (self.deaths == 0 or now - self._ready > WELL_AFTER)

    # Due actions

    def due(self, now: float, *, late: bool = False) -> Action | None:
        """Return the action that is due for the process, or None. Repeated calls may return the same SIGKILL,
        which has no further effect. `late` is true if the caller itself was not running since its last call.
        """
        if late:
            self._heard = now
        match self.phase:
            case WorkerPhase.DOWN if self.wanted and now >= self.next_start:
                return Action.START
            case WorkerPhase.STARTING if now - self.since > self.timeouts.start:
                return Action.KILL
            case WorkerPhase.RUNNING if now - self._heard > self.timeouts.silence:
                self._enter(WorkerPhase.HUNG, now)
                return Action.TERMINATE
            case WorkerPhase.HUNG if now - self.since > min(HUNG_GRACE, self.timeouts.silence):
                return Action.KILL
            case WorkerPhase.STOPPING if now - self.since > self.timeouts.stop:
                return Action.KILL
        return None

    # Commands

    def stop(self, now: float) -> Action | None:
        """Stop the worker permanently. Return the action for its process."""
        self.wanted = False
        return self.restart(now)

    def restart(self, now: float) -> Action | None:
        """Stop the worker, and start it again at once if it is wanted. Return the action for its process."""
        if self.phase in (WorkerPhase.STARTING, WorkerPhase.RUNNING):
            self._enter(WorkerPhase.STOPPING, now)
            return Action.TERMINATE
        if self.phase in (WorkerPhase.DOWN, WorkerPhase.OVER):
            self.next_start = now
            self._enter(WorkerPhase.DOWN if self.wanted else WorkerPhase.OVER, now)
        return None

    # Events

    def started(self, now: float) -> None:
        self.starts += 1
        self._heard = now
        self._enter(WorkerPhase.STARTING, now)

    def ready(self, now: float) -> None:
        self._heard = now
        if self.phase is WorkerPhase.STARTING:
            self._ready = now
            self._enter(WorkerPhase.RUNNING, now)

    def heard(self, now: float) -> None:
        self._heard = now

    def stopping(self, now: float) -> None:
        """Record that the worker is stopping without a request from the supervisor."""
        if self.phase in (WorkerPhase.STARTING, WorkerPhase.RUNNING):
            self._enter(WorkerPhase.STOPPING, now)

    def ended(self, now: float, *, finished: bool = False) -> None:
        """Record that the process has ended. `finished` is true if the worker has nothing left to do."""
        asked = self.phase is WorkerPhase.STOPPING
        ran_well = self.phase in (WorkerPhase.RUNNING, WorkerPhase.HUNG) and now - self._ready > WELL_AFTER
        self.wanted = self.wanted and not finished
        if not self.wanted:
            self._enter(WorkerPhase.OVER, now)
            return
        self.deaths = 0 if asked else (1 if ran_well else self.deaths + 1)
        self.next_start = now + (0.0 if asked else pause(self.deaths))
        self._enter(WorkerPhase.DOWN, now)

    def _enter(self, phase: WorkerPhase, now: float) -> None:
        self.phase, self.since = phase, now


def pause(deaths: int) -> float:
    """Return the number of seconds to wait before the next start, after this number of consecutive deaths."""
    return 0.0 if deaths == 0 else float(min(FIRST_PAUSE * 2.0 ** min(deaths - 1, 20), LONGEST_PAUSE))


def rolling_restart(
    workers: Iterable[int], policies: Callable[[], Mapping[int, RestartPolicy]], now: Callable[[], float]
) -> Generator[int | None, None, int | None]:
    """Yield the index of each worker when it should be replaced, and None while the restart has to wait.
    Return the worker that did not come up, or None.
    """
    left, replaced = sorted(workers), dict[int, int]()

    def fallen() -> int | None:
        """Return a worker that was started as a replacement, became ready and has since died, or None."""
        there = policies()
        died = (each for each, deaths in replaced.items() if each in there and there[each].deaths > deaths)
        return next(died, None)

    while fallen() is None and (left := [each for each in left if each in policies()]):
        there = policies()
        worker = next((each for each in left if _can_be_spared(each, there)), None)
        if worker is None:
            yield None
            continue
        policy = there[worker]
        starts, had_failed = policy.starts, policy.deaths > 0 and policy.phase is not WorkerPhase.RUNNING
        yield worker
        while fallen() is None and policies().get(worker) is policy and not _is_up(policy, starts, now()):
            if policy.starts > starts and policy.phase is WorkerPhase.DOWN:
                if not had_failed:
                    return worker
                break
            yield None
        left.remove(worker)
        if not had_failed:
            replaced[worker] = policy.deaths
    return fallen()


def _is_up(policy: RestartPolicy, starts: int, now: float) -> bool:
    """Return whether the worker was started more than `starts` times and has been running for a while
    since.
    """
    return policy.starts > starts and policy.phase is WorkerPhase.RUNNING and now - policy.since >= STEADY


def _can_be_spared(worker: int, policies: Mapping[int, RestartPolicy]) -> bool:
    """Return whether a worker may be stopped: another worker accepts connections, or none of them will soon.
    In the second case clients wait in the socket's queue.
    """
    others = [policy for other, policy in policies.items() if other != worker]
    return any(policy.phase is WorkerPhase.RUNNING for policy in others) or all(
        policy.deaths >= HOPELESS for policy in others
    )
