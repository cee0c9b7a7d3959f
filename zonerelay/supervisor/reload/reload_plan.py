"""What a new configuration asks of a relay with several workers. Pure.

Three ways: each worker takes it up as it runs (SIGHUP), or is replaced, one after the other, or it waits for
the next start of the whole relay. Where the queue is kept is of the last kind: mail would be left behind.
"""

from __future__ import annotations

from dataclasses import dataclass

from zonerelay.config.changes import NEXT_START, RESTART, kept_from
from zonerelay.config.settings import Settings

ROLL = tuple(name for name in RESTART if name not in (*NEXT_START, "workers"))


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """`settings` are in force from now on. `roll` names what needs new processes."""

    settings: Settings
    later: tuple[str, ...]
    roll: tuple[str, ...]


def plan(old: Settings, new: Settings) -> ReloadPlan:
    later = tuple(name for name in NEXT_START if getattr(old, name) != getattr(new, name))
    settings = kept_from(old, new)
    roll = [name for name in ROLL if getattr(old, name) != getattr(new, name)]
    if {each.address for each in old.listener} != {each.address for each in new.listener}:
        roll.append("listener")  # a running process cannot be handed a socket
    return ReloadPlan(settings, later, tuple(roll))
