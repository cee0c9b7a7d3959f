"""Notices that no name server answers. A domain whose own servers are silent or broken is no outage.

    answering ──one try was silent──▶ doubted ──a probe is silent, too──▶ lost ──any answer──▶ answering
             └──`FAILURES` different names failed, and no name had an answer between them──▶ lost

A probe asks each server once for a name that every resolver answers by itself (RFC 6303). While the name
servers are lost a probe runs every `PROBE_PAUSE` seconds, so that recovery is noticed without mail. With up
to four servers an outage is known within ten seconds of the first question without an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import TYPE_CHECKING

from zonerelay.routing.dns.answers import DnsStatus

if TYPE_CHECKING:  # a command that only explains needs no metrics
    from zonerelay.telemetry.events.subsystems import NameServerEvents

PROBE = "127.in-addr.arpa"
PROBE_PAUSE = 3.0
FAILURES = 5


class Outage(StrEnum):
    SILENT = "they do not answer, or cannot be reached"
    FAILING = "they answer every question with a failure"


class NameServerWatch:
    """`ask(name)` asks the servers for that name. `servers` names them in texts."""

    def __init__(
        self, servers: str, ask: Callable[[str], Awaitable[DnsStatus]], observer: NameServerEvents | None
    ) -> None:
        self.servers = servers
        self._ask = ask
        self._observer = observer
        self._failed: dict[str, None] = {}
        self._answers = 0
        self._reason: Outage | None = None
        self._since = 0.0
        self._task: asyncio.Task[None] | None = None

    def problem(self) -> str | None:
        """Returns the outage in words, `None` while name servers answer."""
        if not self._reason:
            return None
        return (
            f"no name server is of use ({self.servers}): {self._reason}. New mail is accepted, and mail"
            " whose domain has to be looked up waits in the queue. See that they run and can be reached from"
            " here, or set [dns] servers to others"
            + ("; with [dns] trust_ad they have to understand EDNS" if self._reason is Outage.FAILING else "")
        )

    def state(self) -> str:
        """Returns the servers and whether they answer, for a line of a status."""
        if self._reason:
            return f"{self.servers}: {self._reason}"
        return f"{self.servers}: {'they answer' if self._answers else 'not asked yet'}"

    # Results of questions.

    def silent(self) -> None:
        """Notes that a server was silent, or could not be reached."""
        if not self._reason and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._doubt())

    def ended(self, name: str, status: DnsStatus) -> None:
        """Notes the result of a question."""
        if status.is_definite or status is DnsStatus.NO_TCP:
            self._answered()
        elif status is DnsStatus.TIMEOUT:
            self.silent()
        elif self._reason is Outage.SILENT:
            self._answered()
        elif not self._reason:
            self._failed[name] = None
            if len(self._failed) >= FAILURES:
                self._lose(Outage.FAILING)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    # Probes.

    async def _doubt(self) -> None:
        before = self._answers
        status = await self._ask(PROBE)
        self._task = None
        if status is DnsStatus.TIMEOUT and self._answers == before:
            self._lose(Outage.SILENT)

    def _lose(self, reason: Outage) -> None:
        if self._reason:
            return
        loop = asyncio.get_running_loop()
        self._reason, self._since = reason, loop.time()
        if self._observer is not None:
            self._observer.lost(self.servers, reason)
        if self._task is not None:
            self._task.cancel()
        self._task = loop.create_task(self._look_again())

    async def _look_again(self) -> None:
        # The probe's name has an answer even where no other name has one.
        name = PROBE if self._reason is Outage.SILENT else next(iter(self._failed))
        while self._reason:
            await asyncio.sleep(PROBE_PAUSE)
            self.ended(name, await self._ask(name))

    def _answered(self) -> None:
        self._failed.clear()
        self._answers += 1
        if not self._reason:
            return
        self._reason = None
        if self._observer is not None:
            self._observer.restored(self.servers, asyncio.get_running_loop().time() - self._since)
        # When the task itself has heard the answer, its loop ends here.
        if self._task is not None and self._task is not asyncio.current_task():
            self._task.cancel()
        self._task = None
