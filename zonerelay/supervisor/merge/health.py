"""Is the relay, all its workers together, ready for mail? What `/readyz` of the supervisor says.

Ready: at least one worker takes connections, and each that does can write and sync its spool. A worker that
is being replaced or started again is no reason against it, for the others take its clients; one that answers
nothing is, until it is replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from zonerelay.admin.health import Readiness
from zonerelay.control.messages.answers import Reasons
from zonerelay.control.messages.requests import PartReadiness
from zonerelay.control.socket.errors import ControlError
from zonerelay.supervisor.merge.asking import UnansweredError, ask

PATIENCE = 7.0
"""Longer than a worker waits for its own disk."""


class Readinesses:
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
        found = await ask(path, PartReadiness(), Reasons, silence=PATIENCE)
    except (UnansweredError, ControlError) as error:
        return [f"worker {worker}: {error}"]
    return [f"worker {worker}: {reason}" for reason in found.reasons]
