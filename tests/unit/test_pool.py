"""Who gets the room that connections leave: whoever has waited longest for it, and nobody for nothing."""

from __future__ import annotations

import asyncio

from tests.support.queueing import route_to
from zonerelay.config.models import ZoneSettings
from zonerelay.delivery.pool import Pool
from zonerelay.delivery.slots import Slot
from zonerelay.delivery.way import Terms

ZONE = ZoneSettings(max_connections=2, max_connections_per_destination=1)


def terms(host: str) -> Terms:
    return Terms(ZONE, route_to("default", host))


async def taken(pool: Pool, host: str) -> Slot:
    got = await pool.acquire(terms(host))
    assert isinstance(got, Slot)
    return got


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_newcomer_does_not_take_the_room_that_somebody_waits_for() -> None:
    """As the simulation showed: an attempt was overtaken for eight minutes."""
    pool = Pool(quit_timeout=1.0)
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
    pool = Pool(quit_timeout=1.0)
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
    pool = Pool(quit_timeout=1.0)
    first, _ = await taken(pool, "a"), await taken(pool, "b")
    waiting = [asyncio.create_task(taken(pool, host)) for host in "cd"]
    await turns()
    waiting[0].cancel()
    first.release()
    await turns()
    assert waiting[1].done()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert not pool._lines
