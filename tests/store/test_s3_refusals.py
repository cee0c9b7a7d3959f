"""A write that timed out and lands late: its client has heard 451 and has come again with another message."""

from __future__ import annotations

from typing import Any

import pytest

from tests.store.builders import message_id, store_message
from tests.store.fleet import claim_ids
from tests.store.spools import Spool, until
from tests.store.test_s3_sharing import Fleet, cut_off, find_dead, fleet, healthy, inside
from tests.store.test_s3_walks import walk
from zonerelay.store.contract import StoreError
from zonerelay.store.s3 import uploads as s3_uploads
from zonerelay.store.s3.client import ConflictError, UnsureError

__all__ = ["fleet"]  # the fixture

LATE = message_id(1)


class Held:
    """The next request that creates a message is held on its way; its client waits in vain."""

    def __init__(self, spool: Spool) -> None:
        self.what: dict[str, Any] = {}  # Any: as in the client
        bucket = inside(spool)._objects.bucket
        ask = bucket._ask

        async def hold(verb: str, **what: Any) -> dict[str, Any]:  # Any: as above
            if verb != "put_object" or "/queue/" not in str(what["Key"]) or self.what:
                return await ask(verb, **what)
            self.what = what
            error = UnsureError("no answer")
            bucket.trouble(error)
            raise error

        bucket._ask = hold  # type: ignore[method-assign]  # what the network does

    async def land(self, spool: Spool) -> None:
        """It arrives as it was sent, with its conditions."""
        await inside(spool)._objects.bucket._ask("put_object", **self.what)


async def give_up(spool: Spool, **message: Any) -> Held:  # Any: as `store_message` has it
    held = Held(spool)
    with pytest.raises(StoreError):
        await store_message(spool.store, 1, **message)
    await healthy(spool)
    await until(lambda: not inside(spool)._refusals.open)
    return held


async def everything(spool: Spool) -> list[str]:
    await walk(spool)
    return [delivery.message_id async for delivery in spool.store.scan()]


async def test_late_write_finds_a_refusal_and_is_never_delivered(fleet: Fleet) -> None:
    spool = await fleet.relay(lease=60.0)
    held = await give_up(spool)
    await store_message(spool.store, 2)
    assert await everything(spool) == [message_id(2)]
    with pytest.raises(ConflictError):
        await held.land(spool)
    assert await everything(spool) == [message_id(2)]
    assert await claim_ids(spool.store) == [2]


async def test_refusal_stands_over_a_restart_and_against_other_relays(fleet: Fleet) -> None:
    spool, other = await fleet.relay(lease=60.0), await fleet.relay(lease=60.0)
    held = await give_up(spool)
    await spool.reopen()
    await walk(other)
    with pytest.raises(ConflictError):
        await held.land(spool)
    assert await everything(spool) == await everything(other) == []
    cut_off(spool)
    await find_dead(other, spool)
    await walk(other)
    assert await claim_ids(other.store) == []


async def test_write_that_landed_before_the_refusal_is_replaced_by_it(fleet: Fleet) -> None:
    """Also when it had been left to whoever has room, and when its request arrives a second time."""
    spool = await fleet.relay(lease=60.0)
    store = inside(spool)
    store._uploads._owner = lambda: ""
    held = Held(spool)
    store._keeper._in_trouble = True  # nothing is put right yet
    with pytest.raises(StoreError):
        await store_message(spool.store, 1, body=b"x" * 400_000)
    await held.land(spool)
    assert len(fleet.keys("body/")) == 1
    await spool.store.probe()
    await until(lambda: not fleet.keys("body/"))
    with pytest.raises(ConflictError):
        await held.land(spool)
    assert await everything(spool) == []


async def test_relay_that_stops_in_doubt_leaves_a_refusal(fleet: Fleet) -> None:
    spool = await fleet.relay(lease=60.0)
    held = Held(spool)
    inside(spool)._objects.bucket.trouble = lambda _: None  # nothing is put right before
    with pytest.raises(StoreError):
        await store_message(spool.store, 1)
    await spool.reopen()
    with pytest.raises(ConflictError):
        await held.land(spool)
    assert await everything(spool) == []


async def test_refusals_are_removed_when_nothing_can_come_any_more(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = await fleet.relay(lease=60.0)
    await give_up(spool)
    await walk(spool)
    assert fleet.keys("queue/") == [f"queue/{LATE}"]
    monkeypatch.setattr(s3_uploads, "KEPT", 0.0)
    await walk(spool)
    assert fleet.keys("queue/") == []


async def test_without_conditions_a_late_write_is_found_and_removed(fleet: Fleet) -> None:
    spool = await fleet.relay(shared=False, lease=60.0)
    held = await give_up(spool)
    assert fleet.keys("queue/") == []
    await held.land(spool)
    assert len(fleet.keys("queue/")) == 1
    assert await everything(spool) == []
    assert fleet.keys("queue/") == []


async def test_what_another_relay_has_taken_is_left_to_it_with_its_body(fleet: Fleet) -> None:
    """The lease was lost with the answer, and the mail has been taken over: too late to take it back."""
    spool, other = await fleet.relay(lease=60.0), await fleet.relay(lease=60.0)
    (delivery,) = await store_message(other.store, 1, body=b"x" * 400_000)
    inside(spool)._refusals.note(LATE, inside(spool)._nodes.session)
    await spool.store.probe()
    assert inside(spool)._refusals.open == {}
    assert await claim_ids(other.store) == [1]
    assert len(fleet.keys("body/")) == 1
    assert (await other.store.read_message(delivery.message_id)).size == 400_000
