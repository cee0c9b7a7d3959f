"""SIGHUP to one worker: the configuration is read and checked in a thread, and taken up on the event loop.

One reload runs at a time; a signal meanwhile starts another one after it, so that the last state of the file
is in force.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from zonerelay.config.load import ConfigError, load
from zonerelay.process.systemd import Notifier
from zonerelay.process.threads import OPERATORS
from zonerelay.worker.worker import Worker


class Reloading:
    """`where` returns the status text of a relay that is ready, for the service manager."""

    def __init__(self, config: Path, worker: Worker, notifier: Notifier, where: Callable[[], str]) -> None:
        self._config = config
        self._worker = worker
        self._notifier = notifier
        self._where = where
        self._task: asyncio.Task[None] | None = None
        self._again = False

    def begin(self) -> None:
        """Starts a reload, or notes that another one follows: the handler of SIGHUP."""
        self._again = True
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        worker = self._worker
        while self._again and not worker.draining:
            self._again = False
            self._notifier.reloading(worker.clock.monotonic())
            try:
                refused = await self._once()
            except Exception as error:  # noqa: BLE001 - what is wrong once must not stop later reloads
                worker.events.trouble("reload", error)
                refused = f"unexpected {type(error).__name__}: {error}"
            if worker.draining:
                return  # what is said now would take back that it stops
            self._notifier.tell(f"REFUSED={refused}" if refused else "TAKEN=1")
            self._notifier.ready(self._where())

    async def _once(self) -> str:
        """Takes the configuration up. Returns the reason of a refusal, or `""`."""
        worker = self._worker
        try:
            # With a thousand routes it takes 50 ms: in a thread the loop runs every millisecond.
            settings = await OPERATORS.run(load, self._config)
        except ConfigError as error:
            first = str(error.problems[0])
            worker.problems = (f"the configuration on disk is wrong, the old one stays in force: {first}",)
            worker.refused_at = worker.clock.now()
            worker.events.lifecycle("reload-refused", problems=len(error.problems), first=first)
            return first
        await worker.reload(settings)
        return worker.refused
