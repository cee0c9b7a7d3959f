"""`python -m tests.support.endings --minutes 3`: relays that are ended at random moments, under load.

A *life* is one spool with a relay of random terms; it is stopped and killed a dozen times while clients send
as fast as they can, then it may empty its queue. What was acknowledged must have arrived, or be queued; what
arrived twice must have been in flight at a kill. For a message that is missing the log of the relay is kept,
and every line of it that names the message is printed. `--hogs` are loops that do nothing but compute.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.support.accounts import Account
from tests.support.dns import FakeDns
from tests.support.process import RelayProcess
from tests.support.sink import Sink
from tests.support.submit import Submitter, tokens

SESSIONS = 20
ROUNDS = 8
DOMAINS = [f"d{number}.example" for number in range(30)]
NAMES = ("a", "b", "greylist")


class Life:
    """One spool, from its beginning to an empty queue."""

    def __init__(
        self, chance: random.Random, directory: Path, backend: str, sink: Sink, dns: FakeDns
    ) -> None:
        self._chance = chance
        self._sink = sink
        self.account = Account()
        self.kills = 0
        self.by_mx = chance.random() < 0.5
        connections = chance.choice((1, 3, 20))
        zone = {
            "max_connections": connections,
            "max_connections_per_destination": chance.choice((1, connections)),
            **({"port": sink.port, "allow_private_addresses": True} if self.by_mx else {}),
        }
        self.relay = RelayProcess(
            directory,
            next_hop="" if self.by_mx else f"127.0.0.1:{sink.port}",
            zone=zone,
            spool={"backend": backend},
            tables={
                "retry": {"schedule": ["1s", "2s"], "suspend_min": "1s", "suspend_max": "2s"},
                "dns": {"servers": [dns.address]},
            },
        )
        self._rough = chance.choice((0.0, 0.0, 0.05, 0.5))
        sink.script = self._manners
        self.terms = (
            f"{backend}, {'MX' if self.by_mx else 'next hop'}, {connections} connections, {self._rough}"
        )

    def _manners(self, verb: str, _argument: str) -> str | None:
        """Hosts that put off, or have enough, until nobody sends any more."""
        if self._chance.random() >= self._rough or verb not in ("MAIL", "RCPT"):
            return None
        return self._chance.choice(("451 4.7.1 later", "421 4.3.2 enough for now"))

    async def live(self) -> list[str]:
        """What is wrong with it; empty if nothing."""
        with self.relay as relay:
            for number in range(ROUNDS):
                await self._round(number)
                await asyncio.to_thread(relay.restart)
            self._rough = 0.0
            return await self._settled()

    async def _round(self, number: int) -> None:
        chance, relay = self._chance, self.relay
        names = chance.choice((NAMES[:2], NAMES))
        domains = DOMAINS if chance.random() < 0.5 else DOMAINS[:2]
        client = Submitter(
            relay.smtp_port,
            prefix=f"round{number}",
            size=chance.choice((300, 2000, 2000, 150_000)),
            recipients=[f"{name}@{domain}" for domain in domains for name in names],
        )
        load = asyncio.create_task(client.run(SESSIONS, 100_000))
        await asyncio.sleep(chance.uniform(0.05, 1.2))
        await asyncio.to_thread(self._end)
        await load
        self.account.add(client)

    def _end(self) -> None:
        relay, chance = self.relay, self._chance
        how = chance.choice(("stop", "stop", "stop", "kill", "stop, then kill", "stop twice"))
        if how == "kill":
            relay.kill()
        else:
            relay.signal(signal.SIGTERM)
            if how != "stop":
                time.sleep(chance.uniform(0.0, 1.0))
                with contextlib.suppress(ProcessLookupError):
                    relay.signal(signal.SIGTERM if how == "stop twice" else signal.SIGKILL)
            relay.wait()
        if how != "stop":
            self.kills += 1

    async def _settled(self) -> list[str]:
        print(f"{self.terms}: emptying", flush=True)
        await asyncio.to_thread(self.relay.wait_until_empty, timeout=60.0)
        arrived = tokens(self._sink.messages)
        wrong = self.account.missing(arrived, self.relay)
        repeated = sum(count - 1 for count in arrived.values())
        print(
            f"{self.terms}: {len(self.account.ids)} acknowledged, {sum(arrived.values())} arrived,"
            f" {repeated} repeated in {self.kills} kills, {len(wrong)} missing",
            flush=True,
        )
        if repeated and not self.kills:
            wrong += [f"twice, without a kill: {token}" for token, count in arrived.items() if count > 1]
        return wrong


@contextlib.contextmanager
def hogs(count: int) -> Iterator[None]:
    """Keep cores busy."""
    running = [
        multiprocessing.get_context("spawn").Process(target=_compute, daemon=True) for _ in range(count)
    ]
    for each in running:
        each.start()
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.join()


def _compute() -> None:
    while True:
        sum(range(100_000))


async def lives(options: argparse.Namespace, directory: Path) -> bool:
    chance = random.Random(options.seed)
    until = time.monotonic() + 60 * options.minutes
    records = {f"d{n}.example": {"MX": [f"10 mx{n % 7}.example"]} for n in range(len(DOMAINS))}
    records |= {f"mx{n}.example": {"A": ["127.0.0.1"]} for n in range(7)}
    outcome: Counter[str] = Counter()
    async with FakeDns(records) as dns:
        while time.monotonic() < until:
            sink = Sink()
            await sink.start()
            place = directory / f"life{outcome['lives']}"
            life = Life(chance, place, chance.choice(options.backends), sink, dns)
            wrong = await life.live()
            await sink.close()
            outcome["lives"] += 1
            if wrong:
                outcome["bad"] += 1
                kept = options.logs / f"seed{options.seed}-{place.name}"
                shutil.copytree(place, kept, dirs_exist_ok=True)
                print(f"{life.terms}: see {kept}", *wrong, sep="\n")
            shutil.rmtree(place)
    return not outcome["bad"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.endings")
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hogs", type=int, default=0)
    parser.add_argument("--backends", nargs="+", default=["leveldb", "leveldb", "disk"])
    parser.add_argument("--logs", type=Path, default=Path("endings"), help="where bad lives are put")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, hogs(options.hogs):
        return 0 if asyncio.run(lives(options, Path(name))) else 1


if __name__ == "__main__":
    sys.exit(main())
