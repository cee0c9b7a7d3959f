"""The identity of a worker in its relay: its number, and the sockets that its starter hands over to it.

A relay with one worker serves HTTP itself and has the control socket that commands know. With several
workers the supervisor does both for all of them, and hears over `channel` (inherited, one packet for each
message of `systemd.Notifier`) that the worker is alive.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zonerelay.process.sockets import Inherited

CHANNEL = "ZONERELAY_CHANNEL"
SOCKETS = "ZONERELAY_SOCKETS"
LIMITS = "ZONERELAY_LIMITS"
STARTED_WITH = "ZONERELAY_STARTED_WITH"
"""Names in the environment: the channel's descriptor, listening sockets by address (JSON), the limits'
socket, the configuration that the supervisor was started with.
"""


@dataclass(frozen=True, slots=True)
class Identity:
    """`drains_spool`: the worker listens nowhere, empties its spool and removes it in the end. `limits` is
    the socket of the supervisor's limits, `None` where this process has its limits to itself.
    """

    index: int = 0
    supervised: bool = False
    drains_spool: bool = False
    inherited: Inherited = field(default_factory=Inherited)
    limits: Path | None = None


def identity_of(
    index: int, *, drains_spool: bool, environment: Mapping[str, str]
) -> tuple[Identity, socket.socket | None]:
    """Returns the identity that the environment gives, and the channel. Raises ValueError."""
    number = environment.get(CHANNEL)
    if number is None:
        return Identity(
            index, drains_spool=drains_spool, inherited=Inherited.of_systemd(environment, os.getpid())
        ), None
    given: dict[str, list[list[int]]] = json.loads(environment.get(SOCKETS, "{}"))
    limits = environment.get(LIMITS)
    identity = Identity(
        index,
        supervised=True,
        drains_spool=drains_spool,
        inherited=Inherited.of_supervisor(given),
        limits=None if limits is None else Path(limits),
    )
    channel = socket.socket(fileno=int(number))
    channel.setblocking(False)
    os.set_inheritable(channel.fileno(), False)
    return identity, channel
