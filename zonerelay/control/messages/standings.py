"""Parts of a `RelayStatus` (`messages.py`), under the same promise: fields are added, never renamed."""

from __future__ import annotations

import msgspec


class ZoneStatus(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    ready: int
    active: int
    deferred: int
    held: int
    oldest_seconds: float


class DestinationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`active` and `waiting` are deliveries in the scheduler's window; the rest of the queue is on disk.

    `destination` is the MX domain or next hop that it was first seen as, `hosts` what it stands for.
    `next_turn`: mail waits for its turn at a rate, and that is when the next one is.
    """

    zone: str
    destination: str
    hosts: str
    active: int
    waiting: int
    suspended_until: float | None = None
    reply: str = ""
    next_turn: float | None = None


class SourcePenalty(msgspec.Struct, frozen=True, kw_only=True):
    """A destination (its hosts) has refused a source for its reputation: it is passed over there `until`, or
    its IPv6 alone.
    """

    source: str
    destination: str
    until: float
    reply: str
    ipv6_only: bool = False


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One of several workers. `problem`: why the one before it ended, or this one does not answer."""

    worker: int
    pid: int
    state: str
    uptime: float
    restarts: int
    problem: str = ""
