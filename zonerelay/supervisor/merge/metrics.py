"""`/metrics` of all workers together, with a few of the supervisor's own.

Each scrape asks every worker at once; one that does not answer within `PATIENCE` counts with what it said
last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector

from zonerelay.control.messages.answers import Families
from zonerelay.control.messages.requests import PartMetrics
from zonerelay.control.socket.errors import ControlError
from zonerelay.supervisor.merge.asking import UnansweredError, ask
from zonerelay.supervisor.workers.member import Member
from zonerelay.telemetry.metrics.families import Accounts, Family, collect, exposition

PATIENCE = 2.0


class CrewMetrics:
    def __init__(
        self,
        accounts: Accounts,
        *,
        sockets: Callable[[], Mapping[int, Path]],
        members: Callable[[], Sequence[Member]],
        shared: Callable[[], bool],
    ) -> None:
        self._accounts = accounts
        self._sockets = sockets
        self._members = members
        self._shared = shared
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)

    async def refresh(self) -> None:
        lives = {member.index: member.life.starts for member in self._members()}
        await asyncio.gather(
            *(self._ask(worker, lives[worker], path) for worker, path in self._sockets().items())
        )

    async def _ask(self, worker: int, life: int, path: Path) -> None:
        try:
            found = await ask(path, PartMetrics(), Families, silence=PATIENCE)
        except (UnansweredError, ControlError):
            return
        if any(member.index == worker for member in self._members()):  # or it has just been forgotten
            self._accounts.take(worker, life, found.families)

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
            ("zonerelay_worker_restarts_total", (("worker", str(m.index)),), float(m.life.restarts))
            for m in members
        )
        return (
            Family("zonerelay_workers", "gauge", "Workers by what they are doing.", running),
            Family("zonerelay_worker_restarts", "counter", "Starts of workers after their first.", restarts),
        )
