"""Listening sockets that another process has opened: the supervisor for its workers, or systemd (LISTEN_FDS).

That process keeps them open, so clients that come while a worker, or the relay, restarts wait in the queue of
the kernel and are not refused. A socket is found by the address that is written in the configuration.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence

from zonerelay.config.endpoints import ListenAddress, parse_listen

FIRST = 3  # SD_LISTEN_FDS_START


class Inherited:
    """`descriptors` are open, listening sockets by address, `spare` further ones, `others` those of the other
    workers there. They are never closed here.
    """

    def __init__(
        self,
        descriptors: Mapping[str, int] | None = None,
        names: Mapping[str, str] | None = None,
        spare: Mapping[str, Sequence[int]] | None = None,
        others: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._descriptors = dict(descriptors or {})
        self._names = dict(names or {})
        self._spare = dict(spare or {})
        self._others = dict(others or {})
        for each in (*self._spare.values(), *self._others.values()):
            for descriptor in each:
                os.set_inheritable(descriptor, False)
        for descriptor in self._descriptors.values():
            os.set_inheritable(descriptor, False)

    @classmethod
    def of_systemd(cls, environment: Mapping[str, str], pid: int) -> Inherited:
        """sd_listen_fds(3). Raises ValueError for what is no listening stream socket."""
        count = environment.get("LISTEN_FDS", "")
        if environment.get("LISTEN_PID") != str(pid) or not count.isdigit():
            return cls()
        names = environment.get("LISTEN_FDNAMES", "").split(":")
        found, named = dict[str, int](), dict[str, str]()
        for at in range(int(count)):
            name = names[at] if at < len(names) else ""
            address = _address_of(FIRST + at, name)
            if address in found:
                raise ValueError(f"the service manager hands over two sockets for {address}")
            found[address], named[address] = FIRST + at, name
        return cls(found, named)

    def __iter__(self) -> Iterator[str]:
        return iter(self._descriptors)

    def __bool__(self) -> bool:
        return bool(self._descriptors)

    @classmethod
    def of_supervisor(cls, given: Mapping[str, Sequence[Sequence[int]]]) -> Inherited:
        """Takes, by address, the worker's own sockets, at least one, and those of the other workers."""
        own = {text: group[0] for text, group in given.items()}
        return cls(
            {text: each[0] for text, each in own.items()},
            spare={text: each[1:] for text, each in own.items()},
            others={text: group[1] for text, group in given.items()},
        )

    def take_spare(self, address: str) -> list[socket.socket]:
        """Returns copies of the worker's further sockets for a listener's address."""
        return [socket.socket(fileno=os.dup(each)) for each in self._spare.get(address, ())]

    def take_others(self, address: str) -> list[socket.socket]:
        """Returns copies of the other workers' sockets for a listener's address."""
        return [socket.socket(fileno=os.dup(each)) for each in self._others.get(address, ())]

    def take(self, address: str) -> socket.socket | None:
        """A socket of the caller's own for a listener's address, `None` where no socket was handed over."""
        descriptor = self._descriptors.get(address)
        if descriptor is None:
            wanted = parse_listen(address)
            descriptor = next(
                (n for text, n in self._descriptors.items() if parse_listen(text) == wanted), None
            )
        return None if descriptor is None else socket.socket(fileno=os.dup(descriptor))

    def unused(self, wanted: Iterable[str]) -> list[str]:
        """Returns the addresses that no listener has, with the service manager's names of their sockets."""
        known = {parse_listen(text) for text in wanted if text}
        left = (text for text in self._descriptors if parse_listen(text) not in known)
        return [f"{text} ({name})" if (name := self._names.get(text)) else text for text in left]


NOTHING = Inherited()


def _address_of(descriptor: int, name: str) -> str:
    what = f"descriptor {descriptor} ({name or 'unnamed'}) from the service manager"
    try:
        with socket.socket(fileno=os.dup(descriptor)) as handed:
            if handed.type != socket.SOCK_STREAM or not handed.getsockopt(
                socket.SOL_SOCKET, socket.SO_ACCEPTCONN
            ):
                raise ValueError(f"{what} is no listening stream socket: write ListenStream= and Accept=no")
            bound = handed.getsockname()
    except OSError as error:
        raise ValueError(f"{what} is no socket: {error.strerror}") from error
    if isinstance(bound, str):
        return str(ListenAddress(path=bound))
    return str(ListenAddress(host=bound[0], port=bound[1]))
