"""Rights and settings that are changed while a relay runs."""

from __future__ import annotations

import pytest

from tests.store.builders import store_message
from tests.store.fleet import Fleet, until_healthy
from tests.store.spools import until
from zonerelay.store.contract import StoreError


async def test_rights_that_were_taken_away_are_noticed_at_once_and_waited_for(lonely: Fleet) -> None:
    spool = await lonely.relay(lease=300.0)
    await store_message(spool.store, 1)
    lonely.server.ask("ACL", "SETUSER", "default", "-evalsha")
    with pytest.raises(StoreError):
        await store_message(spool.store, 2)
    await until(lambda: spool.store.unhealthy() is not None)
    lonely.server.ask("ACL", "SETUSER", "default", "+evalsha")
    await until_healthy(spool)
    await store_message(spool.store, 2)


async def test_log_that_is_switched_off_at_run_time_stops_mail_within_one_beat(lonely: Fleet) -> None:
    spool = await lonely.relay(lease=3.0)
    await store_message(spool.store, 1)
    lonely.server.configure("appendonly", "no")
    await until(lambda: spool.store.unhealthy() is not None, seconds=2.0)
    with pytest.raises(StoreError):
        await store_message(spool.store, 2)
    lonely.server.configure("appendonly", "yes")
    await until_healthy(spool)
