"""Accepts clients that wait at the socket of another worker, when that worker does not accept them.

Each worker has a listening socket of its own for an address, and inherits those of the others. The kernel
spreads clients over them evenly. A client that still waits after `PATIENCE` waits for a worker that hangs,
has died or is being replaced, and any other worker accepts it. So no client depends on one worker, and
ordinary clients cost nothing here: a socket with a client in it is looked at ten times a second at most.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable

PATIENCE = 0.1
"""Seconds. A worker that is merely busy comes for its clients sooner."""
AT_ONCE = 100
"""Clients accepted at one look, so that the other workers get some."""


class SiblingSockets:
    """`session` makes the protocol of a connection, as for the worker's own socket. `spare` are sockets of
    workers that no longer exist: their clients are accepted at once.
    """

    def __init__(
        self,
        sockets: Iterable[socket.socket],
        session: Callable[[], asyncio.BaseProtocol],
        *,
        spare: Iterable[socket.socket] = (),
    ) -> None:
        spare = list(spare)
        self._patience = {**dict.fromkeys(sockets, PATIENCE), **dict.fromkeys(spare, 0.0)}
        self._loop = asyncio.get_running_loop()
        self._sockets = list(self._patience)
        self._session = session
        self._waits: dict[socket.socket, asyncio.TimerHandle] = {}
        self._coming: set[asyncio.Task[object]] = set()
        for each in self._sockets:
            each.setblocking(False)
            self._loop.add_reader(each, self._on_client, each)

    def close(self) -> None:
        """Close the sockets; accepted clients stay."""
        for each in self._sockets:
            wait = self._waits.pop(each, None)
            if wait is None:
                self._loop.remove_reader(each)
            else:
                wait.cancel()
            each.close()
        self._sockets.clear()

    def _on_client(self, at: socket.socket) -> None:
        self._loop.remove_reader(at)
        self._waits[at] = self._loop.call_later(self._patience[at], self._look, at)

    def _look(self, at: socket.socket) -> None:
        del self._waits[at]
        for _ in range(AT_ONCE):
            try:
                client, _ = at.accept()
            except ConnectionAbortedError:
                continue  # the client has gone again
            except BlockingIOError:
                break
            except OSError:  # no descriptors or memory: the client would be seen again at once
                self._waits[at] = self._loop.call_later(PATIENCE, self._look, at)
                return
            client.setblocking(False)
            task: asyncio.Task[object] = self._loop.create_task(
                self._loop.connect_accepted_socket(self._session, client)
            )
            self._coming.add(task)
            task.add_done_callback(self._came)
        self._loop.add_reader(at, self._on_client, at)

    def _came(self, task: asyncio.Task[object]) -> None:
        self._coming.discard(task)
        if not task.cancelled():
            task.exception()  # the client has gone again, which needs no report
