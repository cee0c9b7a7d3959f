"""All workers: their processes started, watched, restarted, replaced and stopped, as their lives say.

One task (`run`) does everything; signals, ends and packets only wake it. Promise: no process is left behind,
whatever happens to it, and none is started twice for one spool, for a successor is started only when the one
before it has been waited for.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from zonerelay.process.setup import StartError
from zonerelay.supervisor.reload.rolling import Roll
from zonerelay.supervisor.workers.child import Child
from zonerelay.supervisor.workers.endings import ending
from zonerelay.supervisor.workers.member import MAX_WORDS, Member
from zonerelay.supervisor.workers.restart_policy import Act, Life, Patience, Phase
from zonerelay.telemetry.events.events import Field, LogSink
from zonerelay.telemetry.metrics.families import Accounts, Family

TICK = 0.25
HELD_UP = 2.0
"""Seconds between two ticks that say that this process itself was not allowed to run."""


class Launch(Protocol):
    """Command line, environment and descriptors of a new process."""

    def __call__(
        self, index: int, *, heir: bool
    ) -> tuple[Sequence[str], Mapping[str, str], Sequence[int]]: ...


class Crew:
    def __init__(
        self,
        *,
        launch: Launch,
        patience: Patience,
        log: LogSink,
        accounts: Accounts,
        now: Callable[[], float],
    ) -> None:
        self.members: dict[int, Member] = {}
        self.accounts = accounts
        self.patience = patience
        self.roll: Roll | None = None
        self.edition = 0
        """Of the configuration in force: one more whenever that changes."""
        self._launch = launch
        self._log = log
        self._now = now
        self._awake = asyncio.Event()
        self._stopping = False
        self.ready = asyncio.get_running_loop().create_future()
        """Done when all workers listen for the first time; a StartError when one cannot."""

    # ---- who there is -----------------------------------------------------------------------------

    @property
    def lives(self) -> dict[int, Life]:
        """Of those that take connections."""
        return {index: each.life for index, each in self.members.items() if not each.heir}

    def employ(self, workers: int, heirs: Sequence[int] = ()) -> None:
        """Have so many workers from now on, and these for the spools of others."""
        for index in (*range(workers), *heirs):
            member = self.members.get(index)
            heir = index >= workers
            if member is None or member.life.phase is Phase.OVER:
                self.members[index] = Member(index, Life(self.patience, self._now()), heir)
                continue
            member.life.want()
            if member.heir != heir:
                member.heir = heir
                self._do(member, member.life.replace(self._now()))
        self.wake()

    def dismiss(self, workers: int, *, heirs: bool) -> None:
        """Have so many workers only. `heirs`: the others stay until their spools are empty."""
        for index, member in self.members.items():
            if index < workers or member.heir:
                continue
            if heirs:
                member.heir = True
                self._do(member, member.life.replace(self._now()))
            else:
                self._do(member, member.life.stop(self._now()))
        self.wake()

    def replace_heirs(self) -> None:
        """Those that have another configuration. They take no clients, so at once."""
        for member in self.members.values():
            if member.heir and member.edition != self.edition:
                self._do(member, member.life.replace(self._now()))
        self.wake()

    def tell_to_reload(self, member: Member) -> None:
        member.edition = self.edition
        if member.child is not None:
            member.child.signal(signal.SIGHUP)

    def change_patience(self, patience: Patience) -> None:
        self.patience = patience
        for member in self.members.values():
            member.life.patience = patience

    # ---- the one task -----------------------------------------------------------------------------

    def wake(self) -> None:
        self._awake.set()

    def stop(self) -> None:
        """Everybody, for good: `run` returns when all have ended."""
        self._stopping = True
        self.roll = None
        for member in self.members.values():
            self._do(member, member.life.stop(self._now()))
        self.wake()

    def kill(self) -> None:
        """At once, as in a crash, which loses nothing."""
        for member in self.members.values():
            if member.child is not None:
                member.child.signal(signal.SIGKILL)

    async def run(self) -> None:
        last = self._now()
        while not (self._stopping and all(each.life.phase is Phase.OVER for each in self.members.values())):
            now = self._now()
            late, last = now - last > HELD_UP, now
            for member in list(self.members.values()):
                await self._step(member, now, late=late)
            self._step_roll()
            self._tell_ready()
            self._awake.clear()
            try:
                async with asyncio.timeout(TICK):
                    await self._awake.wait()
            except TimeoutError:
                pass

    async def _step(self, member: Member, now: float, *, late: bool) -> None:
        act = member.life.due(now, late=late)
        if act is Act.START:
            await self._start(member)
        elif act is not None:
            self._do(member, act)
        if member.life.phase is Phase.OVER and not self._stopping:
            del self.members[member.index]
            self.accounts.forget(member.index)

    def _step_roll(self) -> None:
        if self.roll is None:
            return
        worker = self.roll.step(self.lives, self._now())
        if worker is not None:
            member = self.members[worker]
            self._log.emit("info", "worker-replaced", {"worker": worker, "pid": _pid(member)})
            self._do(member, member.life.replace(self._now()))

    def _tell_ready(self) -> None:
        if self.ready.done():
            return
        if all(life.phase is Phase.RUNNING for life in self.lives.values()):
            self.ready.set_result(None)

    async def _start(self, member: Member) -> None:
        child = Child(
            lambda child, packet: self._heard(member, child, packet),
            lambda child, status: self._ended(member, child, status),
        )
        member.child, member.because, member.last_words, member.metrics = child, "", "", ""
        member.emptied, member.edition = False, self.edition
        member.life.started(self._now())
        try:
            command, environment, descriptors = self._launch(member.index, heir=member.heir)
            await child.start(command, environment, descriptors)
        except OSError as error:
            member.last_words = str(error)
            self._ended(member, child, 127)
            return
        self._log.emit("info", "worker-started", {"worker": member.index, "pid": child.pid})
        if member.life.phase is Phase.STOPPING:  # somebody wanted that before there was a process to tell
            child.signal(signal.SIGTERM)

    def _do(self, member: Member, act: Act | None) -> None:
        if member.child is None or act is None or act is Act.START:
            return
        if act is Act.TERMINATE and member.life.phase is Phase.HUNG:
            member.because = f"no sign of life for {self.patience.silence:g} s"
            self._log.emit("error", "worker-hung", {"worker": member.index, "pid": _pid(member)})
        elif act is Act.KILL and not member.because:
            member.because = (
                "it did not stop in time" if member.life.phase is Phase.STOPPING else "not ready in time"
            )
        member.child.signal(signal.SIGTERM if act is Act.TERMINATE else signal.SIGKILL)

    # ---- what the processes say -------------------------------------------------------------------

    def _heard(self, member: Member, child: Child, packet: str) -> None:
        if child is not member.child:
            return
        now = self._now()
        key, _, value = packet.partition("=")
        match key:
            case "READY":
                member.life.ready(now)
                if member.edition != self.edition:  # it had read the former one when it was started
                    self.tell_to_reload(member)
                self.wake()
            case "STOPPING":
                member.life.stopping(now)
            case "STATUS":
                member.last_words = value[:MAX_WORDS]
            case "TAKEN" | "REFUSED":
                member.verdict = "" if key == "TAKEN" else value
                member.verdicts += 1
            case "EMPTY":
                member.emptied = True
            case "MORE":
                member.metrics += value
            case "METRICS":
                self._last_metrics(member, value)
            case _:
                member.life.heard(now)

    def _last_metrics(self, member: Member, text: str) -> None:
        text, member.metrics = member.metrics + text, ""
        families = msgspec.json.decode(text, type=tuple[Family, ...])
        self.accounts.take(member.index, member.life.starts, families)
        # An answer to a scrape that was on its way has less.
        self.accounts.bury(member.index, member.life.starts)

    def _ended(self, member: Member, child: Child, status: int) -> None:
        asked = member.life.phase is Phase.STOPPING and not member.because
        first_time = member.life.phase is Phase.STARTING and not self.ready.done()
        why = ending(status, killed_because=member.because, last_words=member.last_words)
        member.child = None
        # An empty spool is the end of an heir only: it may be wanted as a worker again by now.
        member.emptied = member.emptied and member.heir
        member.life.ended(self._now(), finished=member.emptied)
        self.accounts.bury(member.index, member.life.starts)
        fields: dict[str, Field] = {"worker": member.index, "pid": child.pid, "why": why}
        if member.life.phase is Phase.DOWN and not asked:
            fields["restart_in"] = round(max(member.life.next_start - self._now(), 0.0), 3)
        member.problem = "" if asked or member.emptied else why
        self._log.emit("info" if asked or member.emptied else "error", "worker-ended", fields)
        if first_time and not member.heir and not self.ready.done():
            self.ready.set_exception(StartError(f"{member.name} {why}"))
        self.wake()


def _pid(member: Member) -> int:
    return 0 if member.child is None else member.child.pid
