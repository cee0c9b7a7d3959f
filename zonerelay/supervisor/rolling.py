"""One worker after the other: which one is to be replaced next. Pure.

Policy: never two at a time, and none while no other one takes connections, so that clients wait as little as
can be. When a replaced worker does not come up, the others stay as they are and the roll has failed.
"""

from __future__ import annotations

from collections.abc import Mapping

from zonerelay.supervisor.life import Life, Phase


class Roll:
    """`failed` says who did not come up, `replaced` who did, `done` that nothing is left to do."""

    def __init__(self, workers: Mapping[int, Life]) -> None:
        self._starts = {worker: life.starts for worker, life in sorted(workers.items())}
        self._current: int | None = None
        self.failed: int | None = None
        self.replaced: list[int] = []

    @property
    def done(self) -> bool:
        return self.failed is not None or (self._current is None and not self._starts)

    def step(self, lives: Mapping[int, Life]) -> int | None:
        """The worker to replace now, if one is."""
        self._look(lives)
        if self.done or self._current is not None:
            return None
        for worker in self._starts:
            if worker not in lives:
                continue
            others = [life for other, life in lives.items() if other != worker]
            if not others or any(life.phase is Phase.RUNNING for life in others):
                self._current = worker
                # One that had died before its turn has started again since: that was not for us.
                self._starts[worker] = lives[worker].starts
                return worker
        return None

    def _look(self, lives: Mapping[int, Life]) -> None:
        """Has the one that is being replaced come up, or failed to?"""
        self._starts = {worker: starts for worker, starts in self._starts.items() if worker in lives}
        if self._current is not None and self._current not in lives:
            self._current = None
        worker = self._current
        if worker is None:
            return
        life = lives[worker]
        if life.starts > self._starts[worker]:
            if life.phase is Phase.RUNNING:
                del self._starts[worker]
                self.replaced.append(worker)
                self._current = None
            elif life.phase is Phase.DOWN:
                self.failed = worker
