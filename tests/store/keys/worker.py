"""A process to be killed: writes batches and says which are durable, or checks what is stored.

    python -m tests.store.keys.worker write|check ENGINE DIRECTORY [WORD…]

With KEYS_IMAGE in the environment that image is mounted at the directory first, for this process alone.

Each batch has KEYS keys of one number, and removes those of an earlier one. A line `NUMBER` is written when
the batch is durable. `check` prints the numbers that are whole, and fails when a batch is there in part.
"""

import asyncio
import collections
import os
import sys
from pathlib import Path

from tests.store.disks import mount_image
from tests.store.keys.places import PLACES
from zonerelay.model.clock import SystemClock
from zonerelay.store.keys.partition import Partition, open_partition
from zonerelay.store.keys.port import Write, pages

KEYS = 5
SESSIONS = 4
KEPT = 50
SIZES = (20, 3000, 40_000)


async def session(partition: Partition, number: int) -> None:
    while True:
        changes: dict[bytes, bytes | None] = {
            b"%08d %d" % (number, key): b"%d" % number * (SIZES[number % 3] // 8) for key in range(KEYS)
        }
        gone = number - KEPT * SESSIONS
        changes |= {b"%08d %d" % (gone, key): None for key in range(KEYS) if gone >= 0}
        await partition.write(Write(changes))
        os.write(1, b"%d\n" % number)
        number += SESSIONS


async def check(partition: Partition) -> None:
    found: collections.Counter[int] = collections.Counter()
    async for rows in pages(partition, b"0", b":"):
        found.update(int(key[:8]) for key, _ in rows)
    broken = [number for number, count in found.items() if count != KEYS]
    assert not broken, f"in part: {broken}"
    print(*sorted(found))


async def main(verb: str, name: str, directory: Path, *words: str) -> None:
    if image := os.environ.get("KEYS_IMAGE"):
        mount_image(directory, Path(image))
    place = PLACES[name](directory, *words)
    engine = place.engine()
    partition = await open_partition(engine, 0, token="worker", clock=SystemClock(), wait=10)
    if verb == "check":
        await check(partition)
    else:
        last = await partition.last_key(b"0", b":")
        first = (int(last[:8]) // SESSIONS + 1) * SESSIONS if last else 0
        await asyncio.gather(*(session(partition, first + each) for each in range(SESSIONS)))
    await partition.close()
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:]))
