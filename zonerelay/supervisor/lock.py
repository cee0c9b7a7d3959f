"""Ensures that only one supervisor runs at a time, and none while workers of its predecessor are still
running.

The lock is on a file descriptor that every worker inherits, so it is released when the last worker has ended.
A supervisor that was killed leaves workers that finish their work in progress. Its successor waits for them
here; otherwise it would find locked spools and used ports. It also waits for a relay that is being stopped.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from zonerelay.config.settings import Settings
from zonerelay.control.client import ControlClient
from zonerelay.control.socket import control_socket_path, refuse_live
from zonerelay.operations.answers import RelayStatus
from zonerelay.operations.errors import ControlError
from zonerelay.operations.requests import Status
from zonerelay.process.setup import StartError, prepare_home

LOCK_NAME = "supervisor.lock"
_LOOK_EVERY = 0.1
_ASK_EVERY = 1.0
_ANSWER_TIMEOUT = 10.0
"""Longer than a supervisor waits for its workers' parts of the answer."""


def take(
    settings: Settings, *, patience: float = 0.0, waiting: Callable[[str], None] = lambda _: None
) -> int:
    """Acquire the supervisor's lock and return its file descriptor, which workers inherit. Blocks. If it has
    to wait, `waiting` is called once with the processes that hold the lock. Raise StartError after `patience`
    seconds, and as soon as waiting is useless, because a relay that is not stopping answers.
    """
    home = prepare_home(settings)
    path = home / LOCK_NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        held = not _is_taken(descriptor)
        _refuse_second(settings, unless_stopping=held)
        if held:
            waiting(_holders(path))
            _wait(path, descriptor, time.monotonic() + patience, settings)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _refuse_second(settings: Settings, *, unless_stopping: bool) -> None:
    """Raise StartError if another relay answers at the control socket of this configuration."""
    path = control_socket_path(settings)
    try:
        refuse_live(path)
    except ControlError as error:
        if not (unless_stopping and _is_stopping(path)):
            raise StartError(str(error)) from error


def _is_stopping(path: Path) -> bool:
    """Return whether the relay at this control socket is stopping or has just stopped."""
    try:
        return ControlClient(path, timeout=_ANSWER_TIMEOUT).ask(Status(), RelayStatus).state == "draining"
    except ControlError:
        return not path.is_socket()


def _wait(path: Path, descriptor: int, deadline: float, settings: Settings) -> None:
    asked = time.monotonic()
    while not _is_taken(descriptor):
        now = time.monotonic()
        if now > deadline:
            holders = _holders(path)
            raise StartError(
                f"the spool is in use by another relay, or by workers of a stopped relay: {path} is "
                f"locked{f' by process {holders}' if holders else ''}. Stop it, or wait until they "
                "have stopped"
            )
        if now - asked > _ASK_EVERY:
            asked = now
            _refuse_second(settings, unless_stopping=True)
        time.sleep(_LOOK_EVERY)


def _is_taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holders(path: Path) -> str:
    """Return the ids of the processes that have the file open, as far as this user may see them."""
    found = set[str]()
    for each in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if each.samefile(path):
                found.add(each.parts[2])
    found.discard(str(os.getpid()))
    return ", ".join(sorted(found, key=int))
