"""Starts a worker's process: its command line, its environment, and the descriptors that it inherits.

The command is the one with which the supervisor was started, with `worker` in place of `serve`. Workers read
the active configuration from a copy next to the spool, because a file that an operator is editing must not
prevent the restart of a worker. The location of its mail is read from the configuration with which the relay
was started.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path

from zonerelay import durable
from zonerelay.config.settings import Settings
from zonerelay.control.socket import limits_socket_path
from zonerelay.process.setup import LIMITS, SOCKETS, STARTED_WITH
from zonerelay.store.spool_paths import count_of
from zonerelay.supervisor.sockets import RelaySockets

IN_FORCE = "in-force.toml"
AT_START = "at-start.toml"
BEATS = 4
"""Signs of life within `worker_timeout`."""
LONGEST_BEAT = 5.0

_NOT_FOR_WORKERS = (
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_PID",
    "LISTEN_FDNAMES",
)


@dataclass(eq=False, repr=False)
class Launcher:
    """Starts worker processes (implements `workers.Launch`). Call `begin` first. `held` is the descriptor of
    the lock, which all processes of the relay inherit.
    """

    held: int
    sockets: RelaySockets
    environment: InitVar[Mapping[str, str]]
    settings: Settings

    def __post_init__(self, environment: Mapping[str, str]) -> None:
        self._environment = {k: v for k, v in environment.items() if k not in _NOT_FOR_WORKERS}
        self._texts: dict[Path, bytes] = {}
        home = self.settings.spool.path.parent.absolute()
        self._config, self._at_start = home / IN_FORCE, home / AT_START

    def __call__(
        self, index: int, drains_spool: bool
    ) -> tuple[Sequence[str], Mapping[str, str], Sequence[int]]:
        for path, text in self._texts.items():
            if not path.exists():  # an operator has removed it
                durable.write(path, text)
        program = [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv[1:])]]
        command = [*program, "worker", "--index", str(index), "--config", str(self._config)]
        if drains_spool:
            command.append("--drain")
        environment = {
            **self._environment,
            STARTED_WITH: str(self._at_start),
            LIMITS: str(limits_socket_path(self.settings)),
            SOCKETS: "{}" if drains_spool else self.sockets.as_text(index, count_of(self.settings)),
            # sd_watchdog_enabled(3): a sign of life is due in half of the time.
            "WATCHDOG_USEC": str(int(min(self.settings.worker_timeout / BEATS, LONGEST_BEAT) * 2_000_000)),
        }
        descriptors = () if drains_spool else self.sockets.descriptors()
        return command, environment, (self.held, *descriptors)

    def begin(self, text: bytes) -> None:
        """Write the configuration with which the relay starts, for new workers to read. Raise OSError."""
        self._put(self._at_start, text)
        self._put(self._config, text)

    def put_in_force(self, text: bytes, settings: Settings) -> None:
        """Replace the configuration file that new workers read, atomically. Raise OSError."""
        if text != self._texts[self._config]:
            self._put(self._config, text)
        self.settings = settings

    def in_force(self) -> bytes:
        return self._texts[self._config]

    def _put(self, path: Path, text: bytes) -> None:
        # If the disk is full, a relay that is restarted with the same configuration must still be able to
        # drain it.
        if not _holds(path, text):
            durable.write(path, text)
        self._texts[path] = text


def _holds(path: Path, text: bytes) -> bool:
    try:
        return path.read_bytes() == text
    except OSError:
        return False
