"""Connections to hosts: who gets the room, and who tries a host that was found dead."""

import asyncio
import random

import pytest

from tests.support.queueing import route_to
from zonerelay.config.settings import ZoneSettings
from zonerelay.delivery.connection import session_limits
from zonerelay.delivery.connection.pool import ConnectionPool
from zonerelay.delivery.connection.session import ClientProtocol, OutgoingSession, Slot
from zonerelay.delivery.connection.session_limits import FIRST_PAUSE, HostOrder
from zonerelay.delivery.peer import HostFailure, Terms
from zonerelay.model.clock import ManualClock
from zonerelay.model.reply import Reply
from zonerelay.routing.destinations.route import MxHost, Route
from zonerelay.smtp.client.extensions import Capabilities
from zonerelay.smtp.client.transaction import Peer

ZONE = ZoneSettings(max_connections=2, max_connections_per_destination=1)


def terms(host: str) -> Terms:
    return Terms(ZONE, route_to("default", host))


async def taken(pool: ConnectionPool, host: str) -> Slot:
    got = await pool.acquire(terms(host))
    assert isinstance(got, Slot)
    return got


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_newcomer_does_not_take_the_room_that_somebody_waits_for() -> None:
    """As the simulation showed: an attempt was overtaken for eight minutes."""
    pool = ConnectionPool(quit_timeout=1.0)
    first, _ = await taken(pool, "a"), await taken(pool, "b")
    waiting = asyncio.create_task(taken(pool, "c"))
    await turns()

    async def release_and_ask() -> Slot:
        first.release()
        return await taken(pool, "d")

    newcomer = asyncio.create_task(release_and_ask())
    await turns()
    assert waiting.done()
    assert not newcomer.done()
    waiting.result().release()
    await turns()
    assert newcomer.done()
    assert not pool._lines


async def test_who_waits_for_a_full_site_keeps_nobody_from_the_zones_room() -> None:
    pool = ConnectionPool(quit_timeout=1.0)
    first = await taken(pool, "a")
    waiting = asyncio.create_task(taken(pool, "a"))
    await turns()
    second = await taken(pool, "b")
    also = asyncio.create_task(taken(pool, "c"))
    await turns()
    second.release()
    await turns()
    assert also.done()
    assert not waiting.done()
    also.result().release()
    first.release()
    await turns()
    assert waiting.done()


async def test_who_gives_up_makes_way_for_the_next() -> None:
    pool = ConnectionPool(quit_timeout=1.0)
    first, _ = await taken(pool, "a"), await taken(pool, "b")
    waiting = [asyncio.create_task(taken(pool, host)) for host in "cd"]
    await turns()
    waiting[0].cancel()
    first.release()
    await turns()
    assert waiting[1].done()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not pool._lines


class Line(asyncio.Transport):
    """To a peer that hangs up as soon as it is told goodbye."""

    def __init__(self) -> None:
        super().__init__()
        self.protocol: ClientProtocol | None = None
        self.is_over = False

    def is_closing(self) -> bool:
        return self.is_over

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        assert isinstance(protocol, ClientProtocol)
        self.protocol = protocol

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: object) -> None:
        assert data == b"QUIT\r\n"

    def close(self) -> None:
        self.abort()

    def abort(self) -> None:
        assert self.protocol is not None
        if not self.is_over:
            self.is_over = True
            asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)


class SlowLine(Line):
    """To a peer that takes its time to hang up."""

    def close(self) -> None:
        self.is_over = True


async def opened(
    pool: ConnectionPool, host: str, zone: ZoneSettings, *, transactions: int = 1, line: type[Line] = Line
) -> OutgoingSession:
    wanted = Terms(zone, route_to(zone.name, host))
    slot = await pool.acquire(wanted)
    assert isinstance(slot, Slot)
    protocol = ClientProtocol(line(), asyncio.get_running_loop(), slot.release)
    made = OutgoingSession(protocol, Peer(host, "192.0.2.1"), Capabilities(), wanted, slot)
    made.transactions = transactions
    return made


async def test_what_was_used_once_makes_room_before_what_carries_regular_mail() -> None:
    zone = ZoneSettings(max_connections=3)
    pool = ConnectionPool(quit_timeout=1.0)
    used = {"regular": 2, "first": 1, "second": 1}
    sessions = {host: await opened(pool, host, zone, transactions=count) for host, count in used.items()}
    for each in sessions.values():
        pool.give_back(each)

    left = []
    for host in ("x", "y", "z"):
        await pool.acquire(Terms(zone, route_to(zone.name, host)))
        left.append([name for name, each in sessions.items() if each.protocol.usable])
    assert left == [["regular", "second"], ["regular"], []]
    await pool.close()


async def test_what_is_about_to_carry_more_makes_room_last() -> None:
    zone = ZoneSettings(max_connections=3)
    pool = ConnectionPool(quit_timeout=1.0)
    more = await opened(pool, "more", zone)
    often, once = await opened(pool, "often", zone, transactions=5), await opened(pool, "once", zone)
    pool.give_back(more, more=True)
    pool.give_back(often)
    pool.give_back(once)
    left = []
    for host in ("x", "y", "z"):
        await pool.acquire(Terms(zone, route_to(zone.name, host)))
        left.append([each.peer.host for each in (more, often, once) if each.protocol.usable])
    assert left == [["more", "often"], ["more"], []]
    await pool.close()


async def test_each_waiter_has_one_connection_closed_for_it_and_not_one_at_every_look() -> None:
    """As a real run showed: each look closed another one, and its mail had to open a new one."""
    zone = ZoneSettings(max_connections=3)
    pool = ConnectionPool(quit_timeout=1.0)
    sessions = [await opened(pool, host, zone, line=SlowLine) for host in ("a", "b", "c")]
    busy = sessions.pop()
    for each in sessions:
        pool.give_back(each)
    waiting = asyncio.create_task(pool.acquire(Terms(zone, route_to(zone.name, "x"))))
    await turns()
    for _ in range(3):
        pool.give_back(busy)
        await turns()
        assert pool.take(Terms(zone, route_to(zone.name, "c"))) is busy
    assert [each.protocol.usable for each in sessions] == [False, True]
    sessions[0].slot.release()
    assert isinstance(await waiting, Slot)
    assert not any(pool._closing.values())


# Hosts that were found dead: how long others are tried before them, and who tries them again


HOST = MxHost("mx.example.com", 25)
IP = "192.0.2.1"
ROUTE = Route("default", "example.com", (HOST,), 1e12)
DOWN = HostFailure(Reply(451, "4.1", "no answer"), down=True)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def health(clock: ManualClock) -> HostOrder:
    return HostOrder(clock, random.Random(1))


def test_a_host_that_failed_is_down_until_one_may_try_it(clock: ManualClock, health: HostOrder) -> None:
    assert not health.is_down(HOST, IP)
    health.failed(HOST, IP, DOWN)
    clock.advance(FIRST_PAUSE - 1)
    assert health.is_down(HOST, IP)
    clock.advance(1)
    assert [health.is_down(HOST, IP) for _ in range(3)] == [False, True, True]


def test_each_failed_probe_doubles_the_pause_up_to_the_longest(clock: ManualClock, health: HostOrder) -> None:
    pauses = []
    for _ in range(7):
        health.failed(HOST, IP, DOWN)
        pause = 0
        while health.is_down(HOST, IP):
            clock.advance(1)
            pause += 1
        pauses.append(pause)
    assert pauses == [30, 60, 120, 240, 480, 600, 600]
    assert session_limits.LONGEST_PAUSE == 600


def test_many_that_fail_together_are_one_failure(clock: ManualClock, health: HostOrder) -> None:
    for _ in range(10):
        health.failed(HOST, IP, DOWN)
    clock.advance(FIRST_PAUSE)
    assert not health.is_down(HOST, IP)


def test_a_host_that_talks_is_forgotten_with_all_its_failures(clock: ManualClock, health: HostOrder) -> None:
    health.failed(HOST, IP, DOWN)
    clock.advance(FIRST_PAUSE)
    assert not health.is_down(HOST, IP)
    health.failed(HOST, IP, DOWN)
    health.talked(HOST, IP)
    assert not health.is_down(HOST, IP)
    assert not health._down
    health.failed(HOST, IP, DOWN)
    clock.advance(FIRST_PAUSE)
    assert not health.is_down(HOST, IP)


def test_a_probe_that_never_reports_back_makes_way_for_another(clock: ManualClock, health: HostOrder) -> None:
    health.failed(HOST, IP, DOWN)
    clock.advance(FIRST_PAUSE)
    assert not health.is_down(HOST, IP)
    clock.advance(session_limits.PROBE_TIME)
    assert not health.is_down(HOST, IP)


def test_looking_makes_nobody_a_probe(clock: ManualClock, health: HostOrder) -> None:
    other = MxHost("mx2.example.com", 25)
    route = Route("default", "example.com", (HOST, other), 1e12)
    health.failed(HOST, IP, DOWN)
    assert {health.first_of(route) for _ in range(20)} == {"mx2.example.com:25"}
    assert health.first_of(ROUTE) == "mx.example.com:25"  # where all are down it is tried
    clock.advance(FIRST_PAUSE)
    assert {health.first_of(route) for _ in range(20)} == {"mx.example.com:25", "mx2.example.com:25"}
    assert not health.is_down(HOST, IP)


def test_memory_is_bounded(health: HostOrder) -> None:
    hosts = [MxHost("mx.example.com", port) for port in range(1, session_limits.MAX_REMEMBERED + 10)]
    for host in hosts:
        health.failed(host, IP, DOWN)
    assert not health.is_down(hosts[0], IP)
    assert health.is_down(hosts[-1], IP)
