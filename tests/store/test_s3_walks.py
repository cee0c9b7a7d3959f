"""Looking through a bucket costs few requests, and no more memory than a bounded number of messages."""

from __future__ import annotations

from typing import Any

import pytest

from tests.store.builders import NOW, attempt, store_message
from tests.store.fleet import claim_ids
from tests.store.spools import Spool, until
from tests.store.test_s3_sharing import Fleet, cut_off, find_dead, fleet, inside
from zonerelay.model.queue_name import queue_of
from zonerelay.store.contract import Finish, Postpone

__all__ = ["fleet"]  # the fixture


async def walk(spool: Spool) -> None:
    store = inside(spool)
    store._begin_walk()
    assert store._walking is not None
    await store._walking


def watch_reads(spool: Spool) -> list[int]:
    """How many requests for objects of the queue were under way when each began."""
    bucket = inside(spool)._objects.bucket
    ask, found, now = bucket._ask, [], 0

    async def watched(verb: str, **what: Any) -> Any:  # Any: as in the client
        nonlocal now
        counts = verb == "get_object" and "/queue/" in what["Key"]
        now += counts
        found.extend([now] if counts else [])
        try:
            return await ask(verb, **what)
        finally:
            now -= counts

    bucket._ask = watched  # type: ignore[method-assign]  # to count
    return found


async def test_others_mail_is_read_once_whatever_they_do_with_it(fleet: Fleet) -> None:
    owner, other = await fleet.relay(lease=60.0), await fleet.relay(lease=60.0)
    for number in range(3):
        await store_message(owner.store, number)
    await other.store.probe()
    reads = watch_reads(other)
    await walk(other)
    assert len(reads) == 3
    one, two, three = await owner.store.claim(queue_of("default"), 9, now=NOW)
    await owner.store.settle([Postpone(one.deferred(NOW + 60, attempt())), Finish(two)])
    await walk(other)
    assert len(reads) == 3
    assert list(inside(other)._walks._others) == [one.message_id, three.message_id]


async def test_take_over_holds_few_messages_at_a_time(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zonerelay.store.s3.adopt.READS_AT_ONCE", 2)
    dead, heir = await fleet.relay(lease=60.0), await fleet.relay(lease=60.0)
    for number in range(6):
        await store_message(dead.store, number, body=b"x" * 100_000)
    cut_off(dead)
    reads = watch_reads(heir)
    await find_dead(heir, dead)
    await until(lambda: len(inside(heir)._mine.ids) == 6)
    assert max(reads) == 2
    assert await claim_ids(heir.store) == list(range(6))
