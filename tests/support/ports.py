"""Loopback ports that are nobody else's, and waiting until somebody listens on one.

Test processes run side by side, and a relay comes back on the ports that it had. So each process takes a
block of ports below those that the kernel gives out by itself, and hands them out in turn. The claim is an
abstract Unix socket: either it can be bound or somebody has it, it counts where the ports count, in the
network namespace, and it ends with the process.
"""

import functools
import itertools
import os
import socket
import time
from collections.abc import Callable, Iterator

LOOPBACK = "127.0.0.1"
FIRST, END, BLOCK = 10_000, 32_000, 400  # Linux gives out 32768 and up


def free_ports(count: int, *, host: str = LOOPBACK) -> list[int]:
    """Distinct ports that nobody listens on, and that nobody else is given before BLOCK others."""
    found: list[int] = []
    for port in itertools.islice(_own_ports(), BLOCK):
        if len(found) == count:
            break
        if _is_free(port, host):
            found.append(port)
    assert len(found) == count, f"of {BLOCK} ports only {len(found)} are free"
    return found


def free_port(*, host: str = LOOPBACK) -> int:
    return free_ports(1, host=host)[0]


@functools.cache
def _own_ports() -> Iterator[int]:
    """This process's block, round and round."""
    blocks = [range(first, first + BLOCK) for first in range(FIRST, END, BLOCK)]
    for number in range(len(blocks)):
        block = blocks[(os.getpid() + number) % len(blocks)]
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0zonerelay-tests-ports-{block.start}")
        except OSError:
            claim.close()
        else:
            return _round_and_round(block, claim)
    raise AssertionError(f"{len(blocks)} processes have taken all blocks of ports")


def _round_and_round(block: range, claim: socket.socket) -> Iterator[int]:
    with claim:
        while True:
            yield from block


def _is_free(port: int, host: str) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
        try:
            one.bind((host, port))
        except OSError:
            return False
    return True


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


def accepts(port: int, *, host: str = LOOPBACK) -> bool:
    """Whether somebody accepts connections there."""
    try:
        socket.create_connection((host, port), timeout=5.0).close()
    except OSError:
        return False
    return True


def wait_until(ready: Callable[[], bool], *, timeout: float, interval: float = 0.02) -> bool:
    """Polls `ready` until it says yes or the time is up; returns its last answer."""
    deadline = time.monotonic() + timeout
    while not ready():
        if time.monotonic() > deadline:
            return False
        time.sleep(interval)
    return True
