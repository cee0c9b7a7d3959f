"""What the supervisor can say about its relay: who runs, where each answers, what is wrong."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from zonerelay import __version__
from zonerelay.config.hostname import resolve_hostname
from zonerelay.config.settings import Settings
from zonerelay.config.tables.spool import raised_guard
from zonerelay.control.messages.answers import RelayStatus
from zonerelay.control.socket.socket_file import control_socket_path
from zonerelay.model.clock import Clock
from zonerelay.store.spool_paths import is_shared
from zonerelay.supervisor.sockets import Sockets
from zonerelay.supervisor.workers.member import Member
from zonerelay.supervisor.workers.restart_policy import Phase
from zonerelay.supervisor.workers.workers import Crew


class Board:
    """Satisfies `asked.Relay`. `settings` are those in force, `problems` are of the last reload."""

    def __init__(self, crew: Crew, settings: Settings, sockets: Sockets, clock: Clock) -> None:
        self.settings = settings
        self.problems: tuple[str, ...] = ()
        self.draining = False
        self._crew = crew
        self._listening = sockets
        self._clock = clock
        self._started = clock.now()

    @property
    def shared(self) -> bool:
        return is_shared(self.settings.spool)

    def members(self) -> Sequence[Member]:
        return [member for _, member in sorted(self._crew.members.items())]

    def sockets(self) -> dict[int, Path]:
        """Of those who can be asked."""
        return {m.index: control_socket_path(self.settings, m.index) for m in self.members() if m.answers}

    def running(self) -> dict[int, Path]:
        """Of those who take connections."""
        return {
            m.index: control_socket_path(self.settings, m.index)
            for m in self.members()
            if not m.heir and m.life.phase in (Phase.RUNNING, Phase.HUNG)
        }

    def unreachable(self) -> dict[int, str]:
        return {m.index: m.problem or f"it is {m.life.phase}" for m in self.members() if not m.answers}

    def where(self) -> str:
        workers = sum(1 for each in self.members() if not each.heir)
        return f"listening on {' '.join(self._listening.addresses())}, {workers} workers"

    def status(self) -> RelayStatus:
        now = self._crew_now()
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
            problems=self.problems,
            workers=tuple(member.status(now) for member in self.members()),
        )

    def _crew_now(self) -> float:
        return self._clock.monotonic()
