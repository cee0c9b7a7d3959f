"""A process with a file system of few inodes: what the engines of this machine say when none is left.

python -m tests.store.keys.inodes_worker DIRECTORY
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from tests.store.disks import mount_tmpfs
from tests.store.keys.full_worker import LARGE, fill
from tests.store.keys.places import PLACES
from zonerelay.model.clock import SystemClock
from zonerelay.store.contract import StoreError, StoreFullError
from zonerelay.store.keys.partition import open_partition
from zonerelay.store.keys.port import Write
from zonerelay.store.leveldb.spool import LevelDb


async def main(directory: Path) -> None:
    mount_tmpfs(directory, 64 * 1024 * 1024, files=100)
    engine = PLACES["directory"](directory).engine()
    partition = await open_partition(engine, 0, token="worker", clock=SystemClock())
    assert len(await fill(partition)) > 10
    try:
        await partition.write(Write({b"more": bytes(LARGE)}))
    except StoreFullError as error:
        print(error)
    spool = LevelDb(directory / "spool", write_buffer=LARGE)
    try:
        spool.open()
    except StoreError as error:
        print(error)
    await partition.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
