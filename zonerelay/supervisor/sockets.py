"""Opens the listening sockets of the relay in the supervisor, for every worker to inherit.

Each worker has its own socket for every IP address (SO_REUSEPORT), so the kernel distributes clients evenly,
including clients with long sessions. All workers inherit all sockets, so a client in the queue of a worker
that hangs or is being replaced is accepted by another (`inbound/listen/listening_socket`). No socket is
closed while the relay runs, so no client is reset. A Unix socket, or one from systemd, is shared by all
workers.
"""

import json
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from zonerelay.config.endpoints import parse_listen
from zonerelay.inbound.listen.listening_socket import BACKLOG, ListenError, bound_group, explained
from zonerelay.process.sockets import InheritedSockets, bound_address, bound_path


class RelaySockets:
    """The listening sockets of the relay. `handed` are those that systemd has opened."""

    def __init__(self, handed: InheritedSockets) -> None:
        self._handed = handed
        self._open: dict[str, list[socket.socket]] = {}
        self._paths: dict[str, Path] = {}

    def open(self, addresses: Iterable[str], workers: int) -> None:
        """Open listening sockets for additional addresses, as many as `workers` need. If ListenError is
        raised, nothing was changed.
        """
        made: dict[str, list[socket.socket]] = {}
        try:
            for address in addresses:
                if address not in self._open:
                    made[address] = self._listen(address, workers)
        except ListenError:
            for group in made.values():
                _close(group)
            raise
        self._open |= made

    def keep(self, addresses: Iterable[str]) -> None:
        """Close the sockets of all addresses except these. The workers have already closed theirs."""
        for address in self._open.keys() - set(addresses):
            _close(self._open.pop(address))
            path = self._paths.pop(address, None)
            if path is not None:
                path.unlink(missing_ok=True)

    def addresses(self) -> list[str]:
        """Return the addresses of listeners as in the configuration, with real ports in place of port 0."""
        return [bound_address(group[0]) for group in self._open.values()]

    def descriptors(self) -> tuple[int, ...]:
        """Return the descriptors that a new process inherits."""
        return tuple(each.fileno() for group in self._open.values() for each in group)

    def as_text(self, worker: int, workers: int) -> str:
        """Return the descriptors of a worker and those of the others as a string for its environment
        (`identity.SOCKETS`).
        """
        return json.dumps({address: _dealt(group, worker, workers) for address, group in self._open.items()})

    def _listen(self, text: str, workers: int) -> list[socket.socket]:
        handed = self._handed.take(text)
        if handed is not None:
            return [handed]
        address = parse_listen(text)
        try:
            path = Path(address.path)
            made = [bound_path(path)] if address.is_unix else bound_group(address, workers)
            for each in made:
                each.setblocking(False)
                each.listen(BACKLOG)
        except OSError as error:
            raise ListenError(f"cannot listen on {text}: {explained(error)}") from error
        if address.is_unix:
            self._paths[text] = path
        return made


def _close(group: Iterable[socket.socket]) -> None:
    for each in group:
        each.close()


def _dealt(group: Sequence[socket.socket], worker: int, workers: int) -> tuple[list[int], list[int]]:
    """Return which descriptors of one address belong to a worker, and which to the others. If there are fewer
    workers than sockets, some have several; if there are more, some share one.
    """
    numbers = [each.fileno() for each in group]
    own = numbers[worker::workers] or [numbers[worker % len(numbers)]]
    return own, [each for each in numbers if each not in own]
