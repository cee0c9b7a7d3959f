"""What a relay opens beside mail: when it cannot be opened, mail moves all the same, and it is tried again.

A program that has port 8025 at the moment of a restart once kept all mail from moving.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from zonerelay.process.tasks import cancel_all

RETRY = 5.0
"""Seconds between two attempts."""


class Part(Protocol):
    async def start(self) -> None: ...

    async def close(self) -> None: ...


class Retried:
    """One part, which `close` closes. `what` names it in the problem, `where` in the log; `failure` is the
    error that its `start` raises, with a text that says what to do; those in `final` end the relay's start.
    `restored` is called when a later attempt succeeds.
    """

    def __init__(
        self,
        what: str,
        where: str,
        part: Part,
        failure: type[Exception],
        *,
        final: tuple[type[Exception], ...] = (),
        trouble: Callable[[str, BaseException], None],
        restored: Callable[[str], None],
    ) -> None:
        self._what, self._where = what, where
        self._part, self._failure, self._final = part, failure, final
        self._trouble, self._restored = trouble, restored
        self._retrying: asyncio.Task[None] | None = None
        self._error = ""

    def problems(self) -> tuple[str, ...]:
        if not self._error:
            return ()
        return (f"{self._what}: {self._error} (mail moves; it is tried again every {RETRY:g} seconds)",)

    async def start(self) -> None:
        """Try once, and go on trying until `close`. Raises what is `final`."""
        if not await self._try(self._final):
            self._retrying = asyncio.get_running_loop().create_task(self._retry())

    async def close(self) -> None:
        await cancel_all(self._retrying)
        await self._part.close()

    async def _try(self, final: tuple[type[Exception], ...] = ()) -> bool:
        try:
            await self._part.start()
        except final:
            raise
        except self._failure as error:
            if str(error) != self._error:  # each reason once
                self._error = str(error)
                self._trouble(self._where, error)
            return False
        self._error = ""
        return True

    async def _retry(self) -> None:
        while True:
            await asyncio.sleep(RETRY)
            if await self._try():
                self._restored(self._where)
                return
