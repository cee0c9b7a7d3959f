"""Tracks the workers of the relay in the supervisor: their control sockets, their problems, and their joint
`/metrics` and `/readyz`.

Each scrape queries all workers at the same time. A worker that does not answer within `METRICS_TIMEOUT`
counts with its last metrics. The relay is ready if at least one worker accepts connections, and every worker
that accepts connections can write to its spool and sync it. A worker that is being replaced or restarted does
not make the relay unready, because the others accept its clients. A worker that runs and does not answer
makes the relay unready until it is replaced.
"""

import contextlib
import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector

from zonerelay import __version__
from zonerelay.config.settings import Settings, raised_guard, resolve_hostname
from zonerelay.control.socket import control_socket_path, submission_socket_path
from zonerelay.model.clock import Clock
from zonerelay.operations.answers import MetricFamilies, RelayStatus, UnreadyReasons
from zonerelay.operations.catalogue import OperationCall
from zonerelay.operations.errors import ControlError
from zonerelay.operations.requests import PartMetrics, PartReadiness
from zonerelay.store.spool_paths import is_shared
from zonerelay.supervisor.merge.fan_out import WorkerAnswers
from zonerelay.supervisor.sockets import RelaySockets
from zonerelay.supervisor.workers.restart_policy import WorkerPhase
from zonerelay.supervisor.workers.workers import SupervisedWorker, Workers
from zonerelay.telemetry.metrics.instruments import Figures, collect, exposition, reload_figures
from zonerelay.telemetry.metrics.metrics import ReadMetrics

METRICS_TIMEOUT = 2.0
READINESS_TIMEOUT = 7.0
"""Longer than a worker waits for its own disk."""


class RelayState:
    """Tracks the workers of the relay (implements `fan_out.Relay`). `settings` are the active ones, and
    `problems` are those of the last reload.
    """

    def __init__(self, workers: Workers, settings: Settings, sockets: RelaySockets, clock: Clock) -> None:
        self.settings = settings
        self.problems: tuple[str, ...] = ()
        self.unopened: Callable[[], tuple[str, ...]] = tuple
        """Returns the problems of the endpoints that the supervisor could not open."""
        self.draining = False
        self.taken_up = clock.now()
        self.refused: float | None = None
        self.workers, self.listening, self.clock = workers, sockets, clock
        self._started = clock.now()
        self._registry = CollectorRegistry()
        self._registry.register(ReadMetrics(self._figures))
        ProcessCollector(registry=self._registry)

    @property
    def shared(self) -> bool:
        return is_shared(self.settings.spool)

    def members(self) -> Sequence[SupervisedWorker]:
        return [member for _, member in sorted(self.workers.members.items())]

    def sockets(self) -> dict[int, Path]:
        """Return the control sockets of the workers that can answer, by index."""
        return {m.index: control_socket_path(self.settings, m.index) for m in self.members() if m.answers}

    def running(self) -> dict[int, Path]:
        """Return the control sockets of the workers that accept connections, by index."""
        return {
            m.index: control_socket_path(self.settings, m.index)
            for m in self.members()
            if not m.drains_spool and m.policy.phase in (WorkerPhase.RUNNING, WorkerPhase.HUNG)
        }

    def submission(self) -> tuple[Path, ...]:
        """Return the sockets of the workers to which the HTTP server submits mail."""
        return tuple(submission_socket_path(self.settings, worker) for worker in self.running())

    def unreachable(self) -> dict[int, str]:
        return {m.index: m.problem or f"it is {m.policy.phase}" for m in self.members() if not m.answers}

    def where(self) -> str:
        workers = sum(1 for each in self.members() if not each.drains_spool)
        return f"listening on {' '.join(self.listening.addresses())}, {workers} workers"

    def status(self) -> RelayStatus:
        now = self.clock.monotonic()
        return RelayStatus(
            software=__version__,
            pid=os.getpid(),
            hostname=resolve_hostname(self.settings, socket.getfqdn),
            backend=self.settings.spool.backend.value,
            guard=raised_guard(self.settings.spool),
            uptime=self.clock.now() - self._started,
            state="draining" if self.draining else "running",
            listeners=tuple(self.listening.addresses()),
            inbound_connections=0,
            zones=(),
            destinations=(),
            destinations_total=0,
            problems=(*self.problems, *self.unopened()),
            taken_up=self.taken_up,
            refused=self.refused,
            workers=tuple(member.status(now) for member in self.members()),
        )

    async def refresh(self) -> None:
        """Query every worker for its metrics. A worker that does not answer keeps its last ones."""
        starts = {member.index: member.policy.starts for member in self.members()}
        call = OperationCall(request=PartMetrics())
        asked = WorkerAnswers(self, call, sockets=self.sockets(), silence=METRICS_TIMEOUT)
        with contextlib.suppress(ControlError):
            found = await asked.by_worker(MetricFamilies, asked.workers)
            for worker in found.keys() & self.workers.members.keys():  # one may have just been forgotten
                for each in found[worker]:
                    self.workers.totals.take(worker, starts[worker], each.families)

    def exposition(self) -> bytes:
        """Return the totals of all workers and the supervisor's own metrics in the Prometheus text format."""
        return exposition(self.workers.totals.families(collect(self._registry), shared=self.shared))

    def _figures(self) -> Mapping[str, Figures]:
        members = self.members()
        states = Counter(dict.fromkeys(("running", "starting", "stopping", "down", "hung", "emptying"), 0))
        states.update(member.status(0.0).state for member in members)
        return {
            **reload_figures(self.taken_up, self.refused is None),
            "zonerelay_workers": states,
            "zonerelay_worker_restarts_total": {str(m.index): m.policy.restarts for m in members},
        }

    async def readiness(self) -> tuple[str, ...]:
        """Return the reasons why the relay is not ready."""
        if self.draining:
            return ("the relay is shutting down",)
        running = self.running()
        if not running:
            return ("no worker accepts connections",)
        call = OperationCall(request=PartReadiness())
        asked = WorkerAnswers(self, call, sockets=running, silence=READINESS_TIMEOUT)
        try:
            found = await asked.by_worker(UnreadyReasons, asked.workers)
        except ControlError as error:
            return (str(error),)
        reasons = (
            f"worker {worker}: {reason}"
            for worker, frames in found.items()
            for each in frames
            for reason in each.reasons
        )
        return (*asked.missing, *reasons)
