"""One worker after the other: which one is to be replaced next. Pure.

Policy: never two at a time, and none while no other one takes connections, so that clients wait as little as
can be; nobody is waited for who dies at each start. A successor has come up when it has lived for a moment:
one that dies with its first client would else be taken for a success. When one does not come up, or dies
while others are still being replaced, the rest stay as they are and the roll has failed, unless that worker
was in trouble before.
"""

from __future__ import annotations

from collections.abc import Mapping

from zonerelay.supervisor.workers.restart_policy import Phase, RestartPolicy

STEADY = 1.0
"""Seconds for which a successor runs before the next worker's turn."""
HOPELESS = 3
"""Deaths in a row after which nobody waits for a worker."""


class RollingRestart:
    """`failed` says who did not come up, `replaced` who did, `done` that nothing is left to do."""

    def __init__(self, workers: Mapping[int, RestartPolicy]) -> None:
        self._starts = {worker: policy.starts for worker, policy in sorted(workers.items())}
        self._current: int | None = None
        self._was_in_trouble = False
        self.failed: int | None = None
        self.replaced: list[int] = []
        self._deaths: dict[int, int] = {}
        """Of those that have been replaced and were not in trouble before."""

    @property
    def done(self) -> bool:
        return self.failed is not None or (self._current is None and not self._starts)

    def step(self, policies: Mapping[int, RestartPolicy], now: float) -> int | None:
        """The worker to replace now, if one is."""
        self._look(policies, now)
        if self.done or self._current is not None:
            return None
        for worker in self._starts:
            if not _can_be_spared(worker, policies):
                continue
            policy = policies[worker]
            self._current = worker
            self._was_in_trouble = policy.deaths > 0 and policy.phase is not Phase.RUNNING
            # One that had died before its turn has started again since: that was not for us.
            self._starts[worker] = policy.starts
            return worker
        return None

    def _look(self, policies: Mapping[int, RestartPolicy], now: float) -> None:
        """Has the one that is being replaced come up, or failed to?"""
        self._starts = {worker: starts for worker, starts in self._starts.items() if worker in policies}
        if self.failed is None:
            self.failed = self._fallen(policies)
        if self._current is not None and self._current not in policies:
            self._current = None
        worker = self._current
        if self.failed is not None or worker is None or policies[worker].starts <= self._starts[worker]:
            return
        policy = policies[worker]
        if policy.phase is Phase.RUNNING and now - policy.since >= STEADY:
            self.replaced.append(worker)
            if not self._was_in_trouble:
                self._deaths[worker] = policy.deaths
        elif policy.phase is not Phase.DOWN:
            return
        elif not self._was_in_trouble:
            self.failed = worker
            return
        del self._starts[worker]
        self._current = None

    def _fallen(self, policies: Mapping[int, RestartPolicy]) -> int | None:
        """Who had come up, and has died since without being asked to."""
        known = ((worker, deaths) for worker, deaths in self._deaths.items() if worker in policies)
        return next((worker for worker, deaths in known if policies[worker].deaths > deaths), None)


def _can_be_spared(worker: int, policies: Mapping[int, RestartPolicy]) -> bool:
    """Somebody else takes the clients, or nobody will soon: then they wait in the kernel's queue."""
    others = [policy for other, policy in policies.items() if other != worker]
    return any(policy.phase is Phase.RUNNING for policy in others) or all(
        policy.deaths >= HOPELESS for policy in others
    )
