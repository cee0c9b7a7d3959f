"""One supervisor at a time, and none while workers of a former one still run.

The lock is on a descriptor that every worker inherits, so it is free when the last of them has ended: a
supervisor that was killed leaves workers that finish what is in flight, and its successor waits for them here
instead of meeting locked spools and taken ports.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from zonerelay.process import StartError

LOCK_NAME = "supervisor.lock"
_LOOK_EVERY = 0.1


def take(home: Path, *, patience: float, waiting: Callable[[], None]) -> int:
    """The descriptor to pass on. Blocks; `waiting` is called once if it has to. Raises StartError."""
    path = home / LOCK_NAME
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + patience
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise StartError(
                    f"workers of a former relay still hold {path}: end them (zonerelay worker …), or wait"
                ) from None
            if not told:
                told = True
                waiting()
            time.sleep(_LOOK_EVERY)
        else:
            return descriptor
