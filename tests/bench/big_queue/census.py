"""What a full garbage collection looks at in a process: its CPU time, and the tracked objects by type.

Lives in the watched relay, which takes a census when it gets `SIGNAL`.
"""

from __future__ import annotations

import gc
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

SIGNAL = signal.SIGUSR1


class Census(msgspec.Struct, frozen=True):
    """`cpu`: of a full collection, seconds. `frozen`: objects that it does not look at."""

    cpu: float
    collected: int
    frozen: int
    tracked: int
    types: dict[str, int]


def take() -> Census:
    began = time.thread_time()
    collected = gc.collect()
    cpu = time.thread_time() - began
    types = Counter(map(_name, gc.get_objects()))
    return Census(cpu, collected, gc.get_freeze_count(), types.total(), dict(types))


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(take()) + b"\n")


def text(census: Census, most: int = 25) -> str:
    types = sorted(census.types.items(), key=lambda each: -each[1])[:most]
    said = ", ".join(f"{name} {count:,}" for name, count in types)
    return (
        f"full collection: {census.cpu * 1e3:.0f} ms of CPU, {census.collected} objects collected;"
        f" tracked {census.tracked:,} ({said}); frozen {census.frozen:,}"
    )


def _name(thing: object) -> str:
    kind = type(thing)
    return (
        kind.__name__ if kind.__module__ in sys.builtin_module_names else f"{kind.__module__}.{kind.__name__}"
    )
