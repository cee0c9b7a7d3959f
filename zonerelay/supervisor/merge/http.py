"""Serves `/metrics` and `/readyz` for all workers together.

Each scrape queries all workers at the same time. A worker that does not answer within `METRICS_TIMEOUT`
counts with its last metrics. The relay is ready if at least one worker accepts connections, and every worker
that accepts connections can write to its spool and sync it. A worker that is being replaced or restarted does
not make the relay unready, because the others accept its clients. A worker that runs and does not answer
makes the relay unready until it is replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector

from zonerelay.control.frames import NoResponseError
from zonerelay.operations.answers import MetricFamilies, UnreadyReasons
from zonerelay.operations.catalogue import OperationCall
from zonerelay.operations.errors import ControlError
from zonerelay.operations.requests import PartMetrics, PartReadiness
from zonerelay.supervisor.merge.control_client import ask
from zonerelay.supervisor.merge.relay_state import RelayState
from zonerelay.telemetry.metrics.families import Family
from zonerelay.telemetry.metrics.instruments import MetricTotals, ReloadCollector, collect, exposition

METRICS_TIMEOUT = 2.0


class RelayMetrics:
    """Serves `/metrics`: the totals of all workers and the supervisor's own metrics."""

    def __init__(self, totals: MetricTotals, state: RelayState) -> None:
        self._totals = totals
        self._state = state
        self._registry = CollectorRegistry()
        self._registry.register(ReloadCollector(lambda: (state.taken_up, state.refused is None)))
        ProcessCollector(registry=self._registry)

    async def refresh(self) -> None:
        """Query every worker for its metrics. A worker that does not answer keeps its last ones."""
        starts = {member.index: member.policy.starts for member in self._state.members()}
        await asyncio.gather(
            *(self._ask(worker, starts[worker], path) for worker, path in self._state.sockets().items())
        )

    async def _ask(self, worker: int, start: int, path: Path) -> None:
        try:
            found = await ask(
                path, OperationCall(request=PartMetrics()), MetricFamilies, silence=METRICS_TIMEOUT
            )
        except (NoResponseError, ControlError):
            return
        if any(
            member.index == worker for member in self._state.members()
        ):  # the worker may have just been forgotten
            self._totals.take(worker, start, found.families)

    def exposition(self) -> bytes:
        own = (*collect(self._registry), *self._own())
        return exposition(self._totals.families(own, shared=self._state.shared))

    def _own(self) -> tuple[Family, ...]:
        members = self._state.members()
        states = dict.fromkeys(("running", "starting", "stopping", "down", "hung", "emptying"), 0)
        for member in members:
            states[member.status(0.0).state] = states.get(member.status(0.0).state, 0) + 1
        running = tuple(("zonerelay_workers", (("state", name),), float(n)) for name, n in states.items())
        restarts = tuple(
            ("zonerelay_worker_restarts_total", (("worker", str(m.index)),), float(m.policy.restarts))
            for m in members
        )
        return (
            Family("zonerelay_workers", "gauge", "Workers by state.", running),
            Family("zonerelay_worker_restarts", "counter", "Restarts of workers.", restarts),
        )


READINESS_TIMEOUT = 7.0
"""Longer than a worker waits for its own disk."""


class RelayReadiness:
    """Serves `/readyz`. Computing it never raises."""

    def __init__(self, state: RelayState) -> None:
        self._state = state

    async def __call__(self) -> tuple[str, ...]:
        if self._state.draining:
            return ("the relay is shutting down",)
        running = self._state.running()
        if not running:
            return ("no worker accepts connections",)
        answers = await asyncio.gather(*(_reasons(worker, path) for worker, path in running.items()))
        return tuple(reason for reasons in answers for reason in reasons)


async def _reasons(worker: int, path: Path) -> Sequence[str]:
    try:
        found = await ask(
            path, OperationCall(request=PartReadiness()), UnreadyReasons, silence=READINESS_TIMEOUT
        )
    except (NoResponseError, ControlError) as error:
        return [f"worker {worker}: {error}"]
    return [f"worker {worker}: {reason}" for reason in found.reasons]
