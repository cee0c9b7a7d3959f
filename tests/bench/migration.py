"""A large queue that moves to another engine and back: messages a second, memory, and whether it is the same.

    python -m tests.bench.migration [--messages 100000] [--engines postgres,leveldb]

fills a LevelDB spool and migrates it from there to each of the engines in turn. Each migration is a process
of its own. In the end all envelopes, states and bodies must have the digest that they had at first.
"""

import argparse
import asyncio
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from msgspec import structs

from tests.store.builders import NOW, attempt, delivery_for, envelope_for, message_id
from tests.transfer.migrations import configured, queue
from zonerelay.model.envelope import Notify
from zonerelay.store.contract import Store

PROGRAM = Path(sys.executable).with_name("zonerelay")
DIRECTORY = Path("/var/tmp")  # survives on disk where /tmp is memory
SIZES = (1_000, 4_000, 4_000, 4_000, 20_000, 100_000)
TOGETHER = 64


async def fill(config: Path, messages: int) -> None:
    """Of several sizes, one to three recipients, every fifth deferred, every twentieth held."""
    async with queue(config) as store:
        for start in range(1, messages + 1, TOGETHER):
            numbers = range(start, min(start + TOGETHER, messages + 1))
            await asyncio.gather(*(_store(store, number) for number in numbers))


async def _store(store: Store, number: int) -> None:
    chance = random.Random(number)
    names = [f"to-{number}-{place}@example{place}.net" for place in range(chance.randint(1, 3))]
    envelope = structs.replace(envelope_for(message_id(number << 8), *names), envid=f"id{number}")
    deliveries = [
        structs.replace(
            delivery_for(envelope, name),
            notify=Notify.FAILURE,
            orcpt=f"rfc822;{name}",
            held=number % 20 == 0,
            next_attempt=NOW + 1e9 + number / 7 if number % 5 == 0 else 0.0,
            attempts=number % 5,
            last=attempt(NOW + number) if number % 5 == 0 else None,
        )
        for name in names
    ]
    size = chance.choice(SIZES)
    body = b"Subject: x\r\n\r\n" + chance.randbytes(size // 2).hex().encode() + b"\r\n"
    async with store.begin(envelope) as writer:
        await writer.write(body)
        await writer.commit(deliveries, headers=(("Subject", "x"),), plain_lines=True)


async def digest(config: Path) -> tuple[int, str]:
    """How many deliveries there are, and the digest of everything."""
    total = hashlib.sha256()
    count = 0
    async with queue(config) as store:
        ids = sorted({each.message_id async for each in store.scan()})
        for identity in ids:
            deliveries = await store.deliveries_of(identity)
            count += len(deliveries)
            keys = [(each.queue, each) for each in deliveries]
            total.update(msgspec.json.encode((await store.read_message(identity), keys)))
            async for piece in store.read_body(identity):
                total.update(piece)
    return count, total.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.migration")
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--engines", default="postgres,leveldb")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=DIRECTORY) as home:
        source = configured(Path(home) / "0-leveldb", "leveldb")
        asyncio.run(fill(source, arguments.messages))
        before = asyncio.run(digest(source))
        print(f"{arguments.messages} messages, {before[0]} deliveries, digest {before[1][:16]}", flush=True)
        for number, engine in enumerate(arguments.engines.split(","), 1):
            target = configured(Path(home) / f"{number}-{engine}", engine)
            words = ["spool", "migrate", "--config", str(source), "--to", str(target), "--json"]
            started = time.monotonic()
            done = subprocess.run(
                ["/usr/bin/time", "-v", str(PROGRAM), *words], capture_output=True, text=True, check=True
            )
            seconds = time.monotonic() - started
            told = json.loads(done.stdout)
            memory = next(line for line in done.stderr.splitlines() if "Maximum resident" in line)
            print(
                f"to {engine}: {told['messages']} messages, {told['octets'] / 1e6:.0f} MB in {seconds:.0f} s,"
                f" {told['messages'] / seconds:.0f}/s, {int(memory.split()[-1]) / 1024:.0f} MB of RAM",
                flush=True,
            )
            source = target
        after = asyncio.run(digest(source))
        print("the same, octet by octet" if after == before else f"NOT the same: {after}")


if __name__ == "__main__":
    main()
