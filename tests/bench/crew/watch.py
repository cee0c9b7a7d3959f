"""What is looked at while workers come and go: figures that may only grow, readiness, and what may leak."""

from __future__ import annotations

import asyncio
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from tests.support.meters import read_memory
from tests.support.process import RelayProcess

EVERY = 0.2
_GROWING = ("_total", "_count", "_sum", "_bucket")
_NAMES = {
    "descriptors": "open descriptors of the supervisor",
    "rss": "its memory, MB",
    "threads": "its threads",
}


@dataclass(frozen=True, slots=True)
class Holdings:
    """Of a supervisor, at one moment; `files` are those beside the spool."""

    processes: int
    descriptors: int
    threads: int
    rss: float
    files: int

    @classmethod
    def of(cls, relay: RelayProcess) -> Holdings:
        own = Path(f"/proc/{relay.pid}")
        children = (own / "task" / str(relay.pid) / "children").read_text().split()
        return cls(
            processes=1 + len(children),
            descriptors=_entries(own / "fd"),
            threads=_entries(own / "task"),
            rss=read_memory([relay.pid]).rss / 1e6,
            files=_entries(relay.directory),
        )

    def lines(self, later: Holdings) -> list[str]:
        names = [_NAMES.get(each.name, each.name) for each in fields(self)]
        rows = zip(names, astuple(self), astuple(later), strict=True)
        return [f"{name:36}{one:8.0f}{other:8.0f}" for name, one, other in rows]


def _entries(directory: Path) -> int:
    return sum(1 for _ in directory.iterdir())


class Watch:
    """`backwards` are samples that were less than before, `unready` what /readyz said when it was not 200."""

    def __init__(self, relay: RelayProcess) -> None:
        self._relay = relay
        self._before: dict[str, float] = {}
        self.scrapes = 0
        self.backwards: list[str] = []
        self.unready: list[str] = []

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.to_thread(self._look)
            await asyncio.sleep(EVERY)

    def _look(self) -> None:
        now = {
            name: value
            for name, value in self._relay.metrics().items()
            if name.partition("{")[0].endswith(_GROWING)
        }
        gone = self._before.keys() - now.keys()
        self.backwards.extend(f"{name} is gone" for name in gone)
        self.backwards.extend(
            f"{name}: {self._before[name]:g}, then {value:g}"
            for name, value in now.items()
            if value < self._before.get(name, 0.0)
        )
        self._before = now
        self.scrapes += 1
        status, body = self._relay.http("/readyz")
        if status != 200:
            self.unready.append(f"{status} {body.strip()}")
