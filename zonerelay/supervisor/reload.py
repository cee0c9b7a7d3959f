"""Reloads a relay with several workers (SIGHUP): plans the reload and carries it out.

The supervisor first checks the new configuration. If it is invalid the old one stays active, and `zonerelay
status` reports the reason. A changed table belongs to one of three classes (`plan`): running workers apply
it, or new processes are needed, or it waits for the next start of the whole relay (the location of the queue,
because mail would be left behind).

Changes that running workers can apply go to one worker first, and to the others when that worker accepts them
and has stayed up for a moment. Changes that need new processes replace the workers one at a time. If a worker
refuses the configuration, fails to start with it or dies because of it, the old one becomes active again. One
reload runs at a time. A signal during a reload starts another one after it.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import msgspec

from zonerelay.config.load import ConfigError, read_copy
from zonerelay.config.settings import NEXT_START, RESTART, Backend, Settings, kept_from
from zonerelay.inbound.listen.listening_socket import ListenError
from zonerelay.process.sockets import Notifier
from zonerelay.process.tasks import RepeatedWork
from zonerelay.store.spool_paths import count_of, is_shared, spools_beyond
from zonerelay.supervisor.merge.relay_state import RelayState
from zonerelay.supervisor.workers.child import Child
from zonerelay.supervisor.workers.launching import Launcher
from zonerelay.supervisor.workers.restart_policy import STEADY, WorkerPhase, rolling_restart
from zonerelay.supervisor.workers.workers import SupervisedWorker, timeouts_of
from zonerelay.telemetry.events.events import Events

ROLL = tuple(name for name in RESTART if name not in (*NEXT_START, "workers"))


class ReloadPlan(msgspec.Struct, frozen=True):
    """The steps of a reload. `settings` become active, `roll` names the tables that need new processes, and
    `later` names those that wait for the next start.
    """

    settings: Settings
    later: tuple[str, ...]
    roll: tuple[str, ...]


def plan(old: Settings, new: Settings) -> ReloadPlan:
    """Compare two configurations table by table, and return the steps of the reload."""
    later = tuple(name for name in NEXT_START if getattr(old, name) != getattr(new, name))
    settings = kept_from(old, new)
    roll = [name for name in ROLL if getattr(old, name) != getattr(new, name)]
    if _sockets_of(old) != _sockets_of(new):
        roll.append("listener")  # a running process cannot receive another socket
    return ReloadPlan(settings, later, tuple(roll))


def _sockets_of(settings: Settings) -> set[tuple[str, str]]:
    return {(each.address, each.protocol) for each in settings.listener}


VERDICT_TIMEOUT = 30.0
_LOOK_EVERY = 0.05


class ReloadRejectedError(Exception):
    """The new configuration was rejected. The message for the operator gives the reason."""


def _dies(member: SupervisedWorker) -> ReloadRejectedError:
    what = f"{member.name} stopped with the new configuration"
    return ReloadRejectedError(f"{what}: {member.problem}")


@dataclass(eq=False, repr=False)
class RelayReload(RepeatedWork):
    """Carries out reloads of all workers, one at a time. `begin` is the handler of SIGHUP."""

    config: Path
    _: KW_ONLY
    state: RelayState
    launcher: Launcher
    events: Events
    notifier: Notifier

    async def _run(self) -> None:
        if self.state.draining:
            return
        self.notifier.reloading(self.state.clock.monotonic())
        try:
            await self._once()
        except ReloadRejectedError as error:  # the disk has no free space for the old configuration either
            self._refuse(str(error))
        except Exception as error:  # noqa: BLE001 - one unexpected error must not prevent later reloads
            self.state.problems = (f"the reload failed with an unexpected {type(error).__name__}: {error}",)
            self.events.error("reload", error)
        self.notifier.ready(self.state.where())

    async def _once(self) -> None:
        old = self.state.settings
        before, edition = self.launcher.in_force(), self.state.workers.edition
        rolled = False
        try:
            text, new = self._read()
            found = plan(old, new)
            rolled = bool(found.roll)
            addresses = [each.address for each in found.settings.listener]
            self.state.listening.open(addresses, count_of(found.settings))
            self._put_in_force(text, found.settings)
            await self._bring_to_workers(found)
        except (ReloadRejectedError, ListenError) as error:
            self._refuse(str(error))
            if self.state.workers.edition != edition:
                await self._take_back(before, old, rolled=rolled)
            self.state.listening.keep(each.address for each in old.listener)
            return
        self.state.listening.keep(each.address for each in found.settings.listener)
        await self._resize(old, found.settings)
        self.state.taken_up, self.state.refused = self.state.clock.now(), None
        later = (*found.later, *(("workers",) if self._stays_as_it_is(old, new) else ()))
        self.state.problems = tuple(
            f"[{name}] was changed; this takes effect at the next start" for name in later
        )
        self.events.lifecycle("reloaded", restart_for=" ".join(later), replaced_for=" ".join(found.roll))

    def _read(self) -> tuple[bytes, Settings]:
        try:
            return read_copy(self.config)
        except ConfigError as error:
            raise ReloadRejectedError(str(error.problems[0])) from error

    def _put_in_force(self, text: bytes, settings: Settings) -> None:
        """Activate a configuration for new workers. If ReloadRejectedError is raised, nothing was changed."""
        try:
            self.launcher.put_in_force(text, settings)
        except OSError as error:
            raise ReloadRejectedError(f"the copy for the workers cannot be written: {error}") from error
        self.state.workers.edition += 1
        self.state.workers.change_timeouts(timeouts_of(settings))
        self.state.settings = settings

    def _refuse(self, why: str) -> None:
        self.state.refused = self.state.clock.now()
        self.state.problems = (
            f"the last reload was refused, so the previous configuration stays active: {why}",
        )
        self.events.lifecycle("reload-refused", first=why)

    async def _take_back(self, text: bytes, old: Settings, *, rolled: bool) -> None:
        """Restore the old configuration in workers that have accepted the new one or were started with it. A
        worker that is starting receives it when it is ready. Raise ReloadRejectedError.
        """
        refused = self.state.workers.edition
        self._put_in_force(text, old)
        taken = [each for each in self.state.workers.members.values() if each.edition == refused]
        if rolled:
            # A worker that has just died of the new configuration is started with the old one anyway.
            await self._roll(each.index for each in taken if each.policy.phase is not WorkerPhase.DOWN)
            self.state.workers.replace_draining()
            return
        for member in taken:
            if member.policy.phase is WorkerPhase.RUNNING:
                await self._tell(member)

    async def _bring_to_workers(self, found: ReloadPlan) -> None:
        """Apply the reload to each worker, or replace its process if that is necessary. Raise
        ReloadRejectedError.
        """
        if found.roll:
            failed = await self._roll(self.state.workers.policies)
            if failed is not None:
                raise _dies(self.state.workers.members[failed])
            self.state.workers.replace_draining()
            return
        # The first one tries the configuration. It must be healthy, because the death of an unstable worker
        # would prove nothing.
        now = self.state.clock.monotonic()
        members = self.state.workers.members.values()
        first = next((each for each in members if not each.drains_spool and each.policy.is_well(now)), None)
        for member in sorted(members, key=lambda each: each is not first):
            if member.policy.phase is not WorkerPhase.RUNNING:
                continue  # it reads the configuration at its start, or is notified when it is ready
            child = member.child
            refusal = await self._tell(member)
            if refusal:
                raise ReloadRejectedError(f"{member.name}: {refusal}")
            if member is first:
                await self._watch(member, child)

    async def _watch(self, member: SupervisedWorker, child: Child | None) -> None:
        """Watch a worker for `STEADY` seconds after a reload. Raise ReloadRejectedError if it dies because of
        the configuration.
        """
        deadline = self.state.clock.monotonic() + STEADY
        while member.child is child and self.state.clock.monotonic() < deadline:  # noqa: ASYNC110 - as in _roll
            await asyncio.sleep(_LOOK_EVERY)
        if member.child is not child and member.problem:
            raise _dies(member)

    async def _tell(self, member: SupervisedWorker) -> str:
        """Tell a worker to reload. Return the reason if it refuses, or ""."""
        try:
            async with asyncio.timeout(VERDICT_TIMEOUT):
                return await self.state.workers.tell_to_reload(member)
        except TimeoutError:
            return f"no response to the reload within {VERDICT_TIMEOUT:g} s"

    async def _roll(self, indexes: Iterable[int]) -> int | None:
        """Replace the processes of these workers, one after the other. Return the index of the first one that
        did not become ready, or None.
        """
        workers = self.state.workers
        roll = rolling_restart(indexes, lambda: workers.policies, workers.now)
        while True:
            try:
                worker = next(roll)
            except StopIteration as end:
                failed: int | None = end.value
                return failed
            if worker is not None:
                workers.restart(worker)
            await asyncio.sleep(_LOOK_EVERY)

    async def _resize(self, old: Settings, new: Settings) -> None:
        """Change the number of workers. Additional workers start at once; surplus workers end when their
        spools are empty. The remaining workers are replaced, because the listening sockets are distributed
        again.
        """
        workers, before = count_of(new), count_of(old)
        if workers == before or self._stays_as_it_is(old, new):
            return
        stay = [index for index in self.state.workers.policies if index < workers]
        surplus = () if is_shared(new.spool) else range(workers, before)
        self.state.workers.employ(workers, [*surplus, *spools_beyond(new.spool, max(workers, before))])
        await self._roll(stay)

    def _stays_as_it_is(self, old: Settings, new: Settings) -> bool:
        """Return whether a reload must not reduce the number of workers. A queue in memory would be lost with
        the process of a removed worker.
        """
        volatile = new.spool.backend is Backend.MEMORY and new.spool.shelve is None
        return volatile and count_of(new) < count_of(old)
