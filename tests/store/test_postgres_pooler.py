"""A pooler between the relay and its database: one for sessions works, one for transactions is refused."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from tests.store.builders import NOW, message_id, store_message
from tests.store.spools import Spool, until
from tests.support.pgbouncer import PgBouncer
from tests.support.postgres import shared_postgres
from zonerelay.config.settings import Backend, PostgresSettings
from zonerelay.model.clock import SystemClock
from zonerelay.model.queue_name import queue_of
from zonerelay.store.common.claims import pool as claim_pool
from zonerelay.store.contract import StoreOpenError


def settings(bouncer: PgBouncer) -> PostgresSettings:
    return PostgresSettings(url=bouncer.url, schema=f"pooled_{uuid.uuid4().hex[:12]}", lease=2.0)


async def test_pool_of_sessions_works_and_relays_hear_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_pool, "POOL_LIMIT", 0)
    with PgBouncer(shared_postgres(), "session") as bouncer:
        pooled = settings(bouncer)
        first = Spool(tmp_path, backend=Backend.POSTGRES, postgres=pooled, clock=SystemClock())
        other = replace(pooled, node=1)
        second = Spool(tmp_path, backend=Backend.POSTGRES, postgres=other, clock=SystemClock())
        async with first, second:
            await store_message(first.store, 1)
            await until(lambda: queue_of("default") in second.news)
            (claimed,) = await second.store.claim(queue_of("default"), 1, now=NOW)
            assert claimed.message_id == message_id(1)
            await second.store.probe()
            # In its own schema, not where a pooler would have put it.
            count = shared_postgres().psql(f"SELECT count(*) FROM {pooled.schema}.delivery")
            assert count == "1"


async def test_pool_of_transactions_is_refused_in_words(tmp_path: Path) -> None:
    with PgBouncer(shared_postgres(), "transaction") as bouncer:
        spool = Spool(tmp_path, backend=Backend.POSTGRES, postgres=settings(bouncer), clock=SystemClock())
        with pytest.raises(StoreOpenError, match="pool_mode = session"):
            await spool.open()
