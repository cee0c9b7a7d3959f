"""A process to be killed: takes mail into a spool and says what it has acknowledged, or checks a spool.

    python -m tests.store.crash_worker take|one|check BACKEND DIRECTORY [IMAGE] [SIZE]

`one` takes a single message of SIZE octets and stops itself at the moment of its acknowledgement.

One line per fact, each written before anything that depends on it: `stored ID`, `settling ID`,
`settled ID`; from `check`: `whole ID` or `broken ID`.
"""

import asyncio
import os
import random
import signal
import sys
from pathlib import Path

from tests.store.builders import body_of, delivery_for, envelope_for
from tests.store.disks import mount_image
from tests.store.spools import Spool
from zonerelay.config.settings import Backend
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import queue_of
from zonerelay.model.envelope import MessageId, MessageIdSource
from zonerelay.store.contract import Finish, Store

SESSIONS = 6
SIZES = (500, 4096, 60_000, 300_000, 1_200_000)


def pattern(identity: MessageId, size: int) -> bytes:
    return (f"{identity}:{size}\r\n".encode() * (size // 20 + 1))[:size]


def say(fact: str, identity: MessageId) -> None:
    os.write(1, f"{fact} {identity}\n".encode())


async def take(store: Store) -> None:
    clock = SystemClock()
    ids = MessageIdSource(clock, last=store.last_message_id())
    await asyncio.gather(deliver(store, clock), *(session(store, ids) for _ in range(SESSIONS)))


async def session(store: Store, ids: MessageIdSource) -> None:
    choose = random.Random(ids.next())
    while True:
        await store_one(store, ids.next(), choose.choice(SIZES))


async def store_one(store: Store, identity: MessageId, size: int) -> None:
    envelope = envelope_for(identity, "a@example.net", "b@example.net")
    async with store.begin(envelope) as writer:
        body = pattern(identity, size)
        for start in range(0, size, 50_000):
            await writer.write(body[start : start + 50_000])
            await asyncio.sleep(0)
        await writer.commit([delivery_for(envelope, r.address) for r in envelope.recipients])
    say("stored", identity)


async def one(store: Store, size: int) -> None:
    await store_one(store, MessageIdSource(SystemClock()).next(), size)
    os.kill(os.getpid(), signal.SIGSTOP)


async def deliver(store: Store, clock: SystemClock) -> None:
    """Finish every third message, one recipient after the other."""
    while True:
        claimed = await store.claim(queue_of("default"), 6, now=clock.now())
        by_message: dict[MessageId, list[Finish]] = {}
        for delivery in claimed:
            by_message.setdefault(delivery.message_id, []).append(Finish(delivery))
        for identity, changes in by_message.items():
            if int(identity, 16) % 3 == 0 and len(changes) == 2:
                say("settling", identity)
                await store.settle(changes[:1], lazy=True)
                await store.settle(changes[1:])
                say("settled", identity)
        await asyncio.sleep(0.001)


async def check(store: Store) -> None:
    found = {delivery.message_id async for delivery in store.scan()}
    for identity in sorted(found):
        try:
            message = await store.read_message(identity)
            whole = await body_of(store, identity) == pattern(identity, message.size)
        except Exception as error:  # whatever it is, the test must see which message it was
            print(error, file=sys.stderr)
            whole = False
        say("whole" if whole else "broken", identity)


async def main(verb: str, backend: Backend, directory: Path, image: Path | None, size: int) -> None:
    if image is not None:
        mount_image(directory, image)
    # A small write buffer, so that LevelDB switches its log file many times a second.
    path, clock = directory / "spool", SystemClock()
    async with Spool(path, backend=backend, clock=clock, write_buffer=256 * 1024) as spool:
        if verb == "one":
            await one(spool.store, size)
        else:
            await (take if verb == "take" else check)(spool.store)


if __name__ == "__main__":
    asyncio.run(
        main(
            sys.argv[1],
            Backend(sys.argv[2]),
            Path(sys.argv[3]),
            Path(sys.argv[4]) if len(sys.argv) > 4 else None,
            int(sys.argv[5]) if len(sys.argv) > 5 else 0,
        )
    )
