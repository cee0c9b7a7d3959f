"""The listening sockets of the relay, held by the supervisor and inherited by every worker.

Each worker has a socket of its own for every IP address (SO_REUSEPORT): the kernel deals clients out evenly,
also those who stay for long. All workers inherit all of them, so that a client in the queue of one that hangs
or is being replaced is taken by another (`inbound/listen/listening_socket`); and since none is ever closed
while the relay runs, no client is reset. A Unix socket, and one from systemd, is one for all.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from zonerelay.config.endpoints import join_port, parse_listen
from zonerelay.inbound.listen.listening_socket import BACKLOG, bound_group, bound_path, explained
from zonerelay.process.sockets import Inherited


class BindError(Exception):
    """A listening socket cannot be opened; the text tells the operator why."""


class Sockets:
    """The sockets. `handed` are those that systemd has opened."""

    def __init__(self, handed: Inherited) -> None:
        self._handed = handed
        self._open: dict[str, list[socket.socket]] = {}
        self._paths: dict[str, Path] = {}

    def open(self, addresses: Iterable[str], workers: int) -> None:
        """Listens at further addresses, for so many workers. Raises BindError, with nothing changed."""
        made: dict[str, list[socket.socket]] = {}
        try:
            for address in addresses:
                if address not in self._open:
                    made[address] = self._listen(address, workers)
        except BindError:
            for group in made.values():
                _close(group)
            raise
        self._open |= made

    def keep(self, addresses: Iterable[str]) -> None:
        """Closes the sockets of all other addresses; the workers have closed theirs before."""
        for address in self._open.keys() - set(addresses):
            _close(self._open.pop(address))
            path = self._paths.pop(address, None)
            if path is not None:
                path.unlink(missing_ok=True)

    def addresses(self) -> list[str]:
        """Returns the addresses of listeners as in the configuration; ports that were 0 are the real ones."""
        names = [group[0].getsockname() for group in self._open.values()]
        return [f"unix:{name}" if isinstance(name, str) else join_port(name[0], name[1]) for name in names]

    def descriptors(self) -> tuple[int, ...]:
        """Returns the descriptors that a new process inherits."""
        return tuple(each.fileno() for group in self._open.values() for each in group)

    def as_text(self, worker: int, workers: int) -> str:
        """Returns a worker's own descriptors and the others', for its environment (`identity.SOCKETS`)."""
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
            raise BindError(f"cannot listen on {text}: {explained(error)}") from error
        if address.is_unix:
            self._paths[text] = path
        return made


def _close(group: Iterable[socket.socket]) -> None:
    for each in group:
        each.close()


def _dealt(group: Sequence[socket.socket], worker: int, workers: int) -> tuple[list[int], list[int]]:
    """Share sockets among workers. When there are fewer workers than before, the sockets of the others fall
    to those that are left; when there are more, some share one.
    """
    numbers = [each.fileno() for each in group]
    own = numbers[worker::workers] or [numbers[worker % len(numbers)]]
    return own, [each for each in numbers if each not in own]
