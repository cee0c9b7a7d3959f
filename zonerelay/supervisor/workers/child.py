"""Controls one process of a worker: its start, its channel, its signals and its exit. It makes no decisions.

The channel is a pair of sockets that preserve packet boundaries. The worker sends over it what a service
sends to systemd (sd_notify(3)). If either process dies, the other one reads the end of the channel.
"""

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence

from zonerelay.process.setup import CHANNEL

MAX_PACKET = 1024 * 1024
"""More than the size of any packet. The last metrics of a worker are sent in several packets."""


class Child:
    """A worker's process, as seen by the supervisor. `heard` is called with each packet, and `ended` once
    with the exit status, which is negative for a signal.
    """

    def __init__(self, heard: Callable[[str], None], ended: Callable[[int], None]) -> None:
        self._heard = heard
        self._ended = ended
        self._process: asyncio.subprocess.Process | None = None
        self._channel: socket.socket | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    async def start(self, command: Sequence[str], environment: Mapping[str, str], fds: Sequence[int]) -> None:
        """Start the process. Raise OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            ours.setblocking(False)
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_PACKET)
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                env={**environment, CHANNEL: str(theirs.fileno())},
                pass_fds=(*fds, theirs.fileno()),
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._channel = ours
        asyncio.get_running_loop().add_reader(ours, self._read)
        self._watch = asyncio.get_running_loop().create_task(self._wait(self._process))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, which may have ended already."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def tell(self, packet: str) -> None:
        """Send a packet to the process through its channel. It is lost if the process does not read."""
        if self._channel is not None:
            with contextlib.suppress(OSError):
                self._channel.send(packet.encode())

    def _read(self) -> None:
        while self._channel is not None:
            try:
                packet = self._channel.recv(MAX_PACKET)
            except BlockingIOError:
                return
            except OSError:
                packet = b""
            if not packet:
                self._close()
                return
            self._heard(packet.decode(errors="replace"))

    async def _wait(self, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        self._read()  # the channel may still contain its last packets
        self._close()
        self._ended(status)

    def _close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            asyncio.get_running_loop().remove_reader(channel)
            channel.close()


def ending(status: int, *, killed_because: str = "", last_words: str = "") -> str:
    """Describe how a process ended, for the log. A negative `status` is a signal, as in asyncio."""
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        why = f"killed by {name}"
    else:
        why = f"exited with status {status}"
    if killed_because:
        why = f"{killed_because}; {why}"
    return f"{why}: {last_words}" if last_words else why
