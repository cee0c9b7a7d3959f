"""Fills a tmpfs of its own with mail, frees some space and looks what is left: all of it.

python -m tests.store.full_disk_worker BACKEND DIRECTORY SIZE-OF-A-MESSAGE
"""

import asyncio
import random
import sys
from pathlib import Path

from tests.store.builders import NOW, body_of, message_id, store_message
from tests.store.disks import mount_tmpfs
from tests.store.spools import Spool
from tests.support.waiting import until
from zonerelay.config.settings import Backend
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import queue_of
from zonerelay.store.contract import Finish, StoreError, StoreFullError

TMPFS_SIZE = 40 * 1024 * 1024
# More than what LevelDB needs to compact everything that is left.
BALLAST = 28 * 1024 * 1024


def incompressible(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


async def main(backend: Backend, directory: Path, size: int) -> None:
    mount_tmpfs(directory, TMPFS_SIZE)
    ballast = directory / "ballast"
    ballast.write_bytes(bytes(BALLAST))
    async with Spool(
        directory / "spool", backend=backend, clock=SystemClock(), write_buffer=1024 * 1024
    ) as spool:
        store = spool.store
        number = 1
        try:
            while True:
                await store_message(store, number, body=incompressible(number, size))
                number += 1
        except StoreFullError:
            print("full after", number - 1)
        # Said; and by now perhaps taken back, when a look at the disk found the room of a failed upload.
        assert spool.health[0] == "insufficient disk space"
        ballast.unlink()
        await until(lambda: store.unhealthy() is None)
        claimed = await store.claim(queue_of("default"), 100_000, now=NOW)
        assert {int(d.message_id, 16) for d in claimed} - {number} == set(range(1, number))
        for delivery in claimed:
            number_read = int(delivery.message_id, 16)
            assert await body_of(store, delivery.message_id) == incompressible(number_read, size)
        await store_message(store, number + 1)
        await asyncio.gather(*(store.settle([Finish(delivery)], lazy=True) for delivery in claimed))
        (left,) = await store.claim(queue_of("default"), 10, now=NOW)
        assert left.message_id == message_id(number + 1)
    print("recovered")


if __name__ == "__main__":
    try:
        asyncio.run(main(Backend(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
    except StoreError as error:
        sys.exit(f"{type(error).__name__}: {error}")
