"""Serves `/metrics` and `/readyz` for all workers together.

Each scrape queries all workers at the same time. A worker that does not answer within `METRICS_TIMEOUT`
counts with its last metrics. The relay is ready if at least one worker accepts connections, and every worker
that accepts connections can write to its spool and sync it. A worker that is being replaced or restarted does
not make the relay unready, because the others accept its clients. A worker that runs and does not answer
makes the relay unready until it is replaced.
"""

from __future__ import annotations

import contextlib
from collections import Counter

from prometheus_client import CollectorRegistry, ProcessCollector

from zonerelay.operations.answers import MetricFamilies, UnreadyReasons
from zonerelay.operations.catalogue import OperationCall
from zonerelay.operations.errors import ControlError
from zonerelay.operations.requests import PartMetrics, PartReadiness
from zonerelay.supervisor.merge.control_client import WorkerAnswers
from zonerelay.supervisor.merge.relay_state import RelayState
from zonerelay.telemetry.metrics.families import Family
from zonerelay.telemetry.metrics.instruments import (
    MetricTotals,
    ReadMetrics,
    collect,
    exposition,
    reload_metrics,
)

METRICS_TIMEOUT = 2.0


class RelayMetrics:
    """Serves `/metrics`: the totals of all workers and the supervisor's own metrics."""

    def __init__(self, totals: MetricTotals, state: RelayState) -> None:
        self._totals = totals
        self._state = state
        self._registry = CollectorRegistry()
        self._registry.register(ReadMetrics(lambda: reload_metrics(state.taken_up, state.refused is None)))
        ProcessCollector(registry=self._registry)

    async def refresh(self) -> None:
        """Query every worker for its metrics. A worker that does not answer keeps its last ones."""
        starts = {member.index: member.policy.starts for member in self._state.members()}
        call = OperationCall(request=PartMetrics())
        asked = WorkerAnswers(self._state, call, sockets=self._state.sockets(), silence=METRICS_TIMEOUT)
        found: dict[int, list[MetricFamilies]] = {}
        with contextlib.suppress(ControlError):
            found = await asked.by_worker(MetricFamilies, asked.workers(), partial=True)
        present = {member.index for member in self._state.members()}  # one may have just been forgotten
        for worker in found.keys() & present:
            for each in found[worker]:
                self._totals.take(worker, starts[worker], each.families)

    def exposition(self) -> bytes:
        own = (*collect(self._registry), *self._own())
        return exposition(self._totals.families(own, shared=self._state.shared))

    def _own(self) -> tuple[Family, ...]:
        members = self._state.members()
        states = Counter(dict.fromkeys(("running", "starting", "stopping", "down", "hung", "emptying"), 0))
        states.update(member.status(0.0).state for member in members)
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
        call = OperationCall(request=PartReadiness())
        asked = WorkerAnswers(self._state, call, sockets=running, silence=READINESS_TIMEOUT)
        try:
            found = await asked.by_worker(UnreadyReasons, asked.workers(), partial=True)
        except ControlError as error:
            return (str(error),)
        reasons = (
            f"worker {worker}: {reason}"
            for worker, frames in found.items()
            for each in frames
            for reason in each.reasons
        )
        return (*asked.missing, *reasons)
