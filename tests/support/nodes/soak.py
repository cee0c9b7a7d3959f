"""`python -m tests.support.nodes.soak redis --seed 1`: random faults for minutes, alone and together.

For finding what a short test does not; says what it did, and fails with the first thing that should not be.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

from tests.support.nodes.fleet import Fleet, fleet
from tests.support.nodes.network import Network
from tests.support.nodes.stores import LEASE, STORES, SharedStore, prepare


class Soak:
    def __init__(self, running: Fleet, chance: random.Random) -> None:
        self._running = running
        self._chance = chance
        self._busy: set[int] = set()
        self._began = time.monotonic()

    def say(self, *words: object) -> None:
        print(f"{time.monotonic() - self._began:7.2f}", *words, flush=True)

    async def go(self, seconds: float) -> None:
        running, chance = self._running, self._chance
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            await asyncio.sleep(chance.uniform(0.2, 2.0))
            async with asyncio.TaskGroup() as tasks:
                for number in chance.sample(range(len(running.nodes)), chance.choice((0, 1, 1, 1, 2, 3))):
                    tasks.create_task(self._node(number))
                if chance.random() < 0.25:
                    tasks.create_task(self._store())
            await running.taking_mail()

    async def _node(self, number: int) -> None:
        running, chance = self._running, self._chance
        await asyncio.sleep(chance.uniform(0, 1.0))
        seconds = chance.choice((0.1, 0.5, 0.9 * LEASE, 1.1 * LEASE, 2.0 * LEASE, 3.0 * LEASE))
        what = chance.choice(("kill", "stop", "cut", "cut out", "cut back"))
        self.say(what, number, f"{seconds:.1f} s")
        if what == "kill":
            await running.kill(number)
            await asyncio.sleep(chance.choice((0, seconds)))
            await running.start(number)
        elif what == "stop":
            await running.stop_and_go(number, seconds)
        else:
            await running.cut(number, seconds, out=what != "cut back", back=what != "cut out")

    async def _store(self) -> None:
        await asyncio.sleep(self._chance.uniform(0, 2.0))
        seconds = self._chance.choice((0.0, 0.5, 1.5 * LEASE))
        self.say("store", f"{seconds:.1f} s")
        await self._running.crash_store(seconds)


async def soak(network: Network, store: SharedStore, options: argparse.Namespace, directory: Path) -> bool:
    async with fleet(network, store, directory) as running:
        soaking = Soak(running, random.Random(options.seed))
        running.load.start()
        try:
            await soaking.go(60 * options.minutes)
            verdict = await running.settled()
        finally:
            for relay in running.relays:
                options.logs.mkdir(exist_ok=True)
                (options.logs / f"{relay.directory.name}.log").write_text(relay.log_text())
        soaking.say(verdict, dict(running.load.codes()))
        lies = running.answered_while_away()
        for what in (*sorted(verdict.missing), *verdict.unexplained, *verdict.at_once, *lies):
            print(what)
        return not (verdict.missing or verdict.unexplained or verdict.at_once or lies)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.nodes.soak")
    parser.add_argument("store", choices=sorted(STORES))
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--logs", type=Path, default=Path("soak"), help="where the nodes' logs are put")
    options = parser.parse_args()
    prepare(options.store)
    with (
        Network(3) as network,
        network.inside(),
        STORES[options.store]() as store,
        tempfile.TemporaryDirectory() as name,
    ):
        return 0 if asyncio.run(soak(network, store, options, Path(name))) else 1


if __name__ == "__main__":
    sys.exit(main())
