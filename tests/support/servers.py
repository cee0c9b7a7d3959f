"""Servers of others that tests start: a process with a log, ready before it is used and gone afterwards."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.support.ports import wait_until

STOP_TIMEOUT = 60.0


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


class ServerProcess:
    """One that a test starts, kills and starts again. It is killed at the end of a `with`."""

    process: subprocess.Popen[bytes] | None = None

    def start(self) -> object:
        raise NotImplementedError

    def spawn(
        self,
        command: Sequence[object],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
        leads: bool = False,
    ) -> None:
        """`environment` takes the place of that of the tests. `leads`: it leads its process group."""
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=leads,
            )

    @property
    def pid(self) -> int:
        assert self.process is not None, "not started"
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, as a power cut for the process; safe to call on one that is not running."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(STOP_TIMEOUT)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
