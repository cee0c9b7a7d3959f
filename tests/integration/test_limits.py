"""Limits in a running relay: lines that share hosts, rates as the receiver sees them, sizes, and reloads."""

import asyncio
import re
import smtplib
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.dns import FakeDns
from tests.support.limits import QuietTable
from tests.support.postgres import shared_postgres
from tests.support.redis_server import shared_server
from tests.support.relay import LOOPBACK, Running, relay_with, settings
from tests.support.sink import Sink
from tests.support.sink_conversation import Received
from tests.unit.test_rates import fullest
from zonerelay.cli.operate.queue import delivery_table
from zonerelay.cli.terminal import output
from zonerelay.config import settings as options
from zonerelay.config.settings import Backend, DestinationSettings, Settings, SpoolSettings, ZoneSettings
from zonerelay.config.units import parse_rate
from zonerelay.limits.authority import LimitTable
from zonerelay.limits.unix_socket import LimitServer
from zonerelay.model.clock import SystemClock
from zonerelay.operations.answers import DeliveryRow, Explanation
from zonerelay.operations.requests import QueueExplain, QueueList
from zonerelay.process.setup import Identity

MESSAGE = b"From: app@example.org\r\nSubject: x\r\n\r\nhello\r\n"
LARGE = MESSAGE + b"x" * 70 + b"\r\n" + b"y" * 2000 + b"\r\n"


class Timed(Sink):
    """Remembers when MAIL came; `delay` seconds are spent on each message."""

    def __init__(self, *, delay: float = 0.0) -> None:
        super().__init__(script=self._note, keep_bodies=False)
        self.delay = delay
        self.mails: list[float] = []

    def _note(self, verb: str, argument: str) -> None:
        if verb == "MAIL":
            self.mails.append(time.monotonic())

    async def accept(self, message: Received) -> None:
        await asyncio.sleep(self.delay)
        await super().accept(message)


def to_mx(sink: Sink, **more: object) -> ZoneSettings:
    return ZoneSettings(port=sink.port, allow_private_addresses=True, ipv6=False, **more)  # type: ignore[arg-type]  # fields by name


def names(*domains: str) -> Mapping[str, Mapping[str, Sequence[str]]]:
    """All at one host."""
    hosts = {"mx.test": {"A": [LOOPBACK]}}
    return {**hosts, **{domain: {"MX": ["10 mx.test"]} for domain in domains}}


def chosen(
    directory: Path, dns: FakeDns, *zones: ZoneSettings, destination: Sequence[DestinationSettings] = ()
) -> Settings:
    return settings(directory, zone=zones, dns=dns.address, destination=tuple(destination))


async def send(running: Running, domain: str, count: int = 1, recipients: int = 1) -> None:
    for n in range(count):
        to = [f"u{n}.{one}@{domain}" for one in range(recipients)]
        await running.send("app@example.org", to, MESSAGE)


# Lines at one site


async def test_two_lines_at_one_host_share_its_connections(tmp_path: Path) -> None:
    domains = ("a.example", "b.example")
    other = DestinationSettings(domain=("b.example",), max_recipients_per_transaction=2)
    async with FakeDns(names(*domains)) as dns, Timed() as sink:
        zone = to_mx(sink, max_connections_per_destination=2)
        async with relay_with(chosen(tmp_path, dns, zone, destination=[other])) as running:
            await asyncio.gather(*(send(running, domain, 10, 3) for domain in domains))
            await running.until_empty()
        assert sink.open_peak == 2
        sizes = {domain: set[int]() for domain in domains}
        for message in sink.messages:
            sizes[message.recipients[0].partition("@")[2]].add(len(message.recipients))
        assert sizes == {"a.example": {3}, "b.example": {1, 2}}


async def test_fewer_connections_hold_from_a_reload_on(tmp_path: Path) -> None:
    async with Timed(delay=0.03) as sink:
        zone = ZoneSettings(next_hop=f"{LOOPBACK}:{sink.port}", max_connections_per_destination=4)
        first = settings(tmp_path, zone=zone)
        async with relay_with(first) as running:
            await send(running, "a.example", 60)
            await running.until(lambda: sink.open_peak == 4, what="all connections")
            one = replace(zone, max_connections_per_destination=1)
            await running.worker.reload(replace(first, zone=(one,)))
            await running.until(lambda: sink.open_now == 1, what="one connection")
            assert running.queued(), "it is told too late"
            sink.open_peak = 1
            await running.until_empty()
        assert sink.open_peak == 1


# Rates


async def test_a_rate_holds_as_the_receiver_sees_it(tmp_path: Path) -> None:
    rate = parse_rate("4/400ms")
    async with FakeDns(names("a.example", "b.example")) as dns, Timed() as sink:
        zone = to_mx(sink, max_rate_per_destination=rate)
        async with relay_with(chosen(tmp_path, dns, zone)) as running:
            await asyncio.gather(*(send(running, domain, 6) for domain in ("a.example", "b.example")))
            await running.until_empty()
    assert len(sink.mails) == 12
    assert fullest(sink.mails, rate.seconds) <= rate.count
    assert sink.mails[-1] - sink.mails[0] < 11 * 0.125 + 0.5


@pytest.mark.parametrize("of", ["zone", "destination"])
async def test_what_waits_for_a_rate_has_the_time_that_all_of_it_takes(tmp_path: Path, of: str) -> None:
    rate = parse_rate("1/1h")
    slow = [] if of == "zone" else [DestinationSettings(domain=("slow.example",), max_rate=rate)]
    async with FakeDns(names("slow.example")) as dns, Timed() as sink:
        zone = to_mx(sink, max_rate=rate) if of == "zone" else to_mx(sink)
        async with relay_with(chosen(tmp_path, dns, zone, destination=slow)) as running:
            await send(running, "slow.example", 5)
            await running.until_logged("delivered", 1)
            await running.until(lambda: running.queued() == 4, what="the others wait")
            (row,) = (await running.status()).destinations
            assert row.next_turn is not None
            assert (row.ready, row.turns_seconds) == (4, 4 * 3600.0)
            queued = await running.rows(QueueList(), DeliveryRow)
            assert {(each.state, each.waiting, each.turns_seconds) for each in queued} == {
                ("ready", 4, 4 * 3600.0)
            }
            console = output.console()
            with console.capture() as captured:
                console.print(delivery_table(queued[:1]))
            waits = "waits for a rate limit: in \\S+, the last of 4 in about 4h"
            assert re.search(rf"  ready  +default  .*  {waits}", captured.get())
            (told,) = await running.rows(QueueExplain(message_id=queued[0].message_id), Explanation)
            assert told.queued is not None
            assert told.queued.next_turn is not None


async def test_what_a_peer_has_taken_is_not_sent_again_after_a_stop_between_two_turns(tmp_path: Path) -> None:
    slow = DestinationSettings(domain=("slow.example",), max_rate=parse_rate("1/4s"))
    async with FakeDns(names("slow.example")) as dns, Timed() as sink:
        sink.manners = replace(sink.manners, max_recipients=1)
        soon = replace(chosen(tmp_path, dns, to_mx(sink), destination=[slow]), shutdown_timeout=0.2)
        async with relay_with(soon) as running:
            await send(running, "slow.example", 1, 2)
            await running.until(lambda: len(sink.messages) == 1, what="one has been taken")
        async with relay_with(replace(soon, destination=())) as running:
            assert running.queued() == 1
            assert running.log.named("accepted") == []
        assert len(sink.messages) == 1


async def test_a_reload_neither_resets_a_rate_nor_delays_a_new_one(tmp_path: Path) -> None:
    def rated(rate: str) -> DestinationSettings:
        return DestinationSettings(domain=("a.example",), max_rate=parse_rate(rate))

    async with FakeDns(names("a.example")) as dns, Timed() as sink:
        zone = to_mx(sink)
        first = chosen(tmp_path, dns, zone, destination=[rated("1/1d")])
        async with relay_with(first) as running:
            await send(running, "a.example", 3)
            await running.until_logged("delivered")
            other_zone = replace(zone, connection_idle_timeout=7.0)
            await running.worker.reload(replace(first, zone=(other_zone,)))
            await asyncio.sleep(0.2)
            assert len(sink.mails) == 1
            await running.worker.reload(replace(first, destination=(rated("100/1s"),)))
            await running.until_empty()


# Sizes and times


async def test_too_large_mail_of_a_zone_is_returned_without_a_connection(tmp_path: Path) -> None:
    async with FakeDns(names("small.example", "large.example")) as dns, Timed() as sink:
        zones = (to_mx(sink), to_mx(sink, name="small", max_message_size=1024))
        base = chosen(tmp_path, dns, *zones)
        route = options.RouteSettings(zone="small", recipient_domain=("small.example",))
        async with relay_with(replace(base, route=(route,))) as running:
            await running.send("a@large.example", ["b@small.example", "c@large.example"], LARGE)
            await running.until_empty()
            (bounced,) = running.log.named("bounced")
            assert "552 5.3.4" in str(bounced["reply"])
            assert "zone small accepts at most 1 KB" in str(bounced["reply"])
        sent = {message.mail_from: message.recipients for message in sink.messages}
        assert sent == {"a@large.example": ("c@large.example",), "": ("a@large.example",)}


async def test_mail_that_no_zone_of_its_recipients_sends_is_refused_at_the_door(tmp_path: Path) -> None:
    async with FakeDns(names("small.example")) as dns, Timed() as sink:
        zone = to_mx(sink, max_message_size=1024)
        async with relay_with(chosen(tmp_path, dns, zone)) as running:
            with pytest.raises(smtplib.SMTPDataError) as refused:
                await running.send("a@x.example", ["b@small.example"], LARGE)
            assert refused.value.smtp_code == 552
            assert "5.3.4" in str(refused.value.smtp_error)
            assert running.queued() == 0
            await running.send("a@x.example", ["b@small.example"], MESSAGE)
            bigger = replace(running.worker.settings, zone=(replace(zone, max_message_size=4096),))
            await running.worker.reload(bigger)
            await running.send("a@x.example", ["b@small.example"], LARGE)
            await running.until_empty()
        assert len(sink.messages) == 2


@pytest.mark.parametrize("chunked", [False, True])
async def test_the_door_and_the_zone_count_the_same_octets(tmp_path: Path, *, chunked: bool) -> None:
    """What is accepted must not be returned for the fields that we have put in front."""
    async with FakeDns(names("small.example")) as dns, Timed() as sink:
        zone = to_mx(sink, max_message_size=2048)
        async with relay_with(chosen(tmp_path, dns, zone)) as running:
            accepted = 0
            for size in range(1500, 2060, 40):
                text = MESSAGE + b"x" * (size - len(MESSAGE) - 2) + b"\r\n"
                accepted += await asyncio.to_thread(_was_taken, running, text, chunked=chunked)
            assert 0 < accepted < 14
            await running.until_empty()
            assert running.log.named("bounced") == []
        assert len(sink.messages) == accepted


def _was_taken(running: Running, text: bytes, *, chunked: bool) -> bool:
    """All commands are written at once."""
    end = b"BDAT %d LAST\r\n%b" % (len(text), text) if chunked else b"DATA\r\n"
    with smtplib.SMTP(*running.address, timeout=20) as client:
        client.ehlo("a.example")
        client.send(b"MAIL FROM:<a@x.example>\r\nRCPT TO:<b@small.example>\r\n" + end)
        assert [client.getreply()[0], client.getreply()[0]] == [250, 250]
        if not chunked:
            assert client.getreply()[0] == 354
            client.send(text + b".\r\n")
        code, said = client.getreply()
        assert (code, said[:5]) in [(250, b"2.0.0"), (552, b"5.3.4")]
        assert client.noop()[0] == 250
        return code == 250


# More destinations than connections


class Gated(Timed):
    """Accepts nothing before it may."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        super().__init__()

    async def accept(self, message: Received) -> None:
        await self.gate.wait()
        await super().accept(message)


async def test_with_more_hosts_than_connections_a_connection_carries_several_messages(tmp_path: Path) -> None:
    """It was one connection for each message: 2,980 for 2,980 deliveries to 49 hosts."""
    hosts = {f"d{n}.example": {"A": [LOOPBACK]} for n in range(12)}
    async with Gated() as sink, FakeDns(hosts) as dns:
        zone = to_mx(sink, max_connections=4, max_connections_per_destination=4)
        async with relay_with(chosen(tmp_path, dns, zone)) as running:
            for n in range(20):
                await running.send(f"app{n}@example.org", [f"u{n}@{host}" for host in hosts], MESSAGE)
            sink.gate.set()
            await running.until_empty(30.0)
        assert len(sink.messages) == 240
        assert sink.open_peak <= 4
        assert sink.connections <= 120


# ---- two workers, one set of limits -----------------------------------------------------------------


LIMIT = 4


@pytest.fixture
async def receiver() -> AsyncIterator[Timed]:
    async with Timed(delay=0.05) as sink:
        yield sink


def zone(receiver: Timed, **other: object) -> ZoneSettings:
    base = ZoneSettings(
        next_hop=f"{receiver.host}:{receiver.port}",
        max_connections=LIMIT + 2,
        max_connections_per_destination=LIMIT,
    )
    return replace(base, **other)  # type: ignore[arg-type]  # fields by name


def private(directory: Path, chosen: ZoneSettings) -> Settings:
    directory.mkdir(parents=True)
    return settings(
        directory, zone=chosen, spool=SpoolSettings(backend=Backend.MEMORY, path=directory, min_free_space=0)
    )


@asynccontextmanager
async def workers_of_a_supervisor(
    tmp_path: Path, socket: Path, chosen: ZoneSettings, count: int = 2
) -> AsyncIterator[list[Running]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                relay_with(private(tmp_path / str(number), chosen), identity=Identity(limits=socket))
            )
            for number in range(count)
        ]


async def submit_to(workers: Sequence[Running], each: int) -> None:
    async def one(worker: Running) -> None:
        for number in range(each):
            await worker.send("app@example.org", [f"u{number}@example.com"], MESSAGE)

    await asyncio.gather(*(one(worker) for worker in workers))


@asynccontextmanager
async def serving(path: Path, *, quiet: float = 0.0) -> AsyncIterator[LimitServer]:
    server = LimitServer(path, QuietTable(SystemClock(), quiet))
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def test_workers_of_one_machine_share_connections(tmp_path: Path, receiver: Timed) -> None:
    socket = tmp_path / "limits.sock"
    async with serving(socket), workers_of_a_supervisor(tmp_path, socket, zone(receiver)) as workers:
        await submit_to(workers[:1], 5)
        await workers[0].until_empty()
        await submit_to(workers, 30)
        for worker in workers:
            await worker.until_empty(timeout=20)
        assert len(receiver.messages) == 65
        assert receiver.open_peak == LIMIT


async def test_a_supervisor_that_restarts_stops_and_exceeds_nothing(tmp_path: Path, receiver: Timed) -> None:
    socket = tmp_path / "limits.sock"
    receiver.delay = 0.1
    async with AsyncExitStack() as stack:
        server = LimitServer(socket, LimitTable(SystemClock()))
        await server.start()
        workers = await stack.enter_async_context(workers_of_a_supervisor(tmp_path, socket, zone(receiver)))
        await submit_to(workers, 40)
        await server.close()
        before = len(receiver.messages)
        await workers[0].until(lambda: len(receiver.messages) >= before + 6, what="mail goes on")
        await stack.enter_async_context(serving(socket, quiet=1.0))
        for worker in workers:
            await worker.until_empty(timeout=20)
            assert worker.log.named("limits-restored")
        assert len(receiver.messages) == 80
        assert receiver.open_peak == LIMIT


async def test_what_a_dead_worker_had_the_other_has_at_once(tmp_path: Path, receiver: Timed) -> None:
    socket = tmp_path / "limits.sock"
    one = zone(receiver, max_connections_per_destination=1)
    async with serving(socket), workers_of_a_supervisor(tmp_path, socket, one, 1) as (alive,):
        async with workers_of_a_supervisor(tmp_path / "other", socket, one, 1) as (dying,):
            await submit_to([dying], 2)
            await dying.until_empty()
        await submit_to([alive], 2)
        await alive.until_empty()
        assert receiver.open_peak == 1


def shared_spool(backend: Backend, directory: Path, chosen: ZoneSettings) -> list[Settings]:
    name = uuid.uuid4().hex[:16]
    found = []
    for node in range(2):
        identity = directory / str(node)
        identity.mkdir()
        base = settings(
            identity, zone=chosen, spool=SpoolSettings(backend=backend, path=identity, min_free_space=0)
        )
        if backend is Backend.REDIS:
            base = replace(base, redis=options.RedisSettings(url=shared_server().url, prefix=f"{name}:"))
        else:
            server = shared_postgres()
            postgres = options.PostgresSettings(url=server.url, schema=f"limits_{name}", node=node)
            base = replace(base, postgres=postgres)
        found.append(base)
    return found


@pytest.mark.parametrize("backend", [Backend.REDIS, Backend.POSTGRES])
async def test_machines_on_one_spool_share_limits(tmp_path: Path, receiver: Timed, backend: Backend) -> None:
    rate = parse_rate("50/1s")
    chosen = zone(receiver, max_rate=rate)
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(relay_with(each))
            for each in shared_spool(backend, tmp_path, chosen)
        ]
        await submit_to(workers, 30)
        await workers[0].until(lambda: len(receiver.messages) >= 60, what="all mail", timeout=20)
        assert len(receiver.messages) == 60
        assert receiver.open_peak <= LIMIT
        assert fullest(receiver.mails, rate.seconds) <= rate.count


async def test_a_sender_of_very_many_takes_turns_where_new_mail_waits_long(tmp_path: Path) -> None:
    """The receiver takes 50 recipients in a fifth of a second."""
    many = [f"u{n}@example.com" for n in range(90)]
    async with Timed(delay=0.2) as sink:
        zone = ZoneSettings(next_hop=f"{LOOPBACK}:{sink.port}", max_connections_per_destination=1)
        async with relay_with(settings(tmp_path, zone=zone)) as running:

            def deferred() -> int:
                return sum(counts.deferred for counts in running.worker.store.counts().values())

            async with asyncio.timeout(20):
                while not deferred():
                    await asyncio.sleep(0.1)
                    await running.send("news@example.org", many, MESSAGE)
            for _ in range(12):
                await running.send("news@example.org", many, MESSAGE)
            await running.send("app@example.org", ["ann@example.com"], MESSAGE)
            await running.until(
                lambda: any("ann@example.com" in message.recipients for message in sink.messages),
                what="a single message",
                timeout=30.0,
            )
            assert deferred(), "it did not wait for all others"
