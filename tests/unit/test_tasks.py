"""Tasks that an object owns."""

from __future__ import annotations

import asyncio

from zonerelay.process.tasks import Tasks


async def test_a_drain_ends_when_the_tasks_had_ended_before_it_began() -> None:
    """The loop has not called back yet: it would wait for that for ever, and nothing else had a turn."""
    tasks = Tasks()
    await tasks.start(asyncio.sleep(0))
    tasks._running.add(task := asyncio.create_task(asyncio.sleep(0)))
    await task  # it is never discarded by a callback, as one that had no turn yet
    async with asyncio.timeout(5):
        await tasks.wait()


async def test_a_drain_waits_for_what_is_started_meanwhile() -> None:
    tasks, ended = Tasks(), []

    async def second() -> None:
        await asyncio.sleep(0.01)
        ended.append(2)

    async def first() -> None:
        await asyncio.sleep(0.01)
        tasks.start(second())

    tasks.start(first())
    await tasks.wait()
    assert ended == [2]
