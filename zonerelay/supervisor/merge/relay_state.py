"""Tracks the state of the relay in the supervisor: its workers, their control sockets, and its problems."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from zonerelay import __version__
from zonerelay.config.settings import Settings, raised_guard, resolve_hostname
from zonerelay.control.socket import control_socket_path, submission_socket_path
from zonerelay.model.clock import Clock
from zonerelay.operations.answers import RelayStatus
from zonerelay.store.spool_paths import is_shared
from zonerelay.supervisor.sockets import RelaySockets
from zonerelay.supervisor.workers.restart_policy import WorkerPhase
from zonerelay.supervisor.workers.workers import SupervisedWorker, Workers


class RelayState:
    """Tracks the workers of the relay (implements `control_client.Relay`). `settings` are the active ones,
    and `problems` are those of the last reload.
    """

    def __init__(self, workers: Workers, settings: Settings, sockets: RelaySockets, clock: Clock) -> None:
        self.settings = settings
        self.problems: tuple[str, ...] = ()
        self.unopened: Callable[[], tuple[str, ...]] = tuple
        """Returns the problems of the endpoints that the supervisor could not open."""
        self.draining = False
        self.taken_up = clock.now()
        self.refused: float | None = None
        self._workers = workers
        self._listening = sockets
        self._clock = clock
        self._started = clock.now()

    @property
    def shared(self) -> bool:
        return is_shared(self.settings.spool)

    def members(self) -> Sequence[SupervisedWorker]:
        return [member for _, member in sorted(self._workers.members.items())]

    def sockets(self) -> dict[int, Path]:
        """Return the control sockets of the workers that answer, by index."""
        return {m.index: control_socket_path(self.settings, m.index) for m in self.members() if m.answers}

    def running(self) -> dict[int, Path]:
        """Return the control sockets of the workers that accept connections, by index."""
        return {
            m.index: control_socket_path(self.settings, m.index)
            for m in self.members()
            if not m.drains_spool and m.policy.phase in (WorkerPhase.RUNNING, WorkerPhase.HUNG)
        }

    def submission(self) -> tuple[Path, ...]:
        """Return the sockets on which workers accept mail from the HTTP server."""
        return tuple(submission_socket_path(self.settings, worker) for worker in self.running())

    def unreachable(self) -> dict[int, str]:
        return {m.index: m.problem or f"it is {m.policy.phase}" for m in self.members() if not m.answers}

    def where(self) -> str:
        workers = sum(1 for each in self.members() if not each.drains_spool)
        return f"listening on {' '.join(self._listening.addresses())}, {workers} workers"

    def status(self) -> RelayStatus:
        now = self._clock.monotonic()
        return RelayStatus(
            software=__version__,
            pid=os.getpid(),
            hostname=resolve_hostname(self.settings, socket.getfqdn),
            backend=self.settings.spool.backend.value,
            guard=raised_guard(self.settings.spool),
            uptime=self._clock.now() - self._started,
            state="draining" if self.draining else "running",
            listeners=tuple(self._listening.addresses()),
            inbound_connections=0,
            zones=(),
            destinations=(),
            destinations_total=0,
            problems=(*self.problems, *self.unopened()),
            taken_up=self.taken_up,
            refused=self.refused,
            workers=tuple(member.status(now) for member in self.members()),
        )
