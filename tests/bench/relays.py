"""The two relays behind one face: start on a free port towards given sinks, stop, and be measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.bench.rows import MIB, Row, domain, sink_address
from tests.support.meters import ProcessGroup
from tests.support.ports import LOOPBACK
from tests.support.postfix import PostfixInstance, PostfixSettings, PostfixTools
from tests.support.process import RelayProcess
from tests.support.toml import Table

ZONERELAY = "zonerelay"
POSTFIX = "postfix"


class Relay(Protocol):
    """A started relay."""

    @property
    def smtp_port(self) -> int: ...

    @property
    def pid(self) -> int: ...

    def log_tail(self) -> str: ...


# A directory for its files, the row, the sink's port, and what to put before its command line.
Starter = Callable[[Path, Row, int, Sequence[str]], AbstractContextManager[Relay]]


def next_hops(row: Row, sink_port: int) -> dict[str, str]:
    """Host and port per domain when a row spreads them; empty otherwise."""
    if not row.spread:
        return {}
    return {domain(number): f"{sink_address(number)}:{sink_port}" for number in range(row.domains)}


def start_zonerelay(directory: Path, row: Row, sink_port: int, launcher: Sequence[str]) -> RelayProcess:
    """One worker; limits that 50 sessions cannot reach; otherwise the defaults, LevelDB included."""
    limits: Table = {
        "tls": "none",
        "allow_private_addresses": True,
        "max_connections": row.connections_out,
        "max_connections_per_destination": row.connections_out,
    }
    hops = next_hops(row, sink_port)
    zones: list[Table] = [{"name": name, "next_hop": hop, **limits} for name, hop in hops.items()]
    routes: list[Table] = [{"recipient_domain": [name], "zone": name} for name in hops]
    default: Table = {"name": "default", "next_hop": f"{LOOPBACK}:{sink_port}", **limits}
    return RelayProcess(
        directory,
        listener={"max_connections_per_client": 1000, "max_message_size": "50 MB"},
        tables={"zone": [default, *zones], "route": routes},
        launcher=launcher,
    )


def postfix_starter(tools: PostfixTools) -> Starter:
    def start(directory: Path, row: Row, sink_port: int, launcher: Sequence[str]) -> PostfixInstance:
        bracketed = {name: f"[{hop.replace(':', ']:')}" for name, hop in next_hops(row, sink_port).items()}
        settings = PostfixSettings(
            next_hop=f"[{LOOPBACK}]:{sink_port}",
            transports=bracketed,
            connections_out=row.connections_out,
            message_size_limit=50 * MIB,
        )
        return PostfixInstance(tools, directory, settings, launcher=launcher)

    return start


@dataclass(frozen=True, slots=True)
class Subject:
    """One running relay while a row is measured."""

    name: str
    relay: Relay
    group: ProcessGroup
    sink_port: int
