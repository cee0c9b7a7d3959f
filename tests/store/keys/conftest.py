"""A place per engine, and partitions that are closed when their test ends."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.store.keys.places import PLACES, Place
from zonerelay.model.clock import SystemClock
from zonerelay.store.keys.partition import Partition, SeenFile, open_partition
from zonerelay.store.keys.port import Engine

Opening = Callable[..., Awaitable[Partition]]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """The contract: what is tested with it holds for every engine."""
    made = PLACES[request.param](tmp_path)
    yield made
    made.close()


class Opened:
    """Opens partitions of a place, each through an engine of its own, and closes what is left."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._partitions: list[Partition] = []
        self._engines: list[Engine] = []

    def engine(self) -> Engine:
        self._engines.append(self._place.engine())
        return self._engines[-1]

    def seen_file(self, node: int = 0, token: str = "machine") -> SeenFile:
        return SeenFile(self._place.directory / "seen_file" / f"{token}-{node}", token)

    async def __call__(
        self,
        node: int = 0,
        *,
        engine: Engine | None = None,
        token: str = "here",
        **other: Any,  # Any: parameters of open_partition
    ) -> Partition:
        partition = await open_partition(
            engine or self.engine(), node, token=token, clock=SystemClock(), **other
        )
        self._partitions.append(partition)
        return partition

    async def close(self) -> None:
        for partition in self._partitions:
            await partition.close()
        for engine in self._engines:
            await engine.close()


@pytest.fixture
async def opened(place: Place) -> AsyncIterator[Opened]:
    made = Opened(place)
    yield made
    await made.close()
