"""Opens the socket to a peer: from which of our addresses, to which of theirs, and whether it may be.

The address is checked here, right before connecting to that very address, so that no name that resolves
differently a moment later gets around the check. The caller owns the socket that is returned;
when this raises, also by cancellation, no socket is left open.
"""

from __future__ import annotations

import asyncio
import os
import socket

from zonerelay.config.models import ZoneSettings
from zonerelay.model.reply import Reply
from zonerelay.routing.addresses import is_private


class HostTrouble(Exception):
    """A host cannot be used for this attempt; another one may do.

    `reply` tells why; `asked` is false when nothing was sent to anybody.
    """

    def __init__(self, reply: Reply, *, address: str = "", asked: bool = True) -> None:
        super().__init__(str(reply))
        self.reply = reply
        self.address = address
        self.asked = asked


def display_address(ip: str, port: int) -> str:
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"


def check_address(zone: ZoneSettings, host: str, ip: str) -> None:
    """Refuse what a stranger's DNS must not make us talk to. A next hop was chosen by the operator."""
    if zone.allow_private_addresses or zone.next_hop or not is_private(ip):
        return
    # 4.4.4, not a bounce: a wrong MX record is often put right before the message is too old.
    text = f"{host} has the private address {ip}, which the zone does not allow"
    raise HostTrouble(Reply(451, "4.4", text), asked=False)


async def open_socket(zone: ZoneSettings, host: str, ip: str, port: int, *, timeout: float) -> socket.socket:
    """A connected, non-blocking TCP socket. Raises HostTrouble."""
    check_address(zone, host, ip)
    address = display_address(ip, port)
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:  # out of file descriptors, or no IPv6 on this machine
        raise HostTrouble(Reply(451, "3.0", f"no socket: {error}"), asked=False) from error
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(timeout):
            await asyncio.get_running_loop().sock_connect(sock, (ip, port))
    except TimeoutError as error:
        sock.close()
        raise HostTrouble(Reply(451, "4.1", f"connecting to {address} timed out"), address=address) from error
    except OSError as error:
        sock.close()
        reason = os.strerror(error.errno) if error.errno else str(error)
        text = f"connecting to {address} failed: {reason}"
        raise HostTrouble(Reply(451, "4.1", text), address=address) from error
    except BaseException:
        sock.close()
        raise
    return sock
