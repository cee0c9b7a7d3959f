"""Names that need no DNS: `localhost` (RFC 6761 6.3) and the names of the machine's hosts file.

Every address look-up consults the file before DNS, as the system's own resolver does by default, and reads it
again when it has changed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from pathlib import Path

from zonerelay.process.file_state import FileState, file_state

HOSTS_FILE = Path("/etc/hosts")
MAX_HOSTS_SIZE = 1024 * 1024

_LOOPBACK = ("127.0.0.1", "::1")


class Hosts:
    def __init__(self, names: Mapping[str, tuple[str, ...]]) -> None:
        self.names: Mapping[str, tuple[str, ...]] = dict(names)

    def lookup(self, name: str) -> tuple[str, ...]:
        """Returns the addresses of a name in lower case, `()` when DNS has to be asked."""
        found = self.names.get(name)
        if found is not None:
            return found
        return _LOOPBACK if is_localhost(name) else ()


class HostsFile(Hosts):
    """The names of a hosts file, as it is at each look-up."""

    def __init__(self, path: Path = HOSTS_FILE) -> None:
        super().__init__({})
        self._path = path
        self._state: FileState = ()

    def lookup(self, name: str) -> tuple[str, ...]:
        state = file_state(self._path)
        if state != self._state:
            self._state = state
            self.names = read_hosts(self._path).names
        return super().lookup(name)


def is_localhost(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")


def read_hosts(path: Path) -> Hosts:
    """Reads the file. A file that cannot be read counts as empty; a malformed line is skipped."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return parse_hosts(file.read(MAX_HOSTS_SIZE))
    except OSError:
        return Hosts({})


def parse_hosts(text: str) -> Hosts:
    names: dict[str, tuple[str, ...]] = {}
    for line in text.splitlines():
        address, *aliases = line.partition("#")[0].split() or [""]
        try:
            ip = str(ipaddress.ip_address(address))
        except ValueError:
            continue
        for alias in aliases:
            key = alias.lower().removesuffix(".")
            names[key] = (*names.get(key, ()), ip)
    return Hosts(names)
