"""A hub and some nodes, each a network namespace, joined by two networks: one for mail, one for the store.

    with Network(3) as network, network.inside():
        ...  # this thread, and every process and thread that it starts, is in the hub from here on
        network.nodes[0].launcher      # put before a command line: runs in that node
        network.nodes[0].cut()         # … which cannot reach the store any more, and hears nothing of it
        network.nodes[0].heal()

In the hub are the store's server, the sink, DNS and who sends the load. A cut is silent, as a broken switch:
no connection is ended and nobody is told; `out` and `back` cut one direction alone. Nothing outside of these
namespaces is touched, and everything goes with them: see `holder`. Needs root and `ip` (iproute2).
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Self

MAIL, STORE = "10.91.0", "10.92.0"
MAIL_HOST, STORE_HOST = f"{MAIL}.1", f"{STORE}.1"
NETWORK = "10.91.0.0/16"
_NOWHERE = "02:00:00:00:00:ff"
"""No interface has this address: what is sent there is dropped without a word."""
_HOLDER = Path(__file__).with_name("holder.py")
_CLONE_NEWNET = 0x40000000
_TIMEOUT = 20.0


class NetworkError(Exception):
    """Namespaces cannot be had; the text says what is missing."""


class Node:
    """One machine; `number` counts from 0."""

    def __init__(self, network: "Network", number: int, holder: int) -> None:
        self.number = number
        self.host = f"{MAIL}.{11 + number}"
        self.launcher = _entered(holder)
        self._store_host = f"{STORE}.{11 + number}"
        self._network = network
        self._holder = holder

    def cut(self, *, out: bool = True, back: bool = True) -> None:
        """From the store, silently. `out`: what the node says is lost; `back`: what the store answers is."""
        if out:
            self._ip(f"neigh replace {STORE_HOST} lladdr {_NOWHERE} dev store nud permanent")
        if back:
            entry = f"{self._store_host} lladdr {_NOWHERE} dev store"
            self._network.ip_in_hub(f"neigh replace {entry} nud permanent")

    def heal(self) -> None:
        self._ip("neigh flush nud permanent dev store")
        self._network.ip_in_hub(f"neigh flush to {self._store_host} nud permanent dev store")

    def _ip(self, *commands: str) -> None:
        _ip(self._holder, *commands)

    def join(self) -> None:
        """Both networks, as the hub has prepared them."""
        commands = ["link set lo up"]
        for network, name in ((MAIL, "mail"), (STORE, "store")):
            commands += [f"addr add {network}.{11 + self.number}/24 dev {name}", f"link set {name} up"]
        self._ip(*commands)

    def wires(self) -> list[str]:
        """What the hub does for it: a pair of interfaces for each network, one end of which is the node's."""
        commands = []
        for name in ("mail", "store"):
            here = f"{name}{self.number}"
            commands += [
                f"link add {here} type veth peer name {name} netns {self._holder}",
                f"link set {here} master {name}",
                f"link set {here} up",
            ]
        return commands


class Network:
    """Made and removed by `with`."""

    def __init__(self, nodes: int) -> None:
        if os.geteuid() != 0:
            raise NetworkError("network namespaces are made by root only")
        for program in ("ip", "nsenter"):
            if shutil.which(program) is None:
                raise NetworkError(f"there is no {program} here: apt install iproute2 util-linux")
        self._count = nodes
        self._hub = 0
        self._process: subprocess.Popen[str] | None = None
        self.nodes: list[Node] = []

    def ip_in_hub(self, *commands: str) -> None:
        _ip(self._hub, *commands)

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-S", str(_HOLDER), str(self._count + 1)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            self._build(self._process)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        holders = [int(word) for word in process.stdout.readline().split()]
        if len(holders) != self._count + 1:
            raise NetworkError("network namespaces cannot be made here")
        self._hub, *others = holders
        self.nodes = [Node(self, number, holder) for number, holder in enumerate(others)]
        commands = ["link set lo up"]
        for name, host in (("mail", MAIL_HOST), ("store", STORE_HOST)):
            commands += [
                f"link add {name} type bridge",
                f"addr add {host}/24 dev {name}",
                f"link set {name} up",
            ]
        self.ip_in_hub(*commands, *(wire for node in self.nodes for wire in node.wires()))
        for node in self.nodes:
            node.join()

    def __exit__(self, *error: object) -> None:
        process = self._process
        if process is None:
            return
        # It ends everything that is left in the namespaces, then itself.
        process.communicate(timeout=_TIMEOUT)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """The calling thread is in the hub; and what it starts there stays there."""
        with Path("/proc/thread-self/ns/net").open("rb") as home:
            _enter(Path(f"/proc/{self._hub}/ns/net"))
            try:
                yield
            finally:
                _set_namespace(home.fileno())


def _entered(holder: int) -> list[str]:
    return ["nsenter", f"--net=/proc/{holder}/ns/net"]


def _ip(holder: int, *commands: str) -> None:
    done = subprocess.run(
        [*_entered(holder), "ip", "-batch", "-"],
        input="\n".join(commands) + "\n",
        capture_output=True,
        text=True,
        timeout=_TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise NetworkError(f"ip: {done.stderr.strip()} (of {commands})")


def _enter(place: Path) -> None:
    with place.open("rb") as file:
        _set_namespace(file.fileno())


def _set_namespace(descriptor: int) -> None:
    # os.setns is new in Python 3.12.
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")
