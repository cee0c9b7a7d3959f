"""What the supervisor serves over HTTP for all workers together: `/metrics` and `/readyz`.

Each scrape asks every worker at once; a worker that does not answer within `METRICS_TIMEOUT` counts with its
last metrics. The relay is ready when at least one worker takes connections and each that does can write and
sync its spool. A worker that is being replaced or restarted does not make the relay unready, because the
others take its clients; a worker that runs and does not answer does, until it is replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector

from zonerelay.admin.health import Readiness
from zonerelay.control.messages.part_messages import Families, PartMetrics, PartReadiness, Reasons
from zonerelay.control.socket.errors import ControlError
from zonerelay.supervisor.merge.control_client import UnansweredError, ask
from zonerelay.supervisor.workers.workers import SupervisedWorker
from zonerelay.telemetry.metrics.families import Family, MetricTotals, collect, exposition

METRICS_TIMEOUT = 2.0


class RelayMetrics:
    def __init__(
        self,
        accounts: MetricTotals,
        *,
        sockets: Callable[[], Mapping[int, Path]],
        members: Callable[[], Sequence[SupervisedWorker]],
        shared: Callable[[], bool],
    ) -> None:
        self._accounts = accounts
        self._sockets = sockets
        self._members = members
        self._shared = shared
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)

    async def refresh(self) -> None:
        starts = {member.index: member.policy.starts for member in self._members()}
        await asyncio.gather(
            *(self._ask(worker, starts[worker], path) for worker, path in self._sockets().items())
        )

    async def _ask(self, worker: int, start: int, path: Path) -> None:
        try:
            found = await ask(path, PartMetrics(), Families, silence=METRICS_TIMEOUT)
        except (UnansweredError, ControlError):
            return
        if any(member.index == worker for member in self._members()):  # or it has just been forgotten
            self._accounts.take(worker, start, found.families)

    def exposition(self) -> bytes:
        own = (*collect(self._registry), *self._own())
        return exposition(self._accounts.families(own, shared=self._shared()))

    def _own(self) -> tuple[Family, ...]:
        members = self._members()
        states = dict.fromkeys(("running", "starting", "stopping", "down", "hung", "emptying"), 0)
        for member in members:
            states[member.status(0.0).state] = states.get(member.status(0.0).state, 0) + 1
        running = tuple(("zonerelay_workers", (("state", name),), float(n)) for name, n in states.items())
        restarts = tuple(
            ("zonerelay_worker_restarts_total", (("worker", str(m.index)),), float(m.policy.restarts))
            for m in members
        )
        return (
            Family("zonerelay_workers", "gauge", "Workers by what they are doing.", running),
            Family("zonerelay_worker_restarts", "counter", "Starts of workers after their first.", restarts),
        )


READINESS_TIMEOUT = 7.0
"""Longer than a worker waits for its own disk."""


class RelayReadiness:
    """`running` are the control sockets of the workers that take connections."""

    def __init__(self, running: Callable[[], Mapping[int, Path]], draining: Callable[[], bool]) -> None:
        self._running = running
        self._draining = draining

    async def __call__(self) -> Readiness:
        if self._draining():
            return Readiness(("the relay is shutting down",))
        running = self._running()
        if not running:
            return Readiness(("no worker takes connections",))
        answers = await asyncio.gather(*(_reasons(worker, path) for worker, path in running.items()))
        return Readiness(tuple(reason for reasons in answers for reason in reasons))


async def _reasons(worker: int, path: Path) -> Sequence[str]:
    try:
        found = await ask(path, PartReadiness(), Reasons, silence=READINESS_TIMEOUT)
    except (UnansweredError, ControlError) as error:
        return [f"worker {worker}: {error}"]
    return [f"worker {worker}: {reason}" for reason in found.reasons]
