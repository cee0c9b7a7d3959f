"""A check of a shared store finds what is wrong with it, changes nothing, and is not misled by writers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.builders import NOW, store_message
from tests.store.spools import Spool
from tests.store.test_spool_check import mixed
from tests.support.redis_server import shared_server
from tests.support.s3_server import BUCKET, SECRET, shared_moto
from zonerelay.config.settings import Backend, PostgresSettings, RedisSettings, S3Settings, Settings
from zonerelay.model.queue_name import queue_of
from zonerelay.store.check import Contents, Examination, Fault, Findings
from zonerelay.store.contract import CHUNK_SIZE, Finish, Postpone
from zonerelay.store.offline import check_spool

SHARED = [Backend.REDIS, Backend.POSTGRES, Backend.S3]


def settings_of(spool: Spool) -> Settings:
    return Settings(
        spool=spool.settings,
        redis=spool.redis or RedisSettings(),
        postgres=spool.postgres or PostgresSettings(),
        s3=spool.s3 or S3Settings(),
    )


async def checked(spool: Spool, tmp_path: Path) -> tuple[Contents, Findings]:
    findings = Findings()
    examination = Examination(tmp_path / "scratch", findings, lambda done, total: None, {"SECRET": SECRET})
    contents = await check_spool(settings_of(spool), 0, examination)
    assert not (tmp_path / "scratch").exists()
    return contents, findings


def told(findings: Findings) -> dict[str, int]:
    return {fault.value: count for fault, count in findings.counts.items()}


@pytest.mark.parametrize("backend", SHARED)
async def test_a_sound_store_is_clean_beside_a_relay_and_behind_it(tmp_path: Path, backend: Backend) -> None:
    async with Spool(tmp_path / "spool", backend=backend) as spool:
        assert await checked(spool, tmp_path) == (Contents(0, 0, 0), Findings())
        await mixed(spool.store)
        await spool.store.claim(queue_of("default"), 2, now=NOW)
        contents, findings = await checked(spool, tmp_path)
        assert findings == Findings()
        assert (contents.messages, contents.deliveries) == (4, 10)
        assert contents.octets > (
            0 if backend is Backend.REDIS else 2 * CHUNK_SIZE if backend is Backend.POSTGRES else 500
        )
    assert (await checked(spool, tmp_path))[1] == Findings()


@pytest.mark.parametrize("backend", SHARED)
async def test_relays_that_work_make_no_finding(tmp_path: Path, backend: Backend) -> None:
    async with Spool(tmp_path / "spool", backend=backend) as spool:
        done = False

        async def work(worker: int) -> int:
            """Stores small and large mail, and sends, defers and removes it."""
            number = worker * 1_000_000 + 1
            while not done:
                big = 5 * CHUNK_SIZE if number % 5 == 0 else 10
                await store_message(spool.store, number, "a@one.example", "b@two.example", body=b"x" * big)
                number += 1
                for delivery in await spool.store.claim(
                    queue_of("default"), 3, now=NOW, skip_domains={"two.example"}
                ):
                    later = delivery.attempts == 0 and number % 2
                    change = (
                        Postpone(replace(delivery, next_attempt=NOW + 60, attempts=1))
                        if later
                        else Finish(delivery)
                    )
                    await spool.store.settle([change])
                for delivery in await spool.store.claim_domain(
                    queue_of("default"), "two.example", 2, now=NOW
                ):
                    await spool.store.settle([Finish(delivery)])
            return number - worker * 1_000_000

        workers = [asyncio.create_task(work(each)) for each in range(4)]
        for _ in range(5):
            contents, findings = await checked(spool, tmp_path)
            assert told(findings) == {}, findings.kept
            await asyncio.sleep(0.3)
        done = True
        assert min(await asyncio.gather(*workers)) > 3
        assert contents.deliveries
    assert told((await checked(spool, tmp_path))[1]) == {}


# --- redis

ONE, TWO, FOUR = f"{1:016x}", f"{2:016x}", f"{4:016x}"
Change = Callable[[Callable[..., bytes]], object]


REDIS_CASES: dict[str, tuple[Change, dict[Fault, int]]] = {
    "a chunk is gone": (lambda r: r("HDEL", f"message:{ONE}", "2"), {Fault.CHUNK_MISSING: 1}),
    "a chunk is short": (lambda r: r("HSET", f"message:{ONE}", "2", "xx"), {Fault.WRONG_SIZE: 1}),
    "a chunk too many": (lambda r: r("HSET", f"message:{ONE}", "4", "xx"), {Fault.WRONG_SIZE: 1}),
    "no metadata": (lambda r: r("HDEL", f"message:{ONE}", "*"), {Fault.BAD_RECORD: 1}),
    "no mark": (lambda r: r("HDEL", f"message:{ONE}", "#"), {Fault.BAD_RECORD: 1}),
    "chunks alone": (lambda r: r("HSET", "message:00000000000000ff", "1", "xx"), {Fault.CHUNKS_ALONE: 1}),
    "no message": (lambda r: r("DEL", f"message:{TWO}"), {Fault.DELIVERY_ALONE: 1}),
    "no delivery": (
        lambda r: r("DEL", f"deliveries:{TWO}"),
        {Fault.MESSAGE_ALONE: 1, Fault.INDEX_STRAY: 2},
    ),
    "one delivery fewer": (
        lambda r: r("HDEL", f"deliveries:{FOUR}", "other%20zone e9@late.example"),
        {Fault.INDEX_STRAY: 2},
    ),
    "a count is wrong": (lambda r: r("HSET", "counts", "r default", "7"), {Fault.WRONG_COUNT: 1}),
    "counts are gone": (lambda r: r("DEL", "counts"), {Fault.WRONG_COUNT: 2}),
    "no index hands it out": (
        lambda r: r("ZREM", "ready:default", f"{TWO} c@one.example"),
        {Fault.INDEX_MISSING: 1},
    ),
    "it waits for another time": (
        lambda r: r("ZADD", "retry:other%20zone", "17", f"{FOUR} e9@late.example"),
        {Fault.INDEX_STRAY: 1},
    ),
    "an index is stray": (lambda r: r("ZADD", "ready:nowhere", "0", f"{TWO} z@x"), {Fault.INDEX_STRAY: 1}),
    "it is not in its queue": (
        lambda r: r("ZREM", "queue:default", f"{TWO} c@one.example"),
        {Fault.INDEX_MISSING: 1, Fault.WRONG_COUNT: 1},
    ),
    "a forgotten lease has it": (
        lambda r: r("ZADD", "claims", "12", f"default {TWO} c@one.example"),
        {Fault.INDEX_STRAY: 2},
    ),
    "a record has no sense": (
        lambda r: r("HSET", f"deliveries:{TWO}", "default c@one.example", "0 1 one.example {"),
        {Fault.BAD_RECORD: 1},
    ),
    "a field has no sense": (
        lambda r: r("HSET", f"deliveries:{TWO}", "nowhere", '0 1 x {"created":1}'),
        {Fault.BAD_RECORD: 1},
    ),
    "metadata has no sense": (lambda r: r("HSET", f"message:{ONE}", "*", "[]"), {Fault.BAD_RECORD: 1}),
    "a stranger's key": (lambda r: r("SET", "stranger", "1"), {Fault.STRAY_FILE: 1}),
    "another type": (
        lambda r: (r("DEL", f"message:{ONE}"), r("SET", f"message:{ONE}", "1")),
        {Fault.BAD_RECORD: 1},
    ),
}


def redis_of(spool: Spool) -> Callable[..., bytes]:
    """Asks the server; the second word is a key behind the prefix."""
    assert spool.redis is not None
    prefix = spool.redis.prefix
    return lambda verb, key, *words: shared_server().ask(verb, prefix + key, *words)


@pytest.mark.parametrize("name", REDIS_CASES)
async def test_each_fault_in_redis_is_found(tmp_path: Path, name: str) -> None:
    async with Spool(tmp_path / "spool", backend=Backend.REDIS) as spool:
        await mixed(spool.store)
    change, expected = REDIS_CASES[name]
    change(redis_of(spool))
    assert told((await checked(spool, tmp_path))[1]) == {fault.value: n for fault, n in expected.items()}


# --- s3


def s3_of(spool: Spool) -> tuple[Callable[[str], bytes], Callable[[str, bytes | None], None]]:
    """Reads an object behind the prefix, and writes one, or removes it."""
    assert spool.s3 is not None
    place = f"/{BUCKET}/{spool.s3.prefix}"

    def write(key: str, data: bytes | None) -> None:
        verb = "DELETE" if data is None else "PUT"
        assert shared_moto().ask(verb, place + key, data or b"")[0] in (200, 204)

    return lambda key: shared_moto().ask("GET", place + key)[1], write


Write = Callable[[str, bytes | None], None]
S3_CASES: dict[str, tuple[Callable[[Callable[[str], bytes], Write], object], dict[Fault, int]]] = {
    "a body is short": (lambda r, w: w(f"queue/{TWO}", r(f"queue/{TWO}") + b"x"), {Fault.WRONG_SIZE: 1}),
    "a large body is gone": (lambda r, w: w(large(r), None), {Fault.CHUNK_MISSING: 1}),
    "a large body is short": (lambda r, w: w(large(r), b"short"), {Fault.WRONG_SIZE: 1}),
    "no head": (lambda r, w: w(f"queue/{TWO}", b""), {Fault.BAD_RECORD: 1}),
    "a head without sense": (lambda r, w: w(f"queue/{TWO}", b"{}]\n"), {Fault.BAD_RECORD: 1}),
    "another message": (lambda r, w: w("queue/00000000000000ff", r(f"queue/{TWO}")), {Fault.BAD_RECORD: 1}),
    "a record without sense": (
        lambda r, w: w(f"queue/{ONE}", r(f"queue/{ONE}").replace(b',{"created":17', b',{"cr":17')),
        {Fault.BAD_RECORD: 2},
    ),
    "a body alone": (lambda r, w: w("body/00000000000000ff-00aa", b"x"), {Fault.CHUNKS_ALONE: 1}),
    "strangers": (
        lambda r, w: list(map(w, ("queue/stranger", "body/stranger"), (b"x", b"x"))),
        {Fault.STRAY_FILE: 2},
    ),
}


def large(read: Callable[[str], bytes]) -> str:
    """The key of the body of message 5."""
    return "body/" + read(f"queue/{5:016x}").partition(b"/body/")[2].partition(b'"')[0].decode()


async def with_large(spool: Spool) -> None:
    await mixed(spool.store)
    await store_message(spool.store, 5, "f@one.example", body=b"x" * (300 * 1024))


@pytest.mark.parametrize("name", S3_CASES)
async def test_each_fault_in_s3_is_found(tmp_path: Path, name: str) -> None:
    async with Spool(tmp_path / "spool", backend=Backend.S3) as spool:
        await with_large(spool)
    change, expected = S3_CASES[name]
    change(*s3_of(spool))
    assert told((await checked(spool, tmp_path))[1]) == {fault.value: n for fault, n in expected.items()}
