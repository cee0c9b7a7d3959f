"""What the pauses of a watched loop were: a table by phase, and the stacks of the relay's own long ones."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.bench.big_queue.loop_watch import Collection, Pause, Seen

OWN = 0.050
"""CPU seconds of the loop's own in one pause: longer than it should ever be."""
SHOWN = 6
"""Pauses of a phase that are told of one by one."""
STACKS = 3


@dataclass(frozen=True, slots=True)
class Phase:
    """What was done in a span of the monotonic clock. `cpu`: seconds that the relay used meanwhile."""

    name: str
    began: float
    ended: float
    cpu: float
    said: str

    @property
    def seconds(self) -> float:
        return self.ended - self.began


def show(path: Path, phases: list[Phase]) -> None:
    lines = path.read_bytes().splitlines() if path.exists() else []
    seen = [msgspec.json.decode(line, type=Seen) for line in lines]
    pauses = [each.pause for each in seen if each.pause is not None]
    collections = [each.collection for each in seen if each.collection is not None]
    print(
        "\n| phase | s | CPU s | > 20 ms | > 50 ms | longest | own CPU > 50 ms | longest | full gc: longest |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for phase in phases:
        _row(phase, _within(phase, pauses), [c for c in collections if phase.began <= c.began < phase.ended])
    for phase in phases:
        _details(phase, _within(phase, pauses))
    for full in (each for each in collections if each.generation == 2):
        print(
            f"full gc at {full.began - phases[0].ended:.1f} s: {full.cpu * 1e3:.0f} ms of CPU,"
            f" {full.collected} objects collected"
        )


def _within(phase: Phase, pauses: list[Pause]) -> list[Pause]:
    return [pause for pause in pauses if phase.began <= pause.ended < phase.ended]


def _row(phase: Phase, pauses: list[Pause], collections: list[Collection]) -> None:
    walls = [pause.wall for pause in pauses]
    own = [pause.cpu for pause in pauses]
    full = [c.cpu for c in collections if c.generation == 2]
    print(
        f"| {phase.name} | {phase.seconds:.0f} | {phase.cpu:.0f} | {len(pauses)} | {_over(walls)} |"
        f" {_ms(walls)} | {_over(own)} | {_ms(own)} | {len(full)}: {_ms(full)} |"
        f" {_ms([c.cpu for c in collections if c.generation == 1])} |"
    )


def _over(seconds: list[float]) -> int:
    return sum(each > OWN for each in seconds)


def _ms(seconds: list[float]) -> str:
    return f"{max(seconds, default=0.0) * 1e3:.0f} ms"


def _details(phase: Phase, pauses: list[Pause]) -> None:
    for pause in sorted(pauses, key=lambda pause: (pause.cpu + pause.others, pause.wall), reverse=True)[
        :SHOWN
    ]:
        print(
            f"{phase.name}: {pause.wall * 1e3:.0f} ms = own CPU {pause.cpu * 1e3:.0f}, other threads'"
            f" {pause.others * 1e3:.0f}, the machine's {pause.waiting * 1e3:.0f},"
            f" blocked {pause.blocked * 1e3:.0f}; gc {pause.collecting * 1e3:.0f}"
        )
        for stack, count in Counter(pause.stacks).most_common(STACKS):
            print(f"    {count} × {stack}")
