"""Decides which worker is replaced next in a rolling restart. Pure.

Policy: workers are replaced one at a time, and only while another worker accepts connections, so that clients
hardly wait. The restart does not wait for workers that die at each start. A successor counts as up when it
has run for `STEADY` seconds, because one that dies with its first client is not a success. If a successor
does not come up, or dies while others are still being replaced, the remaining workers are not replaced and
the restart has failed, unless that worker was failing before.
"""

from collections.abc import Mapping

from zonerelay.supervisor.workers.restart_policy import RestartPolicy, WorkerPhase

STEADY = 1.0
"""Seconds for which a successor must run before the next worker is replaced."""
HOPELESS = 3
"""Consecutive deaths after which the restart does not wait for a worker."""


class RollingRestart:
    """Plans a rolling restart. `failed` is the worker that did not come up, `replaced` lists those that did,
    and `done` says that it has ended.
    """

    def __init__(self, workers: Mapping[int, RestartPolicy]) -> None:
        self._starts = {worker: policy.starts for worker, policy in sorted(workers.items())}
        self._current: int | None = None
        self._had_failed = False
        self.failed: int | None = None
        self.replaced: list[int] = []
        self._deaths: dict[int, int] = {}
        """The deaths of the workers that have been replaced and were not failing before."""

    @property
    def done(self) -> bool:
        return self.failed is not None or (self._current is None and not self._starts)

    def step(self, policies: Mapping[int, RestartPolicy], now: float) -> int | None:
        """Return the index of the worker to replace now, or None."""
        self._look(policies, now)
        if self.done or self._current is not None:
            return None
        for worker in self._starts:
            if not _can_be_spared(worker, policies):
                continue
            policy = policies[worker]
            self._current = worker
            self._had_failed = policy.deaths > 0 and policy.phase is not WorkerPhase.RUNNING
            # A worker that had died before was restarted by its policy, not by this rolling restart.
            self._starts[worker] = policy.starts
            return worker
        return None

    def _look(self, policies: Mapping[int, RestartPolicy], now: float) -> None:
        """Check whether the worker being replaced is ready or has failed."""
        self._starts = {worker: starts for worker, starts in self._starts.items() if worker in policies}
        if self.failed is None:
            self.failed = self._fallen(policies)
        if self._current is not None and self._current not in policies:
            self._current = None
        worker = self._current
        if self.failed is not None or worker is None or policies[worker].starts <= self._starts[worker]:
            return
        policy = policies[worker]
        if policy.phase is WorkerPhase.RUNNING and now - policy.since >= STEADY:
            self.replaced.append(worker)
            if not self._had_failed:
                self._deaths[worker] = policy.deaths
        elif policy.phase is not WorkerPhase.DOWN:
            return
        elif not self._had_failed:
            self.failed = worker
            return
        del self._starts[worker]
        self._current = None

    def _fallen(self, policies: Mapping[int, RestartPolicy]) -> int | None:
        """Return a worker that was ready and has died since, or None."""
        known = ((worker, deaths) for worker, deaths in self._deaths.items() if worker in policies)
        return next((worker for worker, deaths in known if policies[worker].deaths > deaths), None)


def _can_be_spared(worker: int, policies: Mapping[int, RestartPolicy]) -> bool:
    """Return whether another worker accepts the clients, or none will soon, in which case they wait in the
    socket's queue.
    """
    others = [policy for other, policy in policies.items() if other != worker]
    return any(policy.phase is WorkerPhase.RUNNING for policy in others) or all(
        policy.deaths >= HOPELESS for policy in others
    )
