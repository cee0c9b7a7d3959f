"""The service manager's notification protocol (sd_notify(3)): a datagram of `KEY=value` lines.

Without `NOTIFY_SOCKET` in the environment every call does nothing, so the same code runs in a
terminal. A service manager that does not listen is its own trouble, never the relay's: a failed
send is reported once to the caller's callable and ignored from then on.

A supervisor is the service manager of its workers: each of them says the same over a channel that it
inherited.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Mapping

import msgspec

PIECE = 64 * 1024
"""Octets in one packet of metrics: relays with hundreds of zones have more than a socket takes at once."""
_LAST_PATIENCE = 1.0


class Notifier:
    """Tells systemd what the relay is doing. Build it from `os.environ` in `worker.py`."""

    def __init__(
        self,
        environ: Mapping[str, str],
        on_error: Callable[[OSError], None],
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
        """`monotonic` seconds now: Type=notify-reload matches the answer to the signal by it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={int(monotonic * 1_000_000)}")

    def stopping(self) -> None:
        self._send("STOPPING=1")
        if self._watchdog is not None:
            self._watchdog.cancel()

    def status(self, text: str) -> None:
        self._send(f"STATUS={text}")

    def start_watchdog(self, loop: asyncio.AbstractEventLoop) -> None:
        """Pet the watchdog from the event loop: a loop that hangs is restarted by systemd."""
        if not self.watchdog_interval or (self._channel is None and not self._address):
            return
        self._send("WATCHDOG=1")
        self._watchdog = loop.call_later(self.watchdog_interval, self.start_watchdog, loop)

    def tell(self, text: str) -> None:
        """Tells a supervisor alone a fact for which service managers have no word."""
        if self._channel is not None:
            self._send(text)

    def last_metrics(self, families: object) -> None:
        """Sends the last counts to a supervisor alone, so that they are not lost. Waits for room."""
        if self._channel is None:
            return
        text = msgspec.json.encode(families).decode()
        self._channel.settimeout(_LAST_PATIENCE)
        for at in range(0, len(text), PIECE):
            self._send(f"{'METRICS' if at + PIECE >= len(text) else 'MORE'}={text[at : at + PIECE]}")

    def _send(self, text: str) -> None:
        if self._channel is not None:
            # Not taken: the supervisor is gone or hangs. The first is seen at the channel, the second is its
            # own.
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
