"""Servers of others that tests start: a process with a log, ready before it is used and gone afterwards."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.ports import wait_until


@contextlib.contextmanager
def running_server(
    command: Sequence[object],
    log: Path,
    ready: Callable[[], bool],
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = 30.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server and wait until it is ready; kill it, with all that it has started, at the end.

    Raises AssertionError with the end of its log if it exits or is not ready in time. `environment` is added
    to that of the tests.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        wait_until(lambda: process.poll() is not None or ready(), timeout=timeout)
        if process.poll() is not None or not ready():
            raise AssertionError(f"{command[0]} does not serve:\n{log.read_text(errors='replace')[-2000:]}")
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
