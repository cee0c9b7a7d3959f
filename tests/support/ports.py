"""Loopback ports that are free now, and waiting until somebody listens on one."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

LOOPBACK = "127.0.0.1"


def free_ports(count: int, *, host: str = LOOPBACK) -> list[int]:
    """Distinct ports that nobody listens on. Another process could take one before we use it; rare enough."""
    sockets = [socket.socket(socket.AF_INET, socket.SOCK_STREAM) for _ in range(count)]
    try:
        for one in sockets:
            one.bind((host, 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def free_port(*, host: str = LOOPBACK) -> int:
    return free_ports(1, host=host)[0]


def greets(port: int, *, host: str = LOOPBACK, timeout: float = 5.0) -> bool:
    """Whether an SMTP server there answers a new connection with 220; it is told QUIT at once."""
    try:
        with socket.create_connection((host, port), timeout=timeout) as connection:
            greeting = connection.recv(512)
            connection.sendall(b"QUIT\r\n")
            connection.recv(512)
    except OSError:
        return False
    return greeting.startswith(b"220")


def wait_until(ready: Callable[[], bool], *, timeout: float, interval: float = 0.02) -> bool:
    """Polls `ready` until it says yes or the time is up; returns its last answer."""
    deadline = time.monotonic() + timeout
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True
