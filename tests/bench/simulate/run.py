"""Runs a scenario: mail comes as virtual time goes, samples are taken, until everything has left.

Deterministic for a seed: the wall clock and the machine's memory are looked at for samples only.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random

from tests.bench.simulate.figures import Figures, Sample
from tests.bench.simulate.node import ZONE, Node
from tests.bench.simulate.scenarios import SENDERS, Death, Injection, Scenario
from tests.bench.simulate.timeline import VirtualClock, VirtualLoop
from tests.bench.simulate.world import TLD, World
from zonerelay.limits.authority import LimitTable
from zonerelay.model.envelope import Priority

TICK = 0.05
LOOK = 5.0
PAGE = 4096


@dataclass
class Result:
    scenario: Scenario
    seed: int
    figures: Figures
    world: World
    faults: list[str]
    seconds: float = 0.0
    wall: float = 0.0
    arrived_at: float = 0.0
    """When the stream had ended."""


@dataclass
class Simulation:
    """One run; `run` once, in a `VirtualLoop`."""

    scenario: Scenario
    seed: int
    clock: VirtualClock
    say: Callable[[str], None] = lambda text: None
    figures: Figures = field(init=False)

    def __post_init__(self) -> None:
        random = Random(self.seed)
        self.figures = Figures(self.clock, has_priorities=self.scenario.has_priorities)
        self.world = World(self.scenario.kinds, Random(random.getrandbits(64)))
        self._arrivals = Random(random.getrandbits(64))
        self._choices = Random(random.getrandbits(64))
        self._names = count()
        self._started = time.perf_counter()
        self._arrived_at = 0.0
        scenario = self.scenario
        table = LimitTable(self.clock) if scenario.nodes > 1 else None
        self.nodes = [
            Node(
                number,
                zone=scenario.zone,
                retry=scenario.retry,
                bounce=scenario.bounce,
                world=self.world,
                figures=self.figures,
                clock=self.clock,
                table=table,
            )
            for number in range(scenario.nodes)
        ]

    async def run(self) -> Result:
        for injection in self.scenario.stored:
            self._store(injection)
            await asyncio.sleep(1.0)
        for node in self.nodes:
            await node.start()
        sampler = asyncio.create_task(self._sample())
        deaths = [asyncio.create_task(self._die(death)) for death in self.scenario.deaths]
        await asyncio.gather(self._stream(), *map(self._inject, self.scenario.injections))
        self._arrived_at = self.clock.monotonic()
        while any(len(node.store) for node in self.nodes):
            await asyncio.sleep(LOOK)
        await asyncio.gather(*deaths)
        sampler.cancel()
        self._take_sample()
        queued = sum(len(node.store) for node in self.nodes)
        for node in self.nodes:
            await node.stop()
        return Result(
            self.scenario,
            self.seed,
            self.figures,
            self.world,
            self.figures.balance(queued),
            self.clock.monotonic(),
            time.perf_counter() - self._started,
            self._arrived_at,
        )

    async def _die(self, death: Death) -> None:
        node = self.nodes[death.node]
        await asyncio.sleep(death.at)
        await node.stop()
        await asyncio.sleep(death.seconds)
        await node.start_again()

    # Mail

    async def _stream(self) -> None:
        scenario, random = self.scenario, self._arrivals
        length = scenario.deliveries / scenario.rate
        begun = self.clock.monotonic()
        owed, left = 0.0, scenario.deliveries
        while left > 0:
            part = (self.clock.monotonic() - begun) / length
            rate = scenario.rate * (1 + scenario.swing * math.sin(2 * math.pi * part))
            owed += rate * TICK * 2 * random.random()
            while owed >= 1 and left > 0:
                recipients = min(left, _recipients(random))
                owed -= recipients
                left -= recipients
                self._accept([self.world.pick() for _ in range(recipients)], self._priority())
            await asyncio.sleep(TICK)

    async def _inject(self, injection: Injection) -> None:
        await asyncio.sleep(injection.at)
        kind = self.world.kinds[injection.kind]
        left = injection.recipients
        pause = injection.seconds / max(1, injection.recipients // injection.each)
        due = self.clock.now() + injection.deferred_to - injection.at if injection.deferred_to else 0.0
        while left > 0:
            some = min(left, injection.each)
            left -= some
            domains = [self.world.domain_in(kind) for _ in range(some)]
            self._accept(domains, injection.priority, due=due)
            if pause:
                await asyncio.sleep(pause)

    def _store(self, injection: Injection) -> None:
        """All of it at once."""
        kind = self.world.kinds[injection.kind]
        for first in range(0, injection.recipients, injection.each):
            some = min(injection.each, injection.recipients - first)
            self._accept([self.world.domain_in(kind) for _ in range(some)], injection.priority)

    def _priority(self) -> Priority:
        shares = self.scenario.shares
        return self._choices.choices(list(shares), list(shares.values()))[0] if shares else Priority.NORMAL

    def _accept(self, domains: list[str], priority: Priority, *, due: float = 0.0) -> None:
        number = next(self._names)
        sender = f"s{number % 97}@d{number % 500}.{SENDERS}{TLD}"
        addresses = [f"u{number}.{index}@{domain}" for index, domain in enumerate(domains)]
        self.figures.accepted += len(domains)
        self._node(number).accept(sender, addresses, due=due, priority=priority)

    def _node(self, number: int) -> Node:
        """Which one a client turns to: those that are dead do not answer."""
        if self.scenario.busy:
            return self._choices.choices(self.nodes, self.scenario.busy)[0]
        nodes = [node for node in self.nodes if node.alive] if self.scenario.deaths else self.nodes
        return nodes[number % len(nodes)]

    # Samples

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(self.scenario.every)
            self._take_sample()

    def _take_sample(self) -> None:
        active = startable = 0
        for node in self.nodes:
            plan, tick = node.scheduler.zone(ZONE).plan, self.clock.monotonic()
            startable += sum(
                1
                for _, each in node.scheduler.destinations()
                if each.waiting and not (each.active or each.suspended_until or each.turn_in(tick))
            )
            active += plan.round_robin.active
        idle = self.scenario.zone.max_connections - active
        sample = Sample(
            at=self.clock.monotonic(),
            queued=sum(len(node.store) for node in self.nodes),
            active=active,
            startable=max(0, min(idle, startable)),
            rss=_rss(),
            wall=time.perf_counter() - self._started,
        )
        self.figures.samples.append(sample)
        self.say(
            f"{sample.at / 3600:6.2f} h  finished {self.figures.finished:>9,}  queued {sample.queued:>8,}"
            f"  active {sample.active:>4}  {sample.rss:5.0f} MB  {sample.wall:6.0f} s"
        )


def simulate(scenario: Scenario, *, seed: int = 1, say: Callable[[str], None] = lambda text: None) -> Result:
    """Run it from beginning to end."""
    loop = VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(Simulation(scenario, seed, VirtualClock(loop), say).run())


def _recipients(random: Random) -> int:
    """Of one message: mostly one, sometimes a few, seldom many."""
    draw = random.random()
    if draw < 0.88:
        return 1
    return random.randint(2, 5) if draw < 0.98 else random.randint(10, 50)


def _rss() -> float:
    """MB of this process."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 1e6
    except OSError:
        return 0.0
