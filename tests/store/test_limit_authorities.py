"""Every authority over shared limits does the same: in memory, over a socket, over Redis and PostgreSQL."""

import asyncio
import itertools
import random
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.support.limits import MemoryAuthority
from tests.support.postgres import shared_postgres
from tests.support.redis_server import shared_server
from tests.support.waiting import until
from zonerelay.config.settings import RedisSettings
from zonerelay.limits import authority as limit_authority
from zonerelay.limits import unix_socket
from zonerelay.limits.authority import AuthorityError, LimitAuthority, LimitRequest, LimitTable, SlotClaim
from zonerelay.limits.shared import SharedAuthority, VersionedRecord
from zonerelay.limits.unix_socket import LimitServer, SocketAuthority
from zonerelay.model.clock import SystemClock
from zonerelay.store.postgres.driver import DatabaseAccess
from zonerelay.store.postgres.engine import PostgresRecordStore
from zonerelay.store.redis.connection import RedisEndpoint
from zonerelay.store.redis.engine import RedisRecordStore

KINDS = ("memory", "socket", "redis", "postgres")
SHARED = ("redis", "postgres")
ZONE, LIMITS = 7, {"a": 5, "b": 3}


class Heard:
    """What an authority has said without being asked."""

    def __init__(self) -> None:
        self.news: list[str] = []
        self.back = self.gone = 0

    async def start(self, authority: LimitAuthority) -> None:
        await authority.start(self.news.append, self._back, self._gone)

    def _back(self) -> None:
        self.back += 1

    def _gone(self, reason: str) -> None:
        self.gone += 1


Start = Callable[[str], Awaitable[tuple[LimitAuthority, Heard]]]


@asynccontextmanager
async def place(kind: str, directory: Path, *, lease: float = 15.0) -> AsyncIterator[Start]:
    """Somewhere new for limits, and who starts an authority of an owner there."""
    name = uuid.uuid4().hex[:16]
    table, path = LimitTable(SystemClock()), directory / "limits.sock"

    def make(owner: str) -> LimitAuthority:
        match kind:
            case "memory":
                return MemoryAuthority(table, owner)
            case "socket":
                return SocketAuthority(path, owner)
            case "redis":
                settings = RedisSettings(url=shared_server().url, prefix=f"{name}:")
                return SharedAuthority(RedisRecordStore(RedisEndpoint(settings)), owner, lease=lease)
        access = DatabaseAccess(shared_postgres().url, str, f"limits_{name}", "limits", 60.0)
        return SharedAuthority(PostgresRecordStore(access), owner, lease=lease)

    async with AsyncExitStack() as stack:
        server = LimitServer(path, table)
        await server.start()
        stack.push_async_callback(server.close)

        async def start(owner: str) -> tuple[LimitAuthority, Heard]:
            authority, heard = make(owner), Heard()
            await heard.start(authority)
            stack.push_async_callback(authority.close)
            return authority, heard

        yield start


async def ask(authority: LimitAuthority, request: LimitRequest) -> limit_authority.LimitAnswer:
    """As soon as it can be asked."""
    for _ in range(500):
        try:
            return await authority.exchange("some zone", request)
        except AuthorityError:
            await asyncio.sleep(0.01)
    raise AssertionError("out of reach")


class Worker:
    """Takes and gives back at random; `slots` is what it may use."""

    def __init__(self, authority: LimitAuthority, seed: int) -> None:
        self._authority = authority
        self._random = random.Random(seed)
        self.slots: Counter[str] = Counter()

    async def step(self) -> None:
        site = self._random.choice("ab")
        back = self._random.randint(0, self.slots[site])
        self.slots[site] -= back
        want = self.slots[site] + self._random.randint(0, 3)
        claim = SlotClaim(site, "", LIMITS[site], self.slots[site], back, want)
        for held in (await ask(self._authority, LimitRequest(ZONE, (claim,)))).held:
            self.slots[held.site] = held.slots


@pytest.mark.parametrize("kind", KINDS)
async def test_holders_at_the_same_time_never_exceed_a_limit(kind: str, tmp_path: Path) -> None:
    async with place(kind, tmp_path) as start:
        authorities = [(await start(f"holder{number}"))[0] for number in range(3)]
        workers = [Worker(authority, number) for number, authority in enumerate(authorities)]
        most: Counter[str] = Counter()

        async def work(worker: Worker) -> None:
            for _ in range(60):
                await worker.step()
                for site, limit in LIMITS.items():
                    used = sum(each.slots[site] for each in workers)
                    assert used <= limit
                    most[site] = max(most[site], used)
                assert sum(each.slots.total() for each in workers) <= ZONE

        await asyncio.gather(*(work(worker) for worker in workers))
        # How near they come depends on who is faster; that something was given proves that it was tried.
        assert all(most[site] >= 2 for site in LIMITS)
        # Nothing leaks: when all others are gone one can have everything.
        for authority in authorities[1:]:
            await authority.close()
        await asyncio.sleep(0.05)
        claims = (SlotClaim("a", "", 5, want=5), SlotClaim("b", "", 3, want=3))
        answer = await ask(authorities[0], LimitRequest(ZONE, claims, everything=True))
        assert sum(held.slots for held in answer.held) == ZONE


@pytest.mark.parametrize("kind", KINDS)
async def test_who_must_give_way_hears_of_it_and_who_waits_of_its_grant(kind: str, tmp_path: Path) -> None:
    async with place(kind, tmp_path) as start:
        (has, told), (waits, told_waiting) = await start("has"), await start("waits")
        await ask(has, LimitRequest(ZONE, (SlotClaim("b", "", 3, want=3),)))
        await ask(waits, LimitRequest(ZONE, (SlotClaim("b", "", 3, want=1),)))
        await until(lambda: told.news == ["some zone"])
        (held,) = (await ask(has, LimitRequest(ZONE))).held
        assert (held.slots, held.revoked) == (3, 1)
        await ask(has, LimitRequest(ZONE, (SlotClaim("b", "", 3, 2, 1, 2),)))
        await until(lambda: told_waiting.news == ["some zone"])
        assert (await ask(waits, LimitRequest(ZONE))).held[0].slots == 1


@pytest.mark.parametrize("kind", KINDS)
async def test_turns_of_all_holders_are_on_one_grid(kind: str, tmp_path: Path) -> None:
    async with place(kind, tmp_path) as start:
        owners = [(await start(f"holder{number}"))[0] for number in range(3)]
        question = LimitRequest(ZONE, turns=(limit_authority.TurnRequest("a", "", 0.02, 0.03, 4),))
        answers = await asyncio.gather(*(ask(owner, question) for owner in owners for _ in range(4)))
        turns = sorted(at for answer in answers for at in answer.turns[0])
        assert len(turns) == 48
        assert all(later - earlier >= 0.03 - 1e-5 for earlier, later in itertools.pairwise(turns))
        assert turns[-1] - turns[0] <= 47 * 0.03 + 0.5


@pytest.mark.parametrize("kind", SHARED)
async def test_a_relay_that_is_silent_for_a_lease_has_nothing_any_longer(kind: str, tmp_path: Path) -> None:
    async with place(kind, tmp_path, lease=0.5) as start:
        (dead, _), (alive, _) = await start("dead"), await start("alive")
        await ask(dead, LimitRequest(ZONE, (SlotClaim("b", "", 3, want=3),)))
        claim = LimitRequest(ZONE, (SlotClaim("b", "", 3, want=3),))
        assert (await ask(alive, claim)).held[0].slots == 0
        for _ in range(6):
            await asyncio.sleep(0.1)
            answer = await ask(alive, claim)
        assert answer.held[0].slots == 3


@pytest.mark.parametrize("kind", SHARED)
async def test_a_lost_connection_is_told_of_and_made_again(kind: str, tmp_path: Path) -> None:
    async with place(kind, tmp_path) as start:
        authority, told = await start("one")
        await ask(authority, LimitRequest(ZONE, (SlotClaim("b", "", 3, want=2),)))
        await asyncio.sleep(0.02)
        told.back = 0
        if kind == "redis":
            shared_server().ask("CLIENT", "KILL", "TYPE", "pubsub")
        else:
            shared_postgres().psql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'limits'"
            )
        await until(lambda: bool(told.gone and told.back))
        answer = await ask(authority, LimitRequest(ZONE, (SlotClaim("b", "", 3, 2, 0, 2),), everything=True))
        assert answer.held[0].slots == 2


async def test_without_the_supervisor_an_exchange_fails_at_once(tmp_path: Path) -> None:
    path = tmp_path / "limits.sock"
    server = LimitServer(path, LimitTable(SystemClock()))
    await server.start()
    authority, told = SocketAuthority(path, "one"), Heard()
    await told.start(authority)
    await ask(authority, LimitRequest(ZONE))
    await server.close()
    await until(lambda: told.gone > 0)
    with pytest.raises(AuthorityError):
        await asyncio.wait_for(authority.exchange("some zone", LimitRequest(ZONE)), 0.1)
    await authority.close()


async def test_a_frame_that_is_no_text_ends_the_connection_and_not_the_authority(tmp_path: Path) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes((0, 0, 0, 2, 0xA1, 0xFF)))
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(babble, tmp_path / "limits.sock")
    authority, told = SocketAuthority(tmp_path / "limits.sock", "one"), Heard()
    await told.start(authority)
    await until(lambda: told.back > 1)
    await authority.close()
    server.close()


async def test_a_supervisor_that_stands_still_costs_no_more_memory_than_one_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unix_socket, "TIMEOUT", 0.0005)
    monkeypatch.setattr(unix_socket, "MAX_UNREAD", 100_000)
    path, answers = tmp_path / "limits.sock", asyncio.Event()

    async def stand_still(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answers.wait()
        writer.close()

    server = await asyncio.start_unix_server(stand_still, path)
    authority, told = SocketAuthority(path, "one"), Heard()
    await told.start(authority)
    await until(lambda: told.back > 0)
    big = LimitRequest(ZONE, (SlotClaim("s" * 50_000, "", 1),))
    for _ in range(100):
        with pytest.raises(AuthorityError):
            await authority.exchange("some zone", big)
    assert authority._writer is not None
    assert authority._writer.transport.get_write_buffer_size() < 200_000
    assert len(authority._waiting) < 50
    await authority.close()
    answers.set()
    server.close()


class UselessStore:
    """A server that takes connections and ends them."""

    name = "a server in trouble"

    def __init__(self) -> None:
        self.opened = 0

    @asynccontextmanager
    async def listening(self, on_notice: Callable[[str], None]) -> AsyncIterator[asyncio.Event]:
        self.opened += 1
        ended = asyncio.Event()
        ended.set()
        yield ended

    async def read(self, zone: str) -> VersionedRecord:
        raise AuthorityError("in trouble")

    async def replace(
        self, zone: str, record: VersionedRecord, data: bytes | None, *, ttl: float, notices: Sequence[str]
    ) -> bool:
        raise AuthorityError("in trouble")

    async def close(self) -> None:
        """Nothing is open."""


async def test_connections_that_are_of_no_use_are_made_with_growing_pauses() -> None:
    store, told = UselessStore(), Heard()
    authority = SharedAuthority(store, "holder")
    await told.start(authority)
    await asyncio.sleep(1.0)
    assert 2 <= store.opened <= 5
    assert told.gone <= store.opened
    await authority.close()
