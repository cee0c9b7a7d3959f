"""Three relays on one store, each in a namespace of its own, a receiver, DNS, clients; and what can happen.

with Network(3) as network, network.inside(), STORES["redis"]() as store:
    async with fleet(network, store, directory) as running:
        running.load.start()
        await running.kill(0)
        …
        verdict = await running.settled()
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.dns import FakeDns
from tests.support.nodes.judge import Fault, Verdict, judge
from tests.support.nodes.load import Answer, Injector
from tests.support.nodes.network import MAIL_HOST, NETWORK, Network, Node
from tests.support.nodes.sink import LedgerSink
from tests.support.nodes.stores import SharedStore
from tests.support.nodes.tomorrow import write_program
from tests.support.process import PROGRAM, RelayFailed, RelayProcess
from tests.support.toml import Table
from tests.support.waiting import until

DOMAINS = ("example.com", "limited.test")
PROGRAM_NAME = "program"
READY = 20.0
DRAINED = 30.0
ON_THE_WAY = 0.3
"""Seconds in which an answer that was sent before is still read, on a busy machine."""

Tables = Mapping[str, Table | Sequence[Table]]


@dataclass(frozen=True, slots=True)
class Absence:
    """These nodes could not reach the store: they may have acknowledged nothing."""

    nodes: frozenset[str]
    began: float
    ended: float


class Fleet:
    """Every method that is a fault writes it down."""

    def __init__(
        self, nodes: Sequence[Node], relays: Sequence[RelayProcess], store: SharedStore, sink: LedgerSink
    ) -> None:
        self.nodes = nodes
        self.relays = relays
        self.store = store
        self.sink = sink
        doors = [(relay.host, relay.smtp_port) for relay in relays]
        self.load = Injector(doors, rate=store.rate, per_connection=max(2, round(store.rate / 15)))
        self.faults: list[Fault] = []
        self.absences: list[Absence] = []
        self._loop = asyncio.get_running_loop()

    def _fault(self, name: str, *numbers: int, known: float = 0.0) -> Fault:
        """`known`: seconds until they know."""
        now = self._loop.time()
        hosts = frozenset(self.nodes[number].host for number in numbers)
        fault = Fault(name, hosts, now, now + known)
        self.faults.append(fault)
        return fault

    async def kill(self, number: int) -> None:
        """As a power cut would."""
        fault = self._fault("kill", number)
        await asyncio.to_thread(self.relays[number].kill)
        fault.known = self._loop.time()

    async def start(self, number: int) -> None:
        """Again and again, as systemd does: without its store a relay does not start."""
        async with asyncio.timeout(READY):
            while True:
                try:
                    await asyncio.to_thread(self.relays[number].start)
                except RelayFailed:
                    await asyncio.sleep(0.5)
                else:
                    return

    async def upgrade(self, number: int) -> None:
        """In good order: it is another version from here on."""
        relay = self.relays[number]
        await asyncio.to_thread(relay.terminate)
        program = relay.directory / PROGRAM_NAME
        program.unlink()
        write_program(program)
        await self.start(number)

    async def stop_and_go(self, number: int, seconds: float) -> None:
        """It stands still with all its connections, as a machine does that is being moved."""
        fault = self._fault("stop", number)
        self.relays[number].signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        self.relays[number].signal(signal.SIGCONT)
        fault.known = self._loop.time() + 0.1

    async def cut(self, number: int, seconds: float, *, out: bool = True, back: bool = True) -> None:
        """From the store. What it sends before it notices is repeated by others when the lease is over."""
        kind = "cut" if out and back else "cut out" if out else "cut back"
        fault = self._fault(kind, number, known=self.store.notices)
        self.nodes[number].cut(out=out, back=back)
        began = self._loop.time() + ON_THE_WAY
        await asyncio.sleep(seconds)
        self.absences.append(Absence(fault.nodes, began, self._loop.time()))
        self.nodes[number].heal()

    async def crash_store(self, seconds: float) -> None:
        everybody = range(len(self.nodes))
        fault = self._fault("store", *everybody, known=self.store.notices)
        await asyncio.to_thread(self.store.kill)
        began = self._loop.time() + ON_THE_WAY
        await asyncio.sleep(seconds)
        self.absences.append(Absence(fault.nodes, began, self._loop.time()))
        await asyncio.to_thread(self.store.start)
        fault.known = max(fault.known, self._loop.time())

    def answered_while_away(self) -> list[Answer]:
        """Acknowledgements that nothing can have stood behind."""
        return [
            answer
            for answer in self.load.acknowledged.values()
            for away in self.absences
            if answer.node in away.nodes and away.began < answer.at < away.ended
        ]

    async def taking_mail(self) -> None:
        """Until every node has acknowledged a new message, by itself."""
        now = self._loop.time()
        await until(
            lambda: self.load.first_since(now).keys() == {node.host for node in self.nodes},
            seconds=READY,
            every=0.1,
        )

    def _all_came(self) -> bool:
        """Where the store may be left with something that nobody was promised."""
        return self.store.late_writes and self.load.acknowledged.keys() <= self.sink.by_token().keys()

    async def settled(self) -> Verdict:
        """No more load, and nothing queued any more."""
        await self.load.stop()
        async with asyncio.timeout(DRAINED):
            while await asyncio.to_thread(self.store.queued) and not self._all_came():
                await asyncio.sleep(0.1)
        await asyncio.sleep(2 * self.sink.delay)
        acknowledged, arrivals = self.load.acknowledged.keys(), self.sink.by_token()
        return judge(acknowledged, arrivals, self.faults, slack=self.sink.longest_wait)


def _table(content: Table | Sequence[Table]) -> Table:
    assert isinstance(content, Mapping)
    return content


def relay_on(
    node: Node, store: SharedStore, directory: Path, *, dns: str, port: int, tables: Tables
) -> RelayProcess:
    own = store.tables(node.number)
    home = directory / f"node{node.number}"
    home.mkdir()
    program = home / PROGRAM_NAME
    program.symlink_to(PROGRAM)
    return RelayProcess(
        home,
        program=program,
        host=node.host,
        launcher=node.launcher,
        top={"hostname": f"node{node.number}.test", "shutdown_timeout": "3s"},
        spool=own["spool"],
        listener={"allow_networks": [NETWORK]},
        zone={"port": port, "allow_private_addresses": True, **_table(tables.get("zone", {}))},
        tables={
            "dns": {"servers": [dns]},
            "retry": {"schedule": ["1s"], "suspend_min": "1s"},
            **{name: table for name, table in own.items() if name != "spool"},
            **{name: table for name, table in tables.items() if name != "zone"},
        },
    )


@asynccontextmanager
async def fleet(
    network: Network, store: SharedStore, directory: Path, tables: Tables | None = None
) -> AsyncIterator[Fleet]:
    """`tables` go into every node's configuration; `zone` into its one zone."""
    sink = LedgerSink()
    await sink.start()
    names = {domain: {"MX": [f"10 mx.{domain}"]} for domain in DOMAINS}
    names |= {f"mx.{domain}": {"A": [MAIL_HOST]} for domain in DOMAINS}
    async with FakeDns(names, host=MAIL_HOST) as dns:
        relays = [
            relay_on(node, store, directory, dns=dns.address, port=sink.port, tables=tables or {})
            for node in network.nodes
        ]
        running = Fleet(network.nodes, relays, store, sink)
        try:
            await asyncio.gather(*(asyncio.to_thread(relay.start) for relay in relays))
            yield running
        finally:
            with contextlib.suppress(Exception):
                await running.load.stop()
            for relay in relays:
                await asyncio.to_thread(relay.kill)
            await sink.close()
