"""Makes and binds the socket for an address to listen on, and explains every refusal in words."""

from __future__ import annotations

import errno
import socket
import stat
from pathlib import Path

from zonerelay.config.endpoints import ListenAddress

BACKLOG = 1024  # connections the kernel holds while the loop is busy

_WORDS = {
    errno.EADDRINUSE: "the address is in use: another mail server, or a second zonerelay, listens there",
    errno.EACCES: "permission denied: a port below 1024 needs CAP_NET_BIND_SERVICE, "
    "a Unix socket needs a directory that zonerelay may write to",
    errno.EADDRNOTAVAIL: "this machine does not have that address",
    errno.ENOENT: "the socket's directory does not exist",
}
_LOOK_TIMEOUT = 1.0


class ListenError(Exception):
    """The address cannot be listened on; the text is for the operator."""


def explained(error: OSError) -> str:
    return _WORDS.get(error.errno or 0, error.strerror or str(error))


def bound_group(address: ListenAddress, count: int) -> list[socket.socket]:
    """Return `count` sockets bound to one IP address; the kernel spreads clients. Raises OSError."""
    # Without this look another relay of the same user could be listening there, and would share ours.
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
    """Return a socket bound to an IP address, which others may share with `shared`. Raises OSError."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    # The protocol is named because asyncio sends small replies at once only on sockets that say TCP.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            # The loops' own servers take "::" for IPv6 alone; [::]:25 in the configuration means IPv4 too.
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address.host == "::" else 1)
        made.bind((address.host, address.port))
    except OSError:
        made.close()
        raise
    return made


def bound_path(path: Path) -> socket.socket:
    """Return a bound Unix socket; a dead one in the way is replaced. Raises OSError."""
    refuse_live_socket(path)
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(str(path))
    except OSError:
        made.close()
        raise
    return made


def refuse_live_socket(path: Path) -> None:
    """The loop would replace any socket in the way; one that is listened on must stay. Raises OSError."""
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise OSError(errno.EEXIST, "a file that is not a socket is in the way")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_LOOK_TIMEOUT)
        try:
            probe.connect(str(path))
        except TimeoutError:
            pass  # it is too busy to answer, so it is there
        except OSError:
            return
    raise OSError(errno.EADDRINUSE, "in use")
