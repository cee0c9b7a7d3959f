"""Queues that move between engines, runs of the command that are killed, and relays that send meanwhile.

    python -m tests.transfer.migrations [KILLS]

kills runs at random moments and steps, over pairs of engines, and says what became of every delivery.
"""

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import structs

from tests.store.builders import NOW, attempt, body_of, delivery_for, envelope_for, message_id
from tests.support.postgres import shared_postgres
from tests.support.redis_server import shared_server
from tests.support.s3_server import BUCKET, KEY, SECRET, shared_moto
from zonerelay.cli.main import main as zonerelay
from zonerelay.cli.spool.stopped import opened
from zonerelay.config.load import load
from zonerelay.model.delivery import Delivery, queue_of
from zonerelay.model.envelope import Message, Notify, Ret
from zonerelay.store.contract import Finish, Store

ENGINES = ("leveldb", "disk", "redis", "postgres", "s3")
PAIRS = [
    ("leveldb", "disk"),
    ("leveldb", "postgres"),
    ("postgres", "leveldb"),
    ("disk", "redis"),
    ("redis", "postgres"),
    ("s3", "leveldb"),
    ("leveldb", "s3"),
]
LARGE = b"Subject: large\r\n\r\n" + b"0123456789abcde\r\n" * 20_000

Row = tuple[Message, Delivery, bytes]


def configured(home: Path, engine: str = "leveldb", **more: str) -> Path:
    """The configuration of a relay with an empty queue of its own. `more` are options of [spool]."""
    home.mkdir()
    options = {"backend": engine, "path": f"{home}/spool", "min_free_space": "0", **more}
    text = "[spool]\n" + "".join(f'{key} = "{value}"\n' for key, value in options.items())
    own = uuid.uuid4().hex[:16]
    if engine == "redis":
        text += f'[redis]\nurl = "{shared_server().url}"\nprefix = "{own}:"\nlease = "2s"\ntimeout = "1s"\n'
    elif engine == "postgres":
        text += f'[postgres]\nurl = "{shared_postgres().url}"\nschema = "q{own}"\n'
    elif engine == "s3":
        os.environ["SECRET"] = SECRET
        text += (
            f'[s3]\nbucket = "{BUCKET}"\nprefix = "{own}/"\nendpoint_url = "{shared_moto().url}"\n'
            f'access_key = "{KEY}"\nsecret_key = "env:SECRET"\n'
            'lease = "6s"\ntimeout = "5s"\nmax_requests = 8\n'
        )
    path = home / "zonerelay.toml"
    path.write_text(text)
    return path


def spool(config: Path, *words: str) -> int:
    """Call `zonerelay spool` as an operator does."""
    return zonerelay(["spool", *words, "--config", str(config)])


@asynccontextmanager
async def queue(config: Path, worker: int = 0) -> AsyncIterator[Store]:
    """As a relay of this configuration opens it."""
    async with opened(load(config), worker) as store:
        yield store


async def fill(config: Path, messages: int) -> None:
    """Messages with one to three recipients, in every state, with every wish, of every size."""
    async with queue(config) as store:
        for number in range(1, messages + 1):
            names = [
                f"{place}-{number}@example.{'net' if place else 'org'}" for place in range(number % 3 + 1)
            ]
            envelope = structs.replace(
                envelope_for(message_id(number * 256), *names), ret=Ret.HDRS, envid=f"Q+2B{number}"
            )
            deliveries = [delivery_for(envelope, name) for name in names]
            kind = number % 5
            deliveries[0] = structs.replace(
                deliveries[0],
                held=kind == 1,
                attempts=kind,
                last=attempt(NOW - number) if kind else None,
                next_attempt=NOW + 1e9 + number / 7 if kind == 2 else 0.0,
                queue=queue_of(("default", "default;bulk", "other")[number % 3]),
                notify=Notify.SUCCESS | Notify.DELAY,
                orcpt=f"rfc822;{number}@example.net",
                warned=kind == 3,
            )
            body = LARGE if number % 11 == 0 else b"Subject: \xff\r\n\r\n%d\r\n" % number
            message = Message(
                envelope=envelope,
                size=0,
                chunks=0,
                headers=(("Subject", "é"),),
                eight_bit=True,
                body_hash="aGFzaA==",
                trace=("x=1",),
            )
            await commit(store, [(message, each, body if number % 13 else b"") for each in deliveries])


async def contents(config: Path, worker: int = 0) -> dict[str, Row]:
    """By recipient, who has one delivery in all."""
    async with queue(config, worker) as store:
        found: dict[str, Row] = {}
        async for each in store.scan():
            row = await store.read_message(each.message_id), each, await body_of(store, each.message_id)
            assert each.recipient not in found, "a delivery is there twice"
            found[each.recipient] = row
        return found


async def commit(store: Store, rows: list[Row]) -> None:
    """One message, with all its deliveries, as it was."""
    message, _, body = rows[0]
    async with store.begin(message.envelope) as writer:
        await writer.write(body)
        await writer.commit(
            [row[1] for row in rows],
            headers=message.headers,
            eight_bit=message.eight_bit,
            body_hash=message.body_hash,
            trace=message.trace,
        )


COMMAND = (sys.executable, "-m", "tests.transfer.migrate_worker")


def begin(source: Path, target: Path, step: int) -> subprocess.Popen[bytes]:
    """The command in a process of its own, which kills itself at this step; 0: it does not."""
    command = (*COMMAND, str(source), str(target), str(step))
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@dataclass
class Story:
    """One queue on its way. `sent` is what relays have sent of it, from either side."""

    source: Path
    target: Path
    chance: random.Random
    before: dict[str, Row] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    kills: int = 0

    def start(self, messages: int) -> None:
        asyncio.run(fill(self.source, messages))
        self.before = asyncio.run(contents(self.source))

    def is_killed(self, step: int, patience: float = 60.0) -> bool:
        """One run of the command; at a negative step it is interrupted. False: it came to its end."""
        with begin(self.source, self.target, step) as run:
            try:
                told, _ = run.communicate(timeout=patience)
            except subprocess.TimeoutExpired:
                run.kill()  # at a moment, not at a step
                told, _ = run.communicate()
        if run.returncode in (-signal.SIGKILL, 130):
            self.kills += 1
            return True
        assert run.returncode == 0, told.decode()
        return False

    def relays_run(self) -> None:
        """The relay of each side runs for a moment, and sends a few messages."""
        for config in (self.source, self.target):
            asyncio.run(self._send(config))

    async def _send(self, config: Path) -> None:
        async with queue(config) as store:
            for zone in ("default", "default;bulk", "other"):
                claimed = await store.claim(queue_of(zone), self.chance.randint(0, 2), now=time.time())
                self.sent.update(each.recipient for each in claimed)
                await store.settle([Finish(each) for each in claimed])

    def check(self) -> None:
        """Everything is in the target as it was in the source, or was sent once."""
        assert asyncio.run(contents(self.source)) == {}
        after = asyncio.run(contents(self.target))
        assert max(self.sent.values(), default=1) == 1, "sent twice"
        assert not self.sent.keys() & after.keys(), "sent, and in the queue"
        assert self.sent.keys() | after.keys() == self.before.keys(), "lost"
        assert not any(self.before[each][1].held for each in self.sent), "sent although it was held"
        for recipient, row in after.items():
            assert row == self.before[recipient], recipient
        left = [each.name for each in self.source.parent.iterdir() if each.name.startswith("migration")]
        assert left == [], "the journal is still there"


def tell(pair: tuple[str, str], kills: int, home: Path, seed: int, *, moments: bool = False) -> Story:
    """Kills so many runs at steps (or `moments`), with relays that send between them, and ends it."""
    chance = random.Random(seed)
    story = Story(configured(home / "a", pair[0]), configured(home / "b", pair[1]), chance)
    story.start(40)
    while story.kills < kills:
        if moments and chance.random() < 0.5:
            killed = story.is_killed(0, patience=chance.uniform(0.4, 1.6))
        else:
            killed = story.is_killed(chance.choice((1, 1, 1, -1)) * chance.randint(1, 30))
        if not killed:
            break
        if pair[1] != "s3":  # a relay of an S3 target is stopped
            story.relays_run()
    story.is_killed(0)
    story.check()
    return story


def main(kills: int) -> None:
    done = 0
    seed = random.randrange(1 << 30)
    while done < kills:
        seed += 1
        pair = PAIRS[seed % len(PAIRS)]
        with tempfile.TemporaryDirectory() as home:
            story = tell(pair, min(8, kills - done), Path(home), seed, moments=True)
        done += story.kills
        print(
            f"seed {seed}: {pair[0]} to {pair[1]}: {story.kills} kills, {len(story.before)} deliveries,"
            f" {len(story.sent)} sent meanwhile, none lost, none twice"
        )
    print(f"{done} kills")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
