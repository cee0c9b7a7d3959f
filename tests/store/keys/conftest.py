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


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The contract: what is tested with `place` holds for every engine, with `shared` for every shared
    one.
    """
    if "place" in metafunc.fixturenames:
        wanted = [
            name for name, each in PLACES.items() if each.is_shared or "shared" not in metafunc.fixturenames
        ]
        metafunc.parametrize("place", wanted, indirect=True)


@pytest.fixture
def shared() -> None:
    """A test of several writers."""


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
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
