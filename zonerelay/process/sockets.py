"""Inherits listening sockets from the supervisor or from systemd (LISTEN_FDS), and binds Unix sockets.

That process keeps the sockets open, so clients that connect while a worker or the relay restarts wait in the
kernel's queue instead of being refused. A socket is found by its address in the configuration.
"""

import asyncio
import contextlib
import errno
import os
import socket
import stat
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from zonerelay.config.endpoints import ListenAddress, parse_listen

if TYPE_CHECKING:
    from zonerelay.config.settings import Settings  # commands that query a relay do not need it

# The service manager's notification protocol (sd_notify(3)): a datagram of `KEY=value` lines.
#
# Without `NOTIFY_SOCKET` in the environment every call does nothing, so the same code runs in a
# terminal. A service manager that does not listen is its own trouble, never the relay's: a failed
# send is reported once to the caller's callable and ignored from then on.
#
# A supervisor is the service manager of its workers: each of them says the same over a channel that it
# inherited.

PIECE = 64 * 1024
"""Octets in one packet of metrics: relays with hundreds of zones have more than a socket takes at once."""
_LAST_PATIENCE = 1.0


class Notifier:
    """Notifies systemd, or the supervisor, of the state of the process. It is built from `os.environ` in
    `worker.py`.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        on_error: Callable[[OSError], None] = lambda _: None,
        channel: socket.socket | None = None,
    ) -> None:
        self._channel = channel
        address = environ.get("NOTIFY_SOCKET", "")
        # "@" stands for the NUL byte of an abstract socket address.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._on_error = on_error
        self._watchdog: asyncio.TimerHandle | None = None
        microseconds = environ.get("WATCHDOG_USEC", "")
        # Half the deadline, as sd_watchdog_enabled(3) advises.
        self.watchdog_interval = int(microseconds) / 2_000_000 if microseconds.isdigit() else 0.0

    def ready(self, status: str) -> None:
        self._send(f"READY=1\nSTATUS={status}")

    def reloading(self, monotonic: float) -> None:
        """Notify systemd that a reload has begun. With Type=notify-reload, systemd compares the time with
        that of its signal.
        """
        self._send(f"RELOADING=1\nMONOTONIC_USEC={int(monotonic * 1_000_000)}")

    def stopping(self) -> None:
        self._send("STOPPING=1")
        if self._watchdog is not None:
            self._watchdog.cancel()

    def status(self, text: str) -> None:
        self._send(f"STATUS={text}")

    def start_watchdog(self, loop: asyncio.AbstractEventLoop) -> None:
        """Notify systemd's watchdog regularly from the event loop, so that systemd restarts a process whose
        event loop hangs.
        """
        if not self.watchdog_interval or (self._channel is None and not self._address):
            return
        self._send("WATCHDOG=1")
        self._watchdog = loop.call_later(self.watchdog_interval, self.start_watchdog, loop)

    def tell(self, text: str) -> None:
        """Send the supervisor a message that is not part of the service manager protocol."""
        if self._channel is not None:
            self._send(text)

    def last_metrics(self, families: object) -> None:
        """Send the final metrics of the process to the supervisor, so that they are not lost. Waits for
        buffer space.
        """
        if self._channel is None:
            return
        text = msgspec.json.encode(families).decode()
        self._channel.settimeout(_LAST_PATIENCE)
        for at in range(0, len(text), PIECE):
            self._send(f"{'METRICS' if at + PIECE >= len(text) else 'MORE'}={text[at : at + PIECE]}")

    def _send(self, text: str) -> None:
        if self._channel is not None:
            # The supervisor is gone or hangs. The channel reveals the first; the second is its own problem.
            with contextlib.suppress(OSError):
                self._channel.send(text.encode())
            return
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.settimeout(1.0)
                channel.sendto(text.encode(), self._address)
        except OSError as error:
            self._address = ""
            self._on_error(error)


FIRST = 3  # SD_LISTEN_FDS_START


class InheritedSockets:
    """The listening sockets that a process has inherited, by their addresses. `own` are listening sockets of
    this process, the first of which a listener uses. `others` are those of the other workers. They are never
    closed here.
    """

    def __init__(
        self,
        own: Mapping[str, Sequence[int]] | None = None,
        others: Mapping[str, Sequence[int]] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._own, self._others, self._names = dict(own or {}), others or {}, names or {}
        for descriptor in chain(*self._own.values(), *self._others.values()):
            os.set_inheritable(descriptor, False)

    @classmethod
    def of_systemd(cls, environment: Mapping[str, str], pid: int) -> "InheritedSockets":
        """Return the sockets that systemd has passed (sd_listen_fds(3)). Raise ValueError if one is not
        listening.
        """
        count = environment.get("LISTEN_FDS", "")
        if environment.get("LISTEN_PID") != str(pid) or not count.isdigit():
            return cls()
        names = environment.get("LISTEN_FDNAMES", "").split(":")
        found, named = dict[str, list[int]](), dict[str, str]()
        for at in range(int(count)):
            name = names[at] if at < len(names) else ""
            address = _address_of(FIRST + at, name)
            if address in found:
                raise ValueError(f"the service manager passed two sockets for {address}")
            found[address], named[address] = [FIRST + at], name
        return cls(found, names=named)

    @classmethod
    def of_supervisor(cls, given: Mapping[str, Sequence[Sequence[int]]]) -> "InheritedSockets":
        """Return the sockets that the supervisor has passed to a worker. Each address has at least one of its
        own, and those of the other workers.
        """
        own, others = ({text: group[at] for text, group in given.items()} for at in (0, 1))
        return cls(own, others)

    def take(self, address: str) -> socket.socket | None:
        """Return a duplicate of the first inherited socket for a listener's address, or `None` if there is
        none.
        """
        wanted = parse_listen(address)
        found = (each[0] for text, each in self._own.items() if parse_listen(text) == wanted)
        return next(map(_copy, found), None)

    def take_more(self, address: str) -> tuple[list[socket.socket], list[socket.socket]]:
        """Return duplicates of this worker's additional sockets for an address, and of the other workers'
        sockets.
        """
        spare, others = self._own.get(address, ())[1:], self._others.get(address, ())
        return [_copy(each) for each in spare], [_copy(each) for each in others]

    def refuse_unused(self, settings: "Settings") -> None:
        """Raise ValueError if an inherited socket has the address of no listener, because its clients would
        wait for ever.
        """
        wanted = (*(each.address for each in settings.listener), settings.admin.address)
        known = {parse_listen(text) for text in wanted if text}
        left = (text for text in self._own if parse_listen(text) not in known)
        unused = [f"{text} ({name})" if (name := self._names.get(text)) else text for text in left]
        if unused:
            raise ValueError(
                f"the service manager passed sockets without a [[listener]]: {', '.join(unused)}"
            )


NOTHING = InheritedSockets()


def _copy(descriptor: int) -> socket.socket:
    return socket.socket(fileno=os.dup(descriptor))


def _address_of(descriptor: int, name: str) -> str:
    what = f"descriptor {descriptor} ({name or 'unnamed'}) from the service manager"
    try:
        with _copy(descriptor) as handed:
            if handed.type != socket.SOCK_STREAM or not handed.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                raise ValueError(f"{what} is not a listening stream socket; use ListenStream= and Accept=no")
            return bound_address(handed)
    except OSError as error:
        raise ValueError(f"{what} is not a socket: {error.strerror}") from error


def bound_address(bound: socket.socket) -> str:
    """Return the address that a socket is bound to, as a configuration file would specify it."""
    name = bound.getsockname()
    return str(ListenAddress(path=name) if isinstance(name, str) else ListenAddress(name[0], name[1]))


ANSWER_TIMEOUT = 2.0
"""Seconds in which a server accepts a connection to its Unix socket, unless it is too busy."""


def bound_path(path: Path, mode: int | None = None) -> socket.socket:
    """Bind a Unix socket, and return it without listening. A socket file without a server is replaced. Raise
    OSError on failure.
    """
    refuse_live_socket(path)
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.setblocking(False)
        made.bind(str(path))
        if mode is not None:  # no client can connect before listen()
            path.chmod(mode)
    except OSError:
        made.close()
        raise
    return made


def refuse_live_socket(path: Path) -> None:
    """Raise OSError with EADDRINUSE if a process listens on the socket at this path. The event loop would
    replace the socket. Raise it with EEXIST if the file is not a socket.
    """
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise OSError(errno.EEXIST, "a file that is not a socket exists at this path")
    except FileNotFoundError:
        return
    if answers(path):
        raise OSError(errno.EADDRINUSE, "in use")


def answers(path: Path) -> bool:
    """Return whether a server may be listening on a Unix socket. Only a refused connection proves the
    opposite, because the socket of a busy server must not be removed.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(ANSWER_TIMEOUT)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
        return True
