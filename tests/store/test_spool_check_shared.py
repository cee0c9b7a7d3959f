"""A check of a shared store finds what is wrong with it, changes nothing, and is not misled by writers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec import structs

from tests.store.builders import NOW, store_message
from tests.store.spools import Spool
from tests.store.test_spool_check import checked, mixed
from zonerelay.config.settings import Backend
from zonerelay.model.queue_name import queue_of
from zonerelay.store.check import Findings, SpoolContents
from zonerelay.store.contract import CHUNK_SIZE, Finish, Postpone

SHARED = [Backend.REDIS, Backend.POSTGRES, Backend.S3]


def told(findings: Findings) -> dict[str, int]:
    return {fault.value: count for fault, count in findings.counts.items()}


@pytest.mark.parametrize("backend", SHARED)
async def test_a_sound_store_is_clean_beside_a_relay_and_behind_it(tmp_path: Path, backend: Backend) -> None:
    async with Spool(tmp_path / "spool", backend=backend) as spool:
        assert await checked(spool, tmp_path) == (SpoolContents(0, 0, 0), Findings())
        await mixed(spool.store)
        await spool.store.claim(queue_of("default"), 2, now=NOW)
        contents, findings = await checked(spool, tmp_path)
        assert findings == Findings()
        assert (contents.messages, contents.deliveries) == (4, 10)
        assert contents.octets > 2 * CHUNK_SIZE
    assert (await checked(spool, tmp_path))[1] == Findings()


@pytest.mark.parametrize("backend", SHARED)
async def test_relays_that_work_make_no_finding(tmp_path: Path, backend: Backend) -> None:
    async with Spool(tmp_path / "spool", backend=backend) as spool:
        done = False

        async def work(worker: int) -> int:
            """Stores small and large mail, and sends, defers and removes it."""
            number = worker * 1_000_000 + 1
            while not done:
                await asyncio.sleep(0.1)  # a check reads all that there is: it must be able to catch up
                big = 5 * CHUNK_SIZE if number % 5 == 0 else 10
                await store_message(spool.store, number, "a@one.example", "b@two.example", body=b"x" * big)
                number += 1
                for delivery in await spool.store.claim(
                    queue_of("default"), 3, now=NOW, skip_domains={"two.example"}
                ):
                    later = delivery.attempts == 0 and number % 2
                    change = (
                        Postpone(structs.replace(delivery, next_attempt=NOW + 60, attempts=1))
                        if later
                        else Finish(delivery)
                    )
                    await spool.store.settle([change])
                for delivery in await spool.store.claim(
                    queue_of("default"), 2, now=NOW, domain="two.example"
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


async def with_large(spool: Spool) -> None:
    await mixed(spool.store)
    await store_message(spool.store, 5, "f@one.example", body=b"x" * (300 * 1024))
