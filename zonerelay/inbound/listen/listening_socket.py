"""Creates listening sockets, and accepts clients at the sockets of other workers.

If an address cannot be used, the error message explains why.
"""

import asyncio
import errno
import socket
from collections.abc import Callable, Iterable

from zonerelay.config.endpoints import ListenAddress

BACKLOG = 1024  # connections that the kernel queues while the event loop is busy

_WORDS = {
    errno.EADDRINUSE: "the address is in use by another mail server or another zonerelay",
    errno.EACCES: "permission denied: a port below 1024 requires CAP_NET_BIND_SERVICE; a Unix socket "
    "requires a directory that zonerelay can write to",
    errno.EADDRNOTAVAIL: "the address is not configured on this machine",
    errno.ENOENT: "the socket's directory does not exist",
}


class ListenError(Exception):
    """The relay cannot listen on a configured address. The text is for the operator."""


def explained(error: OSError) -> str:
    return _WORDS.get(error.errno or 0, error.strerror or str(error))


def bound_group(address: ListenAddress, count: int) -> list[socket.socket]:
    """Return `count` sockets bound to the same address and port, among which the kernel distributes clients.
    Raise OSError on failure.
    """
    # Without this check, another relay of the same user could be listening there and would share our clients.
    bound(address).close()
    group = [bound(address, shared=True)]
    place = ListenAddress(host=address.host, port=group[0].getsockname()[1])
    try:
        group.extend(bound(place, shared=True) for _ in range(count - 1))
    except OSError:
        for each in group:
            each.close()
        raise
    return group


def bound(address: ListenAddress, *, shared: bool = False) -> socket.socket:
    """Return a socket bound to an IP address; with `shared`, other sockets can be bound to it too
    (SO_REUSEPORT). Raise OSError on failure.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # The protocol is given because asyncio sets TCP_NODELAY only on sockets with an explicit TCP protocol.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            # The event loop's own servers use "::" for IPv6 alone, but [::]:25 in the configuration includes
            # IPv4.
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address.host == "::" else 1)
        made.bind((address.host, address.port))
    except OSError:
        made.close()
        raise
    return made


# Accepts clients that wait at the socket of another worker, when that worker does not accept them.
#
# Each worker has its own listening socket for an address and inherits the sockets of the others. The kernel
# distributes clients evenly. If a client still waits after `PATIENCE` seconds, its worker hangs, has died or
# is being replaced, and any other worker accepts the client. So no client depends on one worker, and ordinary
# clients cost little here: a socket with a waiting client is checked at most ten times a second.

PATIENCE = 0.1
"""Seconds. A worker that is merely busy accepts its clients sooner."""
AT_ONCE = 100
"""The number of clients accepted in one batch, so that the other workers get some."""


class SiblingSockets:
    """The listening sockets of other workers, at which this worker accepts clients, too. `session` makes the
    protocol of a connection, as for the worker's own socket. `spare` are the sockets of workers that no
    longer exist; their clients are accepted immediately.
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
        """Close the sockets. Accepted clients stay connected."""
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
                continue  # the client has disconnected
            except BlockingIOError:
                break
            except OSError:  # no descriptors or memory: without a pause the loop would spin
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
            task.exception()  # the client has disconnected, which needs no report
