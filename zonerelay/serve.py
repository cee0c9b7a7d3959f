"""Runs `zonerelay serve` and `zonerelay worker`: the process of one worker with its signals, service manager
and exit status.

With several workers, or if the spool of a removed worker still has mail, `serve` is a supervisor instead
(`supervisor/`) and starts `worker` processes. SIGTERM and SIGINT drain the relay and exit with 0. A second
signal cuts the draining short, except in a worker of a supervisor, which may receive two. SIGHUP reloads the
configuration. Exit status 2: the configuration is not valid; every problem is on stderr. Exit status 1: this
machine cannot run the relay; stderr has the reason.
"""

import asyncio
import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from zonerelay.config.checks import advice
from zonerelay.config.load import ConfigError, load, read_copy
from zonerelay.config.settings import Settings, kept_from, resolve_hostname
from zonerelay.model.clock import SystemClock
from zonerelay.process import setup
from zonerelay.process.gc import GcTimer
from zonerelay.process.sockets import Notifier
from zonerelay.process.tasks import RepeatedWork
from zonerelay.process.threads import OPERATORS, STORE
from zonerelay.store.spool_paths import spools_beyond
from zonerelay.worker.build import build
from zonerelay.worker.worker import Worker, until_empty


def serve(config: Path) -> int:
    """Run the relay as configured, in one process or with several workers, and return the exit status."""
    try:
        text, settings = read_copy(config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        identity = setup.identity_of(0, drains_spool=False, environment=os.environ)
        identity.inherited.refuse_unused(settings)
        if settings.workers != 1 or spools_beyond(settings.spool, 1):
            from zonerelay.supervisor.run import supervise  # noqa: PLC0415 - one worker needs none

            return supervise(config, text, settings, identity.inherited)
        return _run(config, settings, identity)
    except (setup.StartError, OSError, ValueError) as error:
        return _failed(error)


def run_worker(config: Path, index: int, *, drains_spool: bool) -> int:
    """Run one of several workers, started by the supervisor or manually."""
    try:
        settings = load(config)
        at_start = os.environ.get(setup.STARTED_WITH)
        if at_start is not None:
            settings = kept_from(load(Path(at_start)), settings)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    identity = setup.Identity(index)
    try:
        identity = setup.identity_of(index, drains_spool=drains_spool, environment=os.environ)
        if not identity.supervised:
            from zonerelay.supervisor import lock  # noqa: PLC0415 - only by hand

            lock.take(settings)
        return _run(config, settings, identity)
    except (setup.StartError, OSError, ValueError) as error:
        Notifier({}, channel=identity.channel).status(str(error))
        return _failed(error)
    except Exception as error:
        Notifier({}, channel=identity.channel).status(f"{type(error).__name__}: {error}")
        raise


def _failed(error: Exception) -> int:
    print(f"zonerelay: {error}", file=sys.stderr)
    return 1


def _run(config: Path, settings: Settings, identity: setup.Identity) -> int:
    setup.prepare_process(settings)
    setup.tune_for_mail()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, settings, identity))


async def _serve(config: Path, settings: Settings, identity: setup.Identity) -> int:
    clock = SystemClock()
    log, redactor = setup.open_log(settings, clock, identity.index if identity.supervised else None)
    hostname = resolve_hostname(settings, socket.getfqdn)
    notifier = Notifier(os.environ, lambda error: worker.events.error("systemd", error), identity.channel)
    collector = GcTimer()
    try:
        worker = await build(
            settings,
            hostname=hostname,
            log=log,
            redactor=redactor,
            clock=clock,
            randomness=random.Random(),
            environment=os.environ,
            identity=identity,
            share_failure=lambda text: notifier.tell(f"FAILED={text}"),
            advice=() if identity.supervised else advice(settings, hostname),
        )
        collector.start()
        await WorkerProcess(config, worker, notifier, collector.waiting, log.flush).serve()
    finally:
        collector.stop()
        log.flush()
    return 0


PACKET = 4096
"""Bytes of a packet from the supervisor at most."""


@dataclass(eq=False, repr=False)
class WorkerProcess(RepeatedWork):
    """Runs a worker from ready to stopped, and handles signals and messages of the supervisor.

    `begin` is the handler of SIGHUP, which reloads the configuration. The file is read and checked in a
    thread, and activated on the event loop, so that its last state becomes active. Objects of the
    configuration are created within `settling()`.
    """

    config: Path
    worker: Worker
    notifier: Notifier
    settling: Callable[[], AbstractContextManager[None]]
    flush: Callable[[], object]
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self) -> None:
        """Report that the worker is ready, and stop it when a signal or the supervisor requests that."""
        loop, channel = asyncio.get_running_loop(), self.worker.identity.channel
        if channel is None:
            loop.add_signal_handler(signal.SIGINT, self._stop.set)
        else:
            # A terminal interrupts the whole process group; the supervisor decides how to react.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            loop.add_reader(channel, self._hear, channel)
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        loop.add_signal_handler(signal.SIGHUP, self.begin)
        setup.allow_reload()
        self.notifier.ready(_where(self.worker))
        self.notifier.start_watchdog(loop)
        emptied = await self._until_stopped()
        self.notifier.stopping()
        stopping = asyncio.ensure_future(self.worker.stop())
        if channel is None:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._cut_short)
        await stopping
        self.notifier.last_metrics(self.worker.metrics.families())
        if emptied:
            await STORE.run(self.worker.remove_spool)
            self.notifier.tell("EMPTY=1")

    async def _until_stopped(self) -> bool:
        """Wait until the worker is to stop, by request or because the spool that it drains is empty. Return
        true if the worker drains a spool, which is now empty. An unexpected error of that check is raised,
        because the spool is then not known to be empty.
        """
        stop_wait: asyncio.Future[object] = asyncio.ensure_future(self._stop.wait())
        waits: set[asyncio.Future[object]] = {stop_wait}
        if self.worker.identity.drains_spool:
            waits.add(asyncio.ensure_future(until_empty(self.worker.store, self.worker.note_left_over)))
        ended, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for each in others:
            each.cancel()
        if stop_wait in ended:
            return False
        for each in ended:
            each.result()
        return True

    async def _run(self) -> None:
        """Reload the configuration, and report the result."""
        worker = self.worker
        if worker.draining:
            return
        self.notifier.reloading(worker.clock.monotonic())
        try:
            with self.settling():
                refused = await self._once()
        except Exception as error:  # noqa: BLE001 - what is wrong once must not stop later reloads
            worker.events.error("reload", error)
            refused = f"unexpected {type(error).__name__}: {error}"
        if worker.draining:
            return  # a status sent now would revoke that the relay is stopping
        self.notifier.tell(f"REFUSED={refused}" if refused else "TAKEN=1")
        self.notifier.ready(_where(worker))

    async def _once(self) -> str:
        """Reload the configuration once. Return the reason if it is rejected, or ""."""
        try:
            # With a thousand routes this takes 50 ms; in a thread, the event loop can run every millisecond.
            settings = await OPERATORS.run(load, self.config)
        except ConfigError as error:
            return self.worker.refuse(str(error.problems[0]), problems=len(error.problems))
        return await self.worker.reload(settings)

    def _hear(self, channel: socket.socket) -> None:
        """Handle a message of the supervisor (a failed login at another worker) or the supervisor's end.
        After the latter, finish active deliveries and stop, so that the next relay finds the spool unlocked.
        """
        try:
            packet = channel.recv(PACKET)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if packet:
            self.worker.listeners.failed_elsewhere(packet.decode().removeprefix("FAILED="))
            return
        asyncio.get_running_loop().remove_reader(channel)
        self.worker.events.lifecycle("supervisor-gone")
        self._stop.set()

    def _cut_short(self) -> None:
        """Handle a second signal by exiting immediately; deliveries in flight are retried later."""
        self.worker.events.lifecycle("killed", why="a second signal while stopping")
        self.flush()
        os._exit(1)


def _where(worker: Worker) -> str:
    """Return the status text of a ready relay, for the service manager."""
    return f"listening on {' '.join(worker.addresses())}"
