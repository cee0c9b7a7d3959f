"""What a partition on a server that dies has to keep, whatever the server is."""

import asyncio
from typing import Any, Protocol

import pytest

from zonerelay.store.contract import StoreError
from zonerelay.store.keys.partition import Partition
from zonerelay.store.keys.port import PartitionState, Write


class Mortal(Protocol):
    def kill(self) -> None: ...

    def start(self) -> None: ...


async def write_through_kills(partition: Partition, server: Mortal, kills: int) -> None:
    """Write in several sessions while the server is killed; whatever was acknowledged is there."""
    stored: list[bytes] = []
    stop = asyncio.Event()

    async def session(number: int) -> None:
        step = 0
        while not stop.is_set():
            key, step = b"%d %06d" % (number, step), step + 1
            try:
                await partition.write(Write({key: key * 50}))
            except StoreError:
                await asyncio.sleep(0.05)
            else:
                stored.append(key)

    sessions = [asyncio.ensure_future(session(number)) for number in range(8)]
    for _ in range(kills):
        await asyncio.sleep(0.3)
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
    await asyncio.sleep(0.5)
    stop.set()
    await asyncio.gather(*sessions)
    assert len(stored) > 50
    assert await partition.get(stored) == [key * 50 for key in stored]
    await partition.close()


async def write_while_judged(partition: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that ends while a new connection is judged is no older state."""
    keeper: Any = partition.keeper  # of either engine
    look = keeper._look

    async def slow(*asked: Any) -> PartitionState | None:
        state: PartitionState | None = await look(*asked)
        monkeypatch.setattr(keeper, "_look", look)
        await partition.write(Write({b"a": b"1"}))
        return state

    await partition.write(Write({b"a": b"0"}))
    monkeypatch.setattr(keeper, "_look", slow)
    assert await partition.get([b"a"]) == [b"1"]
    await partition.close()


async def written(partition: Partition, key: bytes) -> None:
    """The partition can be written again, in a while."""
    async with asyncio.timeout(10):
        while True:
            try:
                await partition.write(Write({key: b"back"}))
            except StoreError:
                await asyncio.sleep(0.05)
            else:
                break
    assert await partition.get([key]) == [b"back"]
