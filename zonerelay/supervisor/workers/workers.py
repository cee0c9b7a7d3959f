"""Manages all worker processes: the supervisor starts, watches, restarts, replaces and stops them.

One task (`run`) takes every step that the restart policies require. Signals, exits and packets only wake it.
Promise: no process outlives the supervisor's run unnoticed, and a spool never has two processes, because a
successor is started only after its predecessor has been waited for.
"""

import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial

import msgspec

from zonerelay.config.settings import Settings
from zonerelay.operations.answers import WorkerStatus
from zonerelay.process.setup import StartError
from zonerelay.supervisor.workers.child import Child, ending
from zonerelay.supervisor.workers.restart_policy import Action, RestartPolicy, WorkerPhase, WorkerTimeouts
from zonerelay.telemetry.events.events import Field, LogSink
from zonerelay.telemetry.metrics.families import Family
from zonerelay.telemetry.metrics.instruments import MetricTotals

MAX_WORDS = 500


class SupervisedWorker(msgspec.Struct):
    """A worker with its process and its restart policy. If `drains_spool`, it does not listen and ends when
    its spool is empty. `edition` is that of its configuration. `verdict` completes with its refusal of a
    reload, or "".
    """

    index: int
    policy: RestartPolicy
    drains_spool: bool = False
    edition: int = 0
    child: Child | None = None
    emptied: bool = False
    last_words: str = ""
    metrics: str = ""
    because: str = ""
    problem: str = ""
    verdict: asyncio.Future[str] | None = None

    @property
    def name(self) -> str:
        return f"worker {self.index}"

    @property
    def pid(self) -> int:
        return 0 if self.child is None else self.child.pid

    @property
    def answers(self) -> bool:
        """Whether the worker's control socket is open."""
        return self.policy.phase in (WorkerPhase.RUNNING, WorkerPhase.HUNG, WorkerPhase.STOPPING)

    def status(self, now: float) -> WorkerStatus:
        state = (
            "emptying"
            if self.drains_spool and self.policy.phase is WorkerPhase.RUNNING
            else str(self.policy.phase)
        )
        return WorkerStatus(
            worker=self.index,
            pid=self.pid,
            state=state,
            uptime=max(now - self.policy.since, 0.0),
            restarts=self.policy.restarts,
            problem=self.problem + self._next_start(now),
        )

    def _next_start(self, now: float) -> str:
        left = self.policy.next_start - now
        return f"; restarting in {left:.0f} s" if self.policy.phase is WorkerPhase.DOWN and left >= 1 else ""


START_TIMEOUT = 600.0
"""Seconds that a worker may need to get ready, because it first reads the spool that a crash left. It equals
the unit's TimeoutStartSec.
"""
STOP_GRACE = 10.0
"""Seconds in addition to shutdown_timeout, in which outcomes are synced and the spool is closed."""
TICK = 0.25
HELD_UP = 2.0
"""Seconds between two ticks that show that this process itself was not running."""


def timeouts_of(settings: Settings) -> WorkerTimeouts:
    return WorkerTimeouts(
        start=START_TIMEOUT, silence=settings.worker_timeout, stop=settings.shutdown_timeout + STOP_GRACE
    )


Launch = Callable[[int, bool], tuple[Sequence[str], Mapping[str, str], Sequence[int]]]
"""`launch(index, drains_spool)` returns command line, environment and descriptors of a new process."""


@dataclass(eq=False, repr=False)
class Workers:
    """Starts, watches, restarts and stops the worker processes of the relay."""

    _: KW_ONLY
    launch: Launch
    timeouts: WorkerTimeouts
    log: LogSink
    totals: MetricTotals
    now: Callable[[], float]

    def __post_init__(self) -> None:
        self.members: dict[int, SupervisedWorker] = {}
        self.edition = 0
        """The edition of the active configuration, which increases with every change."""
        self._awake = asyncio.Event()
        self._stopping = False
        self.ready = asyncio.get_running_loop().create_future()
        """Completes when all workers listen for the first time, with a StartError if one cannot."""

    # ---- the workers there are -----------------------------------------------------------------------------

    @property
    def policies(self) -> dict[int, RestartPolicy]:
        """The restart policies of the workers that accept connections, by index."""
        return {index: each.policy for index, each in self.members.items() if not each.drains_spool}

    def employ(self, workers: int, draining: Sequence[int] = ()) -> None:
        """Set the number of workers and the indexes of the workers that only drain their spools. All others
        are stopped.
        """
        stay = (*range(workers), *draining)
        for index in stay:
            member = self.members.get(index)
            drains_spool = index >= workers
            if member is None:
                policy = RestartPolicy(self.timeouts, self.now())
                self.members[index] = SupervisedWorker(index, policy, drains_spool)
                continue
            member.policy.wanted = True
            if member.drains_spool != drains_spool or member.policy.phase is WorkerPhase.OVER:
                member.drains_spool = drains_spool
                self._do(member, member.policy.restart(self.now()))
        for index, policy in self.policies.items():
            if index not in stay:
                self._do(self.members[index], policy.stop(self.now()))
        self.wake()

    def restart(self, worker: int) -> None:
        """Replace the process of a worker."""
        member = self.members[worker]
        self.log.emit("info", "worker-replaced", {"worker": worker, "pid": member.pid})
        self._do(member, member.policy.restart(self.now()))
        self.wake()

    def replace_draining(self) -> None:
        """Replace the draining workers that run with an older configuration. This happens at once, because
        they have no clients.
        """
        for member in self.members.values():
            if member.drains_spool and member.edition != self.edition:
                self._do(member, member.policy.restart(self.now()))
        self.wake()

    def tell_to_reload(self, member: SupervisedWorker) -> asyncio.Future[str]:
        """Send SIGHUP to a worker, and return a future of the reason why it refused the reload, or "" if it
        did not. A worker that ends in the meantime reads the configuration at its next start.
        """
        verdict = member.verdict
        if verdict is None or verdict.done():
            verdict = member.verdict = asyncio.get_running_loop().create_future()
        member.edition = self.edition
        if member.child is None:
            _judged(member, "")
        else:
            member.child.signal(signal.SIGHUP)
        return verdict

    def change_timeouts(self, timeouts: WorkerTimeouts) -> None:
        self.timeouts = timeouts
        for member in self.members.values():
            member.policy.timeouts = timeouts

    # ---- the one task -----------------------------------------------------------------------------

    def wake(self) -> None:
        self._awake.set()

    def stop(self) -> None:
        """Stop all workers permanently. `run` returns when all have ended."""
        self._stopping = True
        for member in self.members.values():
            self._do(member, member.policy.stop(self.now()))
        self.wake()

    def kill(self) -> None:
        """Kill all worker processes at once. No mail is lost, as in a crash."""
        for member in self.members.values():
            if member.child is not None:
                member.child.signal(signal.SIGKILL)

    async def run(self) -> None:
        last = self.now()
        while not (
            self._stopping and all(each.policy.phase is WorkerPhase.OVER for each in self.members.values())
        ):
            now = self.now()
            late, last = now - last > HELD_UP, now
            for member in list(self.members.values()):
                await self._step(member, now, late=late)
            policies = self.policies.values()
            if not self.ready.done() and all(each.phase is WorkerPhase.RUNNING for each in policies):
                self.ready.set_result(None)
            self._awake.clear()
            try:
                async with asyncio.timeout(TICK):
                    await self._awake.wait()
            except TimeoutError:
                pass

    async def _step(self, member: SupervisedWorker, now: float, *, late: bool) -> None:
        act = member.policy.due(now, late=late)
        if act is Action.START:
            await self._start(member)
        elif act is not None:
            self._do(member, act)
        if member.policy.phase is WorkerPhase.OVER and not self._stopping:
            del self.members[member.index]
            self.totals.forget(member.index)

    async def _start(self, member: SupervisedWorker) -> None:
        child = Child(partial(self._heard, member), partial(self._ended, member))
        member.child, member.because, member.last_words, member.metrics = child, "", "", ""
        member.emptied, member.edition = False, self.edition
        member.policy.started(self.now())
        try:
            command, environment, descriptors = self.launch(member.index, member.drains_spool)
            await child.start(command, environment, descriptors)
        except OSError as error:
            member.last_words = str(error)
            self._ended(member, 127)
            return
        self.log.emit("info", "worker-started", {"worker": member.index, "pid": child.pid})
        if member.policy.phase is WorkerPhase.STOPPING:  # `stop` came before there was a process to signal
            child.signal(signal.SIGTERM)

    def _do(self, member: SupervisedWorker, act: Action | None) -> None:
        if member.child is None or act is None or act is Action.START:
            return
        if act is Action.TERMINATE and member.policy.phase is WorkerPhase.HUNG:
            member.because = f"no heartbeat for {self.timeouts.silence:g} s"
            self.log.emit("error", "worker-hung", {"worker": member.index, "pid": member.pid})
        elif act is Action.KILL and not member.because:
            member.because = (
                "it did not stop in time"
                if member.policy.phase is WorkerPhase.STOPPING
                else "not ready in time"
            )
        member.child.signal(signal.SIGTERM if act is Action.TERMINATE else signal.SIGKILL)

    # ---- packets and exits -------------------------------------------------------------------

    def _heard(self, member: SupervisedWorker, packet: str) -> None:
        now = self.now()
        key, _, value = packet.partition("=")
        match key:
            case "READY":
                member.policy.ready(now)
                if member.edition != self.edition:  # it read the former configuration at its start
                    self.tell_to_reload(member)
                self.wake()
            case "STOPPING":
                member.policy.stopping(now)
            case "STATUS":
                member.last_words = value[:MAX_WORDS]
            case "TAKEN" | "REFUSED":
                _judged(member, "" if key == "TAKEN" else value)
            case "FAILED":
                self._pass_on(member, packet)
            case "EMPTY":
                member.emptied = True
            case "MORE":
                member.metrics += value
            case "METRICS":
                self._last_metrics(member, value)
            case _:
                member.policy.heard(now)

    def _pass_on(self, member: SupervisedWorker, packet: str) -> None:
        for other in self.members.values():
            if other is not member and other.child is not None:
                other.child.tell(packet)

    def _last_metrics(self, member: SupervisedWorker, text: str) -> None:
        text, member.metrics = member.metrics + text, ""
        try:
            families = msgspec.json.decode(text, type=tuple[Family, ...])
        except msgspec.DecodeError:  # a packet was lost, so those of the last scrape stay
            return
        self.totals.take(member.index, member.policy.starts, families)
        # The reply to a scrape in progress has lower values.
        self.totals.bury(member.index, member.policy.starts)

    def _ended(self, member: SupervisedWorker, status: int) -> None:
        asked = member.policy.phase is WorkerPhase.STOPPING and not member.because
        first_time = member.policy.phase is WorkerPhase.STARTING and not self.ready.done()
        why = ending(status, killed_because=member.because, last_words=member.last_words)
        fields: dict[str, Field] = {"worker": member.index, "pid": member.pid, "why": why}
        member.child = None
        _judged(member, "")
        # An empty spool ends a worker only if it drains the spool. Its number may be in use again by now.
        member.emptied = member.emptied and member.drains_spool
        member.policy.ended(self.now(), finished=member.emptied)
        self.totals.bury(member.index, member.policy.starts)
        if member.policy.phase is WorkerPhase.DOWN and not asked:
            fields["restart_in"] = round(max(member.policy.next_start - self.now(), 0.0), 3)
        member.problem = "" if asked or member.emptied else why
        self.log.emit("info" if asked or member.emptied else "error", "worker-ended", fields)
        if first_time and not member.drains_spool and not self.ready.done():
            self.ready.set_exception(StartError(f"{member.name} {why}"))
        self.wake()


def _judged(member: SupervisedWorker, verdict: str) -> None:
    if member.verdict is not None and not member.verdict.done():
        member.verdict.set_result(verdict)
