"""The supervisor: the process of `zonerelay serve` with several workers. It accepts no mail itself.

Start: the lock, the listening sockets, the workers, the control socket for operators, then HTTP. The service
manager receives READY when all workers listen. SIGTERM and SIGINT stop the workers, which drain and exit with
0; a second signal kills them. SIGHUP is described in `reload`. If the start fails, StartError is raised and
no process is left behind.
"""

import asyncio
import os
import signal
import socket
from contextlib import AsyncExitStack
from dataclasses import InitVar, dataclass
from functools import partial
from pathlib import Path

import uvloop

from zonerelay import __version__
from zonerelay.admin.http import AdminError, AdminServer, ControlSocket
from zonerelay.admin.operators import Operators
from zonerelay.config.checks import advice
from zonerelay.config.settings import Settings, resolve_hostname
from zonerelay.control.socket import CallSocket, control_socket_path, limits_socket_path, relay_socket_path
from zonerelay.inbound.listen.listening_socket import ListenError
from zonerelay.inbound.listen.submit_socket import SubmitClient
from zonerelay.limits.authority import LimitTable
from zonerelay.limits.unix_socket import LimitServer
from zonerelay.model.clock import Clock, SystemClock
from zonerelay.operations.errors import AnotherRelayError, ControlError
from zonerelay.process.setup import StartError, allow_reload, open_log, prepare_process
from zonerelay.process.sockets import InheritedSockets, Notifier
from zonerelay.process.tasks import RetriedComponents
from zonerelay.store.spool_paths import count_of, spools_beyond
from zonerelay.supervisor import lock
from zonerelay.supervisor.merge.fan_out import FanOut
from zonerelay.supervisor.merge.relay_state import RelayState
from zonerelay.supervisor.reload import RelayReload
from zonerelay.supervisor.sockets import RelaySockets
from zonerelay.supervisor.workers.launching import Launcher
from zonerelay.supervisor.workers.workers import STOP_GRACE, Workers, timeouts_of
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.logs.logs import LogWriter
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.instruments import MetricTotals
from zonerelay.telemetry.metrics.metrics import Metrics


def supervise(config: Path, text: bytes, settings: Settings, handed: InheritedSockets) -> int:
    """Run a relay with several workers and return the exit status. `text` is the file as it was read for the
    start, which may have to wait. Raise StartError and OSError.
    """
    prepare_process(settings)
    log, redactor = open_log(settings, SystemClock())  # the key is created before the workers need it
    patience = settings.shutdown_timeout + STOP_GRACE

    def waiting(holders: str) -> None:
        why = "another relay uses this spool, or workers of a stopped relay complete deliveries"
        log.emit("warning", "supervisor-waits", {"why": why, "processes": holders})
        log.flush()

    held = lock.take(settings, patience=patience, waiting=waiting)

    async def run() -> int:
        clock = SystemClock()
        return await Supervisor(config, text, settings, handed, held, log, clock, redactor).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


@dataclass(eq=False, repr=False)
class Supervisor:
    """Runs the workers of a relay and answers operators for all of them. Call `run` once. Everything it
    starts has ended when it returns.
    """

    config: Path
    text: bytes
    settings: Settings
    handed: InheritedSockets
    held: InitVar[int]
    log: LogWriter
    clock: Clock
    redactor: Redactor

    def __post_init__(self, held: int) -> None:
        events = self._events = Events(self.log, Metrics(), self.redactor, self.clock)
        self._sockets = RelaySockets(self.handed)
        self._launcher = Launcher(held, self._sockets, os.environ, self.settings)
        self._workers = Workers(
            launch=self._launcher,
            timeouts=timeouts_of(self.settings),
            log=self.log,
            totals=MetricTotals(),
            now=self.clock.monotonic,
        )
        self._state = RelayState(self._workers, self.settings, self._sockets, self.clock)
        self._notifier = Notifier(os.environ, partial(events.error, "systemd"))
        self._reloading = RelayReload(
            self.config, state=self._state, launcher=self._launcher, events=events, notifier=self._notifier
        )

    async def run(self) -> int:
        self._events.lifecycle("starting", version=__version__, workers=count_of(self.settings))
        for note in advice(self.settings, resolve_hostname(self.settings, socket.getfqdn)):
            self._events.lifecycle("advice", note=note)
        try:
            async with AsyncExitStack() as stack:
                stack.callback(self._events.lifecycle, "stopped")
                await self._run(stack)
        except (ListenError, ControlError) as error:
            raise StartError(str(error)) from error
        finally:
            self.log.flush()
        return 0

    async def _run(self, stack: AsyncExitStack) -> None:
        """Start all parts of the supervisor, each after its stop was added to `stack`. Return when all
        workers have ended.
        """
        loop, settings, state = asyncio.get_running_loop(), self.settings, self._state
        events = self._events
        stack.callback(self._sockets.keep, ())
        self._sockets.open((each.address for each in settings.listener), count_of(settings))
        self._launcher.begin(self.text)
        # The lock proves that no worker of a former relay runs, which could have slots that are unknown here.
        limits = LimitServer(limits_socket_path(settings), LimitTable(self.clock))
        stack.push_async_callback(limits.close)
        await limits.start()
        running = loop.create_task(self._workers.run())
        stack.push_async_callback(self._end_workers, running)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop)
        workers = count_of(settings)
        self._workers.employ(workers, spools_beyond(settings.spool, workers))
        relay = FanOut(state)
        operators = Operators(
            relay,
            lambda: self._state.settings,
            events=events,
            clock=self.clock,
            submit=SubmitClient(state.submission).submit,
        )
        stack.push_async_callback(operators.asking.close)
        parts = RetriedComponents(events.error, lambda part: events.lifecycle("restored", part=part))
        stack.push_async_callback(parts.close)
        state.unopened = parts.problems
        control = ControlSocket(control_socket_path(settings), lambda: operators, on_error=events.error)
        calls = CallSocket(relay_socket_path(settings), relay, on_error=events.error)
        await parts.open("workers cannot query the relay", "relay-socket", calls, ControlError)
        what = "commands cannot be processed", "control-socket"
        await parts.open(*what, control, ControlError, final=(AnotherRelayError,))
        await asyncio.wait({self._workers.ready, running}, return_when=asyncio.FIRST_COMPLETED)
        if self._workers.ready.done():
            self._workers.ready.result()
        if settings.admin.address and not state.draining:
            http = AdminServer(
                settings.admin,
                state,
                lambda: operators,
                events=events,
                clock=self.clock,
                inherited=self.handed,
            )
            state.unopened = lambda: (*parts.problems(), *http.problems())
            await parts.open("HTTP is not served", "admin-http", http, AdminError)
        if not state.draining:
            events.lifecycle("ready", listeners=" ".join(self._sockets.addresses()))
            loop.add_signal_handler(signal.SIGHUP, self._reloading.begin)
            allow_reload()
            self._notifier.ready(state.where())
            self._notifier.start_watchdog(loop)
        await running

    def _stop(self) -> None:
        if self._state.draining:
            self._events.lifecycle("killed", why="a second signal while stopping")
            self._workers.kill()
            self.log.flush()
            os._exit(1)
        self._state.draining = True
        self._events.lifecycle("stopping")
        self._notifier.stopping()
        self._reloading.cancel()
        self._workers.stop()

    async def _end_workers(self, running: asyncio.Task[None]) -> None:
        """End the workers after a failed start."""
        if not running.done():
            self._workers.stop()
            await asyncio.wait({running})
