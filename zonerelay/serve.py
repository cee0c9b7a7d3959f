"""`zonerelay serve`: the process around one worker. Limits, signals, the service manager, the exit status.

SIGTERM and SIGINT drain and exit 0; a second one cuts the draining short. SIGHUP checks the
configuration again. Exit 2: the configuration is wrong, every problem is on stderr. Exit 1: this machine
is not ready for it, stderr says why.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import random
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import uvloop

from zonerelay.config.advice import advice
from zonerelay.config.hostname import resolve_hostname
from zonerelay.config.models import Settings
from zonerelay.config.settings import ConfigError, load
from zonerelay.model.clock import SystemClock
from zonerelay.systemd import Notifier
from zonerelay.telemetry.logs import configure as configure_logs
from zonerelay.telemetry.redact import RedactKeyError, Redactor, load_or_create_key
from zonerelay.worker import StartError, Worker

REDACT_KEY = "redact.key"

# A thread that waits for the interpreter asks for it after this long. The default of 5 ms lets the event
# loop keep the store's writer waiting between two system calls, which shows in every commit.
SWITCH_INTERVAL = 0.0005

# Allocations between two collections of the youngest generation. Messages make no reference cycles; the
# default of 700 collects several times per message.
GC_THRESHOLD = 20_000


# glibc mallopt(3): by default an allocation of 128 KiB or more, as a full read from a socket is, comes from
# mmap, and each use of it begins with page faults: twice the CPU per octet of a large message. Two arenas:
# only the event loop allocates much, and an arena per thread of the store is memory that nobody uses.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGE = 4 * 1024 * 1024


def serve(config: Path) -> int:
    try:
        settings = load(config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        _prepare(settings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(config, settings))
    except (StartError, RedactKeyError, OSError) as error:
        print(f"zonerelay: {error}", file=sys.stderr)
        return 1


def _prepare(settings: Settings) -> None:
    home = settings.spool.path.parent
    try:
        # Beside the spool are the control socket and the key of the log's pseudonyms.
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(
            f"cannot create {home}, where [spool] path is to be: {error.strerror};"
            " create it for this user, or choose another [spool] path"
        ) from error
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        # A connection is a descriptor, and so is every open table file of the spool.
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.set_threshold(GC_THRESHOLD, 20, 20)
    _tune_allocator()


def _tune_allocator() -> None:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return  # not glibc: nothing to tune, everything works
    mallopt(M_MMAP_THRESHOLD, LARGE)
    mallopt(M_TRIM_THRESHOLD, 2 * LARGE)
    mallopt(M_ARENA_MAX, 2)


async def _serve(config: Path, settings: Settings) -> int:
    clock = SystemClock()
    redactor = build_redactor(settings)
    log = configure_logs(settings.log, clock=clock, redact=redactor.text)
    worker = Worker(
        settings,
        hostname=resolve_hostname(settings, socket.getfqdn),
        log=log,
        redactor=redactor,
        clock=clock,
        randomness=random.Random(),
        environment=os.environ,
    )
    notifier = Notifier(os.environ, lambda error: worker.events.trouble("systemd", error))
    for note in advice(settings, worker.hostname):
        worker.events.lifecycle("advice", note=note)
    try:
        await worker.start()
        gc.freeze()
        await _run_until_told(worker, notifier, config, log.flush)
    finally:
        log.flush()
    return 0


async def _run_until_told(
    worker: Worker, notifier: Notifier, config: Path, flush: Callable[[], object]
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, _reload, worker, notifier, config)
    notifier.ready(_where(worker))
    notifier.start_watchdog(loop)
    await stop.wait()
    notifier.stopping()
    stopping = asyncio.ensure_future(worker.stop())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _cut_short, worker, flush)
    await stopping


def _cut_short(worker: Worker, flush: Callable[[], object]) -> None:
    """A second signal: end like a crash, which loses nothing; what is in flight is tried again later."""
    worker.events.lifecycle("killed", why="a second signal while stopping")
    flush()
    os._exit(1)


def _reload(worker: Worker, notifier: Notifier, config: Path) -> None:
    """The signal's handler: only the check of the file is done here, at once."""
    notifier.reloading(worker.clock.monotonic())
    try:
        settings = load(config)
    except ConfigError as error:
        first = str(error.problems[0])
        worker.problems = (f"the configuration on disk is wrong, the old one stays in force: {first}",)
        worker.events.lifecycle("reload-refused", problems=len(error.problems), first=first)
        notifier.ready(_where(worker))
        return
    reloading = worker.reloading = asyncio.ensure_future(worker.reload(settings))
    reloading.add_done_callback(lambda _: notifier.ready(_where(worker)))


def _where(worker: Worker) -> str:
    return f"listening on {' '.join(worker.addresses())}"


def build_redactor(settings: Settings) -> Redactor:
    """Raises RedactKeyError."""
    if not settings.log.redact:
        return Redactor(b"", enabled=False)
    path = settings.log.redact_key_file or settings.spool.path.parent / REDACT_KEY
    return Redactor(load_or_create_key(path), enabled=True)
