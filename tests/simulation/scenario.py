"""What happens in one run: everything is drawn from the seed.

First come messages, operators and faults, for some minutes; then all faults end and the relay has time to
empty its queue; then it stops, and the ledger judges. `Plan` is what was drawn, so that a failing seed can be
run again with fewer messages and fewer faults.
"""

import asyncio
import contextlib
import gc
import itertools
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partialmethod
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from tests.bench.simulate.timeline import START, VirtualClock
from tests.bench.simulate.world import Kind, World
from tests.simulation.bucket import LEASE, ObjectStore
from tests.simulation.clients import Clients, Submission
from tests.simulation.disk import Disk, failure
from tests.simulation.ledger import CLOCK, KILL, NO_BUCKET, NO_SUPERVISOR, POWER_CUT, STANDSTILL, Ledger
from tests.simulation.loop import Process, ProcessDiedError, SimLoop
from tests.simulation.network import Factory, Fault, Network
from tests.simulation.operators import Dice, Operators
from tests.simulation.parts import NARROW_WINDOW, Node, narrow, simulated
from tests.simulation.receivers import Quirks, Receiver, Receivers
from tests.support.limits import QuietTable
from zonerelay.config import settings as config
from zonerelay.config.units import Rate
from zonerelay.limits import worker as limits_worker
from zonerelay.limits.unix_socket import LimitServer
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.process.setup import Identity, StartError
from zonerelay.queue.zone.plan import WINDOW
from zonerelay.routing.dns.answers import DnsStatus, MxRecord, ParsedAnswer
from zonerelay.store.contract import StoreError

BUSY = 120.0
"""Seconds in which mail, faults and operators come."""
DRAINED_WITHIN = 1800.0
LONGEST_WAIT = 200.0
"""Seconds: the last step of the schedule, its jitter, and a suspension of the destination."""
RETRY = config.RetrySettings(
    schedule=(5.0, 30.0, 120.0), jitter=0.1, max_age=900.0, suspend_min=5.0, suspend_max=60.0
)

STEPS = [f"{step}_timeout" for step in ("greeting", "ehlo", "mail", "rcpt", "data", "block")]
RATES = (Rate(4, 5.0), Rate(4, 5.0), Rate(1, 4.0))
REPEATED = 60
"""Attempts of a client that has an idempotency key and no answer."""
MOST = 300_000
"""Bytes of a message that the relay takes."""

_RUNS = itertools.count(1)
KINDS = (
    Kind(name="fast", share=3, domains=3, seconds=(0.01, 0.05)),
    Kind(name="hosted", share=2, domains=6, sites=1, seconds=(0.05, 0.2)),
    Kind(name="greylisting", share=2, domains=2, greylist=20.0),
    Kind(name="few", share=1, domains=1, most_connections=2, seconds=(0.2, 1.0)),
    Kind(name="rated", share=1, domains=1, most_rate=30.0),
    Kind(name="refusing", share=1, domains=1, refused=0.5),
    Kind(name="busy", share=1, domains=1, busy=0.4),
    Kind(name="dead", share=0.5, domains=1, dead=True, connecting=3.0),
    Kind(name="silent", share=0.5, domains=1, silent=True),
    Kind(name="away", share=1, domains=1, down=((10.0, 70.0),)),
    Kind(name="lost", share=0.5, domains=1, no_dns=True, look_up=4.0),
    Kind(name="slow", share=1, domains=1, seconds=(1.0, 6.0)),
)

SENDERS = Kind(name="senders", share=0, domains=1, seconds=(0.01, 0.05))
CROWDED = Kind(name="crowded", share=0, domains=1, seconds=(8.0, 10.0))
TURN_WITHIN = 35.0
"""Seconds: the end of another worker's transaction there, and a transaction."""


@dataclass(frozen=True)
class Event:
    """Something that happens at a time; `what` names a method of `Run`."""

    at: float
    what: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Plan:
    seed: int
    store: str
    """`leveldb`, of one worker or of two with a supervisor, or `s3`, shared by two nodes."""
    workers: int
    narrow: bool
    """Windows and caches hold a handful."""
    rate: Rate | None
    """What a destination gets at most."""
    focus: str
    """What the run is about: `rates` that workers share, `orders` of operators, `leases` on a bucket, or
    anything.
    """
    quirks: tuple[tuple[str, Quirks], ...]
    messages: tuple[Event, ...]
    faults: tuple[Event, ...]


def draw(seed: int) -> Plan:
    random = Random(seed)
    focus = random.choice(("", "", "", "", "", "rates", "orders", "leases"))
    kinds = tuple(kind.name for kind in KINDS if random.random() < 0.45) or ("fast",)
    store = "s3" if random.random() < 0.2 or focus == "leases" else "leveldb"
    if focus == "rates":
        store, kinds = "leveldb", ("hosted", *kinds[:1])
    workers = 2 if store == "s3" or focus == "rates" or random.random() < 0.35 else 1
    count = random.choice((20, 40) if focus else (3, 8, 8, 20, 40))
    messages = tuple(
        Event(_moment(random), "mail", (number, random.getrandbits(32))) for number in range(count)
    )
    faults = [_fault(random, store, workers, "") for _ in range(random.choice((0, 1, 2, 4, 8)))]
    if focus:
        faults += [_fault(random, store, workers, focus) for _ in range(random.choice((1, 2, 4)))]
    return Plan(
        seed=seed,
        store=store,
        workers=workers,
        narrow=random.random() < 0.4,
        rate=random.choice(RATES) if random.random() < 0.3 or focus == "rates" else None,
        focus=focus,
        quirks=tuple((name, _quirks(random, often_over=focus == "rates")) for name in kinds),
        messages=tuple(sorted(messages, key=lambda each: each.at)),
        faults=tuple(sorted(faults, key=lambda each: each.at)),
    )


def _moment(random: Random) -> float:
    """Mail comes in bursts."""
    return random.choice((1.0, 20.0, random.uniform(0, BUSY))) + random.random()


def _quirks(random: Random, *, often_over: bool = False) -> Quirks:
    """`often_over`: sessions take few messages, so batches need further transactions."""
    if often_over and random.random() < 0.7:
        return Quirks(per_session=random.choice((1, 2)), refuse_at=random.choice((b"MAIL", b"DATA")))
    if random.random() < 0.5:
        return Quirks(drop_chunk=random.random() < 0.5)
    return Quirks(
        lose_reply=random.choice((0.0, 0.1, 0.3)),
        late_reply=random.choice((0.0, 0.0, 0.1)),
        per_session=random.choice((0, 0, 1, 3)),
        refuse_at=random.choice((b"MAIL", b"DATA")),
        drop_chunk=random.random() < 0.5,
    )


ANYWHERE = (
    "kill", "kill", "still", "cut", "cut", "half_open", "no_names", "step", "suspend", "suspend", "restart",
    "slow_network", "client_cut", "hold", "retry",
)  # fmt: skip
ON_DISK = ("power", "power", "power", "full", "failed_write", "slow_disk", "unreadable", "drop", "bounce")
# Not bounce or drop in a bucket: a node does not know yet that another node is sending the mail.
IN_BUCKET = ("lost_answers", "lost_answers", "no_bucket", "still", "still_at_write", "asleep")
OFTEN = {
    "rates": ("supervisor", "supervisor", "hesitating", "kill", "restart", "cut"),
    "orders": ("suspend", "suspend", "suspend", "hold", "retry", "step", "kill", "restart"),
    "leases": ("still", "still_at_write", "still_at_write", "asleep", "lost_answers", "no_bucket", "kill"),
}


def _fault(random: Random, store: str, workers: int, focus: str) -> Event:
    node = random.randrange(workers)
    at = random.uniform(0.0, BUSY) if random.random() < 0.5 else 1.0 + random.random() * 2
    kinds = ANYWHERE + (ON_DISK if store == "leveldb" else IN_BUCKET)
    if store == "leveldb" and workers > 1:
        kinds = (*kinds, "supervisor", "hesitating")
    what = random.choice(OFTEN.get(focus, kinds))
    return Event(at, what, (node, random.choice((0.3, 3.0, 20.0, 60.0)), random.getrandbits(32)))


class Run:
    """One run of a plan."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        self.plan = plan
        drawing = Random(plan.seed ^ 0x5EED)
        drawn = (Random(drawing.getrandbits(64)) for _ in range(6 + plan.workers))
        loop, network, receivers, clients, self.random, objects, *disks = drawn
        self._directory = directory
        self.loop, self.objects = SimLoop(loop), ObjectStore(objects)
        self.zone = config.ZoneSettings(
            allow_private_addresses=True,
            tls=config.TlsMode.NONE,
            max_connections=6,
            max_connections_per_destination=1 if plan.narrow else 3,
            max_rate_per_destination=plan.rate,
        )
        window = NARROW_WINDOW + 1 if plan.narrow else WINDOW + WINDOW // 4
        shared = self.objects if plan.store == "s3" else None
        self.ledger = Ledger(self.loop, self.zone, plan.workers, window, shared)
        self.failures, self.sometimes = self.loop.failures, self.ledger.sometimes
        self.network = self.loop.network = Network(self.loop, network, self._answer, self.ledger)
        self.receivers = Receivers(self.loop, receivers, self.sometimes, self.ledger.sent_at_once)
        self.clients = Clients(self.loop, self.network, clients, self.sometimes)
        self._kinds = [kind for kind in KINDS if kind.name in dict(plan.quirks)]
        self.world = World((*self._kinds, SENDERS, CROWDED), self.random)
        for name, quirks in plan.quirks:
            for number in range(self.world.kinds[name].domains):
                self.receivers.quirks[self.world.site_name(f"d{number}.{name}.test")] = quirks
        self._cuts: list[Fault] = []
        self._client_cuts: list[Fault] = []
        self._no_names_until = 0.0
        self._losing: list[Callable[[], bool]] = []
        """The faults of the bucket at this moment."""
        self._quiet = False
        self._limits: LimitServer | None = None
        self._replacing = asyncio.Lock()
        self.nodes = [self._node(index, disk) for index, disk in enumerate(map(Disk, disks))]
        self.operators = Operators(self)

    def _node(self, index: int, disk: Disk) -> Node:
        is_shared = self.plan.store == "s3"
        home = self._directory / f"machine{index}" if is_shared else self._directory
        backend = config.Backend.S3 if is_shared else config.Backend.LEVELDB
        settings = config.Settings(
            hostname="relay.test",
            workers=1 if is_shared else self.plan.workers,
            shutdown_timeout=5.0,
            spool=config.SpoolSettings(backend=backend, path=home / "home" / "spool", min_free_space=0),
            s3=config.S3Settings(bucket="mail", lease=LEASE, timeout=2.0),
            listener=(config.ListenerSettings(address="127.0.0.1:0", max_message_size=MOST),),
            admin=config.AdminSettings(address="", socket=home / "control.sock"),
            history=config.HistorySettings(enabled=False),
            zone=(self.zone,),
            retry=RETRY,
            bounce=config.BounceSettings(),
            delivery=config.DeliverySettings(**dict.fromkeys(STEPS, 30.0), final_dot_timeout=60.0),  # type: ignore[arg-type]
            sendmail=config.SendmailSettings(drop=home / "drop"),
        )
        several = self.plan.workers > 1 and not is_shared
        identity = Identity(index, supervised=True, limits=home / "limits.sock") if several else Identity()
        return Node(f"w{index}", settings, self.loop, disk, self.ledger.record, identity)

    # --- the world

    def answers(self, name: str, kind: str) -> tuple[float, ParsedAnswer[Any]]:
        if not name.endswith(".test"):
            return 0.01, ParsedAnswer(DnsStatus.NXDOMAIN, (), 60.0)
        if self.loop.now < self._no_names_until:
            self.sometimes["no name server"] += 1
            return 10.0, ParsedAnswer(DnsStatus.TIMEOUT, (), 0.0)
        if self.world.kind_of(name).no_dns:
            return 4.0, ParsedAnswer(DnsStatus.SERVFAIL, (), 0.0)
        if kind == "MX" and not name.startswith("mx."):
            return 0.02, ParsedAnswer(DnsStatus.OK, (MxRecord(10, self.world.site_name(name)),), 60.0)
        if kind == "A" and name.startswith("mx."):
            return 0.01, ParsedAnswer(DnsStatus.OK, (self._address(name),), 60.0)
        return 0.01, ParsedAnswer(DnsStatus.NODATA, (), 60.0)

    def _address(self, site: str) -> str:
        self.world.site(site)
        return f"192.0.2.{list(self.world.sites).index(site) + 1}"

    def _answer(self, host: str, port: int) -> tuple[float, Factory | OSError, Fault | None]:
        site = list(self.world.sites.values())[int(host.rsplit(".", 1)[1]) - 1]
        self.ledger.asked[host] = self.loop.now
        if site.is_down(self.loop.now):
            return site.kind.connecting, ConnectionRefusedError(111, "Connection refused"), None
        fault = self._cuts.pop() if self._cuts and not self._quiet else None
        return site.kind.connecting, lambda: Receiver(self.receivers, site), fault

    # --- the run

    async def run(self) -> None:
        if self.plan.workers > 1 and self.plan.store == "leveldb":
            await self._start_supervisor()
        for node in self.nodes:
            await node.start()
        events = asyncio.gather(*map(self._happen, (*self.plan.messages, *self.plan.faults)))
        looking = asyncio.create_task(self._look())
        await events
        if not looking.cancel():
            looking.result()  # the check itself has failed
        self._quiet = True
        limits_worker.TICK = 1.0
        self.network.slowest = 0.02
        for node in self.nodes:
            node.disk.error, node.disk.delay = (lambda what: None), (lambda: 0.002)
        self.objects.lost = lambda: False
        self.world.kinds = {name: _well(kind) for name, kind in self.world.kinds.items()}
        for name, site in self.world.sites.items():
            site.kind = self.world.kind_of(name)
        for name, quirks in self.receivers.quirks.items():
            self.receivers.quirks[name] = replace(quirks, lose_reply=0.0, late_reply=0.0)
        await self._revive()
        if self.operators.over and self.plan.store == "leveldb":  # in a bucket another node may have it now
            await asyncio.sleep(45.0)
            self.failures += [
                f"{each.recipient} is held by the suspension {each.act}, which has ended"
                for each in await self._stored()
                if each.held and each.act in self.operators.over
            ]
        await self.operators.release_everything()
        if self._limits is not None and self.plan.narrow and self.plan.rate is None:
            await self._contend()
        await self._drain()
        for node in self.nodes:
            self.failures += [
                f"a task remains after the stop of {node.name}: {task}" for task in await node.stop()
            ]
        if self._limits is not None:
            await self._limits.close()
        self._judge()

    async def _contend(self) -> None:
        """One worker uses the only connection to a destination. The other one gets its turn all the same."""
        await asyncio.sleep(60.0)  # connections that hang, and hold a part of the zone, time out
        for number in range(900, 908):
            await self.clients.submit(self.nodes[0], self._submission(number, ("u0@d0.crowded.test",)))
        await asyncio.sleep(20.0)  # the host has answered
        last = self._submission(990, ("u1@d0.crowded.test",))
        await self.clients.submit(self.nodes[1], last)
        await asyncio.sleep(TURN_WITHIN)
        if last.answered and not any(mail.sender == last.sender for mail in self.receivers.mails):
            self.failures.append(f"w1 got no connection to d0.crowded.test from {last.answered:.3f} on")

    async def _start_supervisor(self, *, quiet: float = 0.0) -> None:
        table = QuietTable(VirtualClock(self.loop), quiet)
        self._limits = LimitServer(self._directory / "limits.sock", table)
        await self._limits.start()

    async def _happen(self, event: Event) -> None:
        await asyncio.sleep(event.at)
        number, *more, seed = event.arguments
        name = f"do_{event.what}"
        do = getattr(self.operators if hasattr(self.operators, name) else self, name)
        await do(self.nodes[number] if more else number, *more, Dice(seed))

    async def _drain(self) -> None:
        ends, looks = self.loop.now + DRAINED_WITHIN, itertools.count(1)
        while any(self._queued_keys()) or self._refusals():
            if self.loop.now > ends:
                left = [key.decode() for key in self._queued_keys()][:5]
                self.failures.append(
                    f"{DRAINED_WITHIN} s after the last fault these are queued: {left}, and new mail is"
                    f" refused by {self._refusals()}"
                )
                break
            await asyncio.sleep(5.0)
            await self._revive()
            if next(looks) % 6 == 0:
                stored = await self._stored()
                # The due time of mail that is being attempted is written anew with its outcome (seed 1239).
                schedulers = [node.worker.scheduler for node in self.nodes if node.is_up]
                active = {key for scheduler in schedulers for key in scheduler.active_keys()}
                self.ledger.look_at(
                    [each for each in stored if self._is_due(each)],
                    lambda domain: self._address(self.world.site_name(domain)),
                )
                # A time that an operator chose may be far away since the clock was set.
                ends += 30.0 * any(each.act and not self._is_due(each) for each in stored)
                self.failures += [
                    f"{each.recipient} waits for {wait:.0f} s, which is longer than any pause"
                    for each in stored
                    if not (each.held or each.act or each.key in active)
                    and (wait := self._wait(each)) > LONGEST_WAIT
                ]

    def _refusals(self) -> dict[str, str]:
        """Why nodes take no mail."""
        reasons = {node.name: node.worker.store.unhealthy() for node in self.nodes if node.is_up}
        return {name: reason.name for name, reason in reasons.items() if reason is not None}

    async def _revive(self) -> None:
        for node in self.nodes:
            if node.process is None:
                await self._start(node)

    def _is_due(self, delivery: Delivery) -> bool:
        """By the clock of every node."""
        return all(delivery.is_due(START + self.loop.now + node.wall) for node in self.nodes)

    def _wait(self, delivery: Delivery) -> float:
        """Seconds until it is due, by the clock of the node for which that is soonest."""
        ahead = max(node.wall for node in self.nodes)
        return delivery.next_attempt - (START + self.loop.now + ahead)

    async def _stored(self) -> list[Delivery]:
        """Every delivery that is in a store."""
        found: dict[DeliveryKey, Delivery] = {}

        async def scan(node: Node) -> None:
            async for each in node.worker.store.scan():
                found[each.key] = each

        for node in self.nodes:
            if node.is_up and node.process is not None:
                with contextlib.suppress(StoreError):
                    await node.process.finish(scan(node))
        return list(found.values())

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(4.0)
            for node in self.nodes:
                self.ledger.look_into(node)

    def _queued_keys(self) -> list[bytes]:
        if self.plan.store == "s3":
            return [key for key in self.objects.rows() if key.startswith(b"delivery-zone ")]
        return [key for node in self.nodes for key in node.disk.live if key.startswith(b"delivery-zone ")]

    def _judge(self) -> None:
        self.failures += self.ledger.faults(self.clients, self.receivers)
        if self.plan.store == "s3":
            ends = [key for key in self.objects.objects if key.endswith("/end")]
            self.sometimes.update("a snapshot replaced a log" for _ in ends)
        for each in self.clients.submissions:
            ended = self.ledger.finals.get((each.identity, each.recipients[0]), ())
            if any(process.partition(".")[0] != each.node for _, process, _ in ended):
                self.sometimes["take-over"] += 1
        suspended: set[str] = set()
        for _, _, event, fields in self.ledger.log:
            if event in ("suspended", "resumed"):
                (suspended.add if event == "suspended" else suspended.discard)(str(fields["destination"]))
            if event == "expired" and str(fields["destination"]) in suspended:
                self.sometimes["expired while suspended"] += 1
            if event == "operated" and fields["count"]:
                self.sometimes[f"operator: {fields['verb']}"] += 1
            if event == "store-unhealthy" and "lease" in str(fields["reason"]):
                self.sometimes["fence refused"] += 1
        # Not `delivery-domain`: those are hints, and stray ones are nothing.
        kinds = (b"message ", b"delivery-zone ", b"deferred-")
        left = [key for node in self.nodes for key in node.disk.live if key.startswith(kinds)]
        if left and not self.failures:
            self.failures.append(f"left in the spool: {left[:5]}")

    # --- what happens

    async def do_mail(self, number: int, random: Random) -> None:
        count = random.choice((1, 1, 1, 2, 5))
        recipients = tuple({f"u{random.randrange(50)}@{self._domain(random)}": None for _ in range(count)})
        size = random.choice((20, 500, 500, 500, 500, 2_000, 2_000, 2_000, 70_000, 140_000))
        text = b"".join(
            b"%b%d line of message %d\r\n" % (random.choice((b"", b".", b"From ")), line, number)
            for line in range(min(size // 25, 100))
        )
        text += b"%b\r\n" % (b"x" * 900) * ((size - len(text)) // 902)
        keyed = self.plan.store == "leveldb" and random.random() < 0.4
        submission = self._submission(number, recipients, text, keyed=keyed)
        for _ in range(REPEATED if keyed else 1):
            node = self.nodes[random.randrange(len(self.nodes))]
            fault = self._client_cuts.pop() if self._client_cuts else None
            await self.clients.submit(node, submission, fault=fault)
            if submission.answered is not None or submission.refused:
                break
            await asyncio.sleep(5.0)

    def _submission(
        self, number: int, recipients: tuple[str, ...], text: bytes = b"", *, keyed: bool = False
    ) -> Submission:
        tag = f"t{number}"
        body = b"X-Begin: 1\r\nX-Tag: %b\r\nSubject: message %d\r\n\r\n%b" % (tag.encode(), number, text)
        made = Submission(tag, f"s{number}@senders.test", recipients, body, keyed=keyed)
        self.clients.submissions.append(made)
        return made

    def _domain(self, random: Random) -> str:
        kind = random.choices(self._kinds, [kind.share for kind in self._kinds])[0]
        return f"d{random.randrange(kind.domains)}.{kind.name}.test"

    def some_submission(self, random: Random) -> Submission:
        """An operator does something about mail that is there."""
        some = self.clients.submissions[-8:] if len(self.ledger.finals) < 40 else []
        nobody = Submission("t999", "s999@senders.test", (f"u1@{self._domain(random)}",), b"")
        return random.choice(some or [nobody])

    async def _start(self, node: Node) -> None:
        for _ in range(20):
            try:
                await node.start()
            except ProcessDiedError:
                return
            except StartError as error:
                self.ledger.inject(f"start of {node.name} refused: {error}")
                if node.process is not None:
                    node.kill(power=False)
                await asyncio.sleep(3.0)
            else:
                return

    async def _kill(self, what: str, node: Node, seconds: float, dice: Dice) -> None:
        if node.process is None:
            return
        self._note_instant()
        self.ledger.inject(what, node.process.name)
        node.kill(power=what == POWER_CUT)
        await asyncio.sleep(min(seconds, 60.0))
        if node.process is None:
            await self._start(node)

    do_kill = partialmethod(_kill, KILL)
    do_power = partialmethod(_kill, POWER_CUT)

    def _note_instant(self) -> None:
        """Which interesting moment a crash has met."""
        if any(each.dot_sent and not each.node for each in self.clients.submissions):
            self.sometimes["crash between the dot and the reply"] += 1
        if any(mail.replied and self.loop.now - mail.at < 0.3 for mail in self.receivers.mails[-20:]):
            self.sometimes["crash just after a receiver's 250"] += 1

    @contextlib.contextmanager
    def _lasting(self, what: str, process: str = "") -> Iterator[None]:
        noted = self.ledger.inject(what, process, lasts=True)
        yield
        noted.ended = self.loop.now

    async def do_restart(self, node: Node, seconds: float, dice: Dice) -> None:
        if not node.is_up or node.process is None:
            return
        name, unreachable = node.process.name, bool(self._losing)
        # A transaction that the stop cuts off is made again, and its receiver may have the message.
        with self._lasting("restart", name), contextlib.suppress(ProcessDiedError):
            await node.stop()
            if not (unreachable or self._losing) and name in self.objects.living.values():
                self.failures.append(f"{name} has stopped, and left its lease in force")
            await self._start(node)

    async def do_still(self, node: Node, seconds: float, dice: Dice) -> None:
        process = node.process
        for _ in range(200 if self.plan.focus == "leases" else 0):
            if process is not None and self.receivers.is_sending(process):
                break
            await asyncio.sleep(0.1)
        if process is not None and process.alive:
            await self._stand_still(process, seconds)

    async def _stand_still(self, process: Process, seconds: float) -> None:
        with self._lasting(STANDSTILL, process.name):
            process.still = True
            await asyncio.sleep(seconds)
            process.wake_up()

    async def do_asleep(self, node: Node, seconds: float, dice: Dice) -> None:
        """A suspended machine: its monotonic clock stands still, too."""
        if (process := node.process) is not None:
            await self.do_still(node, seconds, dice)
            process.asleep += seconds
            self.sometimes["machine suspended"] += 1

    async def do_still_at_write(self, node: Node, seconds: float, dice: Dice) -> None:
        """The process stands still as it is about to write a message into the bucket."""
        stopped: asyncio.Future[Process] = self.loop.create_future()

        def at_write(process: Process | None) -> None:
            if process is not None and process is node.process and not stopped.done():
                process.still = True
                stopped.set_result(process)
                self.sometimes["stood still at a write"] += 1

        self.objects.at_write = at_write
        with contextlib.suppress(TimeoutError):
            process = await asyncio.wait_for(stopped, BUSY)
            await self._stand_still(process, max(seconds, LEASE / 2))

    async def do_hesitating(self, node: Node, seconds: float, dice: Dice) -> None:
        """A worker stands still for a moment while the supervisor starts again."""
        pause = dice.choice((0.0, 1.0))
        still = self.do_still(node, dice.uniform(0.3, 1.4), dice)
        await asyncio.gather(self.do_supervisor(node, pause, dice), still)

    async def _disk(self, what: str, fails: str, share: float, most: float, text: bytes, *given: Any) -> None:
        """A share of the writes or reads fails, for `most` seconds at most."""
        node, seconds, dice = given

        def error(asked: str) -> Exception | None:
            return failure(text) if asked == fails and dice.random() < share else None

        with self._lasting(what):
            node.disk.error = error
            await asyncio.sleep(min(seconds, most))
        node.disk.error = lambda asked: None

    do_full = partialmethod(_disk, "disk full", "write", 1.0, BUSY, b"No space left on device")
    do_failed_write = partialmethod(_disk, "failing writes", "write", 0.3, 30.0, b"Input/output error")
    do_unreadable = partialmethod(_disk, "failing reads", "read", 0.3, 30.0, b"Input/output error")

    async def _bucket(self, what: str, share: float, most: float, *given: Any) -> None:
        """The answers to a share of the requests are lost."""
        _, seconds, dice = given

        def lost() -> bool:
            return bool(dice.random() < share)

        with self._lasting(what):
            self._losing.append(lost)
            self.objects.lost = lambda: any(each() for each in self._losing)
            await asyncio.sleep(min(seconds, most))
            self._losing.remove(lost)

    do_lost_answers = partialmethod(_bucket, "lost answers of the bucket", 0.2, 20.0)
    do_no_bucket = partialmethod(_bucket, NO_BUCKET, 1.0, BUSY)

    async def do_slow_disk(self, node: Node, seconds: float, dice: Dice) -> None:
        node.disk.delay = lambda: dice.uniform(0.01, 0.5)
        await asyncio.sleep(seconds)
        node.disk.delay = lambda: 0.002

    async def do_slow_network(self, node: Node, seconds: float, dice: Dice) -> None:
        self.network.slowest = 1.0
        await asyncio.sleep(seconds)
        self.network.slowest = 0.02

    async def do_cut(self, node: Node, seconds: float, dice: Dice) -> None:
        after = dice.choice((dice.randrange(300), dice.randrange(5_000)))
        self._cuts.append(Fault(after, dice.random() < 0.4))

    async def do_half_open(self, node: Node, seconds: float, dice: Dice) -> None:
        self._cuts.append(Fault(dice.randrange(600), dice.random() < 0.4, silent=True))

    async def do_client_cut(self, node: Node, seconds: float, dice: Dice) -> None:
        self._client_cuts.append(Fault(dice.randrange(3_000), dice.random() < 0.4, dice.random() < 0.3))

    async def do_no_names(self, node: Node, seconds: float, dice: Dice) -> None:
        self._no_names_until = max(self._no_names_until, self.loop.now + seconds)

    async def do_step(self, node: Node, seconds: float, dice: Dice) -> None:
        step = dice.choice((-3600.0, -100.0, 100.0, 1800.0))
        # Machines that share a bucket keep their clocks within a second of each other.
        for each in self.nodes if self.plan.store == "s3" else [node]:
            each.wall += step
            if each.process is not None:
                each.process.wall += step
        self.ledger.inject(f"{CLOCK} by {step}", "" if node.process is None else node.process.name)

    async def do_supervisor(self, node: Node, seconds: float, dice: Dice) -> None:
        if self._limits is None or self._replacing.locked():
            return
        async with self._replacing:
            # A supervisor whose workers live on, as those of several machines do with their server.
            noted = self.ledger.inject(NO_SUPERVISOR, "supervisor", lasts=True)
            await self._limits.close()
            await asyncio.sleep(min(seconds, 10.0))
            await self._start_supervisor(quiet=2.0)
            noted.ended = self.loop.now + 2.0


def _well(kind: Kind) -> Kind:
    """The hosts without what ends with the faults."""
    return replace(kind, dead=False, silent=False, no_dns=False, down=(), busy=0.0)


def run(plan: Plan) -> Run:
    """Run a plan from its beginning to the judgement. The same plan takes the same course."""
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    small = narrow() if plan.narrow else contextlib.nullcontext()
    logging.disable(logging.CRITICAL)
    # Coroutines of killed processes end badly, as they should; nobody needs to read of it.
    quiet = patch.object(sys, "unraisablehook", lambda unraisable: None)
    ignored = warnings.catch_warnings(action="ignore")
    with tempfile.TemporaryDirectory(dir=base) as directory, quiet, ignored, small:
        simulation = Run(plan, Path(directory))
        with simulated(simulation.loop, simulation.answers, simulation.objects):
            gc.disable()  # or the collector's moments would depend on the runs before
            try:
                simulation.loop.run_until_complete(simulation.run())
            except Exception as error:
                simulation.failures.append(f"{type(error).__name__}: {error}")
            simulation.loop.bury()
            gc.enable()
            number = next(_RUNS)
            if number % 16 == 1:
                gc.collect()
            if number == 1:
                gc.freeze()  # what was imported
    return simulation
