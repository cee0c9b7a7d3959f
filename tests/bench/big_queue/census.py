"""What looks for reference cycles cost in a process (zonerelay.cycles): CPU time, and the objects by type.

Lives in the watched relay, which takes a census when it gets `SIGNAL`.
"""

import gc
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

from zonerelay.process.gc import Collection, collect

SIGNAL = signal.SIGUSR1


class Census(msgspec.Struct, frozen=True):
    """CPU seconds of a look at what is not settled, and of one at all. `blocks`: allocated, after them."""

    settle_cpu: float
    unsettled: int
    whole_cpu: float
    collected: int
    blocks: int
    types: dict[str, int]


def take() -> Census:
    unsettled = len(gc.get_objects())
    settle_cpu, _ = _look(Collection.SETTLE)
    whole_cpu, collected = _look(Collection.WHOLE)
    gc.unfreeze()
    types = Counter(map(_name, gc.get_objects()))
    gc.freeze()
    return Census(settle_cpu, unsettled, whole_cpu, collected, sys.getallocatedblocks(), dict(types))


def _look(look: Collection) -> tuple[float, int]:
    """CPU seconds, and how many objects went."""
    found = 0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal found
        if phase == "stop":
            found += info["collected"]

    gc.callbacks.append(note)
    began = time.thread_time()
    collect(look)
    cpu = time.thread_time() - began
    gc.callbacks.remove(note)
    return cpu, found


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(take()) + b"\n")


def text(census: Census, most: int = 25) -> str:
    types = sorted(census.types.items(), key=lambda each: -each[1])[:most]
    said = ", ".join(f"{name} {count:,}" for name, count in types)
    return (
        f"look at {census.unsettled:,} unsettled objects: {census.settle_cpu * 1e3:.0f} ms of CPU;"
        f" at all {sum(census.types.values()):,}: {census.whole_cpu * 1e3:.0f} ms,"
        f" {census.collected} collected; {census.blocks:,} blocks ({said})"
    )


def _name(thing: object) -> str:
    kind = type(thing)
    return (
        kind.__name__ if kind.__module__ in sys.builtin_module_names else f"{kind.__module__}.{kind.__name__}"
    )
