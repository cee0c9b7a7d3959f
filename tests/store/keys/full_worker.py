"""A process with a small file system of its own: fills it with keys, and removes them again.

    python -m tests.store.keys.full_worker ENGINE DIRECTORY [MEGABYTES]

Asserts what the port promises without room: refused writes leave nothing, and what makes room is written.
Without a size the file system has few inodes.
"""

import asyncio
import os
import sys
from pathlib import Path

from tests.store.disks import mount_tmpfs
from tests.store.keys.places import PLACES
from zonerelay.model.clock import SystemClock
from zonerelay.store.contract import StoreError, StoreFullError
from zonerelay.store.keys.partition import Partition, open_partition
from zonerelay.store.keys.port import Write, pages
from zonerelay.store.leveldb.spool import LevelDb

LARGE = 64 * 1024


async def fill(partition: Partition) -> list[bytes]:
    stored: list[bytes] = []
    for number in range(100_000):
        key = b"k%06d" % number
        try:
            await partition.write(Write({key: os.urandom(LARGE)}))
        except StoreFullError:
            return stored
        stored.append(key)
    raise AssertionError("it does not become full")


async def all_keys(partition: Partition) -> list[bytes]:
    return [key async for rows in pages(partition, b"k", b"l", values=False) for key, _ in rows]


async def remove(partition: Partition, key: bytes) -> None:
    """With a record of its outcome. The store may need a moment to make way."""
    for _ in range(200):
        try:
            await partition.write(Write({key: None, b"outcome %b" % key: b"delivered"}, makes_room=True))
        except StoreError:
            await asyncio.sleep(0.05)
        else:
            return
    raise AssertionError(f"{key!r} cannot be removed")


async def main(name: str, directory: Path, megabytes: int) -> None:
    mount_tmpfs(directory, megabytes * 1024 * 1024)
    place = PLACES[name](directory)
    place.reserve = megabytes * 1024 * 1024 // 4
    engine = place.engine()
    partition = await open_partition(engine, 0, token="worker", clock=SystemClock(), wait=10)
    stored = await fill(partition)
    assert len(stored) > 10
    assert await all_keys(partition) == stored
    for key in stored[: len(stored) // 2]:
        await remove(partition, key)
    assert await all_keys(partition) == stored[len(stored) // 2 :]
    await partition.close()
    again = await open_partition(place.engine(), 0, token="worker", clock=SystemClock(), wait=10)
    assert await all_keys(again) == stored[len(stored) // 2 :]
    await again.close()
    print(len(stored))


async def without_inodes(directory: Path) -> None:
    """Say what a file system without inodes makes of a write, and of a start of LevelDB."""
    mount_tmpfs(directory, 64 * 1024 * 1024, files=100)
    engine = PLACES["directory"](directory).engine()
    partition = await open_partition(engine, 0, token="worker", clock=SystemClock())
    assert len(await fill(partition)) > 10
    try:
        await partition.write(Write({b"more": bytes(LARGE)}))
    except StoreFullError as error:
        print(error)
    try:
        LevelDb(directory / "spool", write_buffer=LARGE).open()
    except StoreError as error:
        print(error)
    await partition.close()


if __name__ == "__main__":
    name, place, *size = sys.argv[1:]
    asyncio.run(main(name, Path(place), int(size[0])) if size else without_inodes(Path(place)))
