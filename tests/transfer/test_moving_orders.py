"""Orders of operators go along with mail that moves, and are in force there before it can leave."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.store.builders import store_message
from tests.support.crew import AT_ONCE, client_of, relay_of, run, until_running
from tests.support.postgres import shared_postgres
from tests.support.process import RelayProcess
from tests.transfer.migrations import configured, queue
from zonerelay.cli.main import main
from zonerelay.control.messages.answers import DeliveryRow
from zonerelay.control.messages.requests import QueueList
from zonerelay.queue.orders.order import SUSPEND, Order
from zonerelay.sandbox.sink import Sink

MESSAGES = 40
ORDER = "2620552a"


def order(identity: str = ORDER, **fields: Any) -> Order:  # Any: the fields of an order
    values = {"effect": SUSPEND, "reason": "ticket 42", "who": "ann", "since": time.time() - 60, **fields}
    return Order(id=identity, **values)


def give(home: Path, *orders: Order) -> None:
    (home / "orders").mkdir(mode=0o700, exist_ok=True)
    (home / "orders" / "orders.json").write_bytes(msgspec.json.encode(orders))


def orders_of(home: Path) -> dict[str, Order]:
    raw = (home / "orders" / "orders.json").read_bytes()
    return {each.id: each for each in msgspec.json.decode(raw, type=list[Order])}


async def filled(home: Path, engine: str = "leveldb", **more: str) -> Path:
    config = configured(home, engine, **more)
    async with queue(config) as store:
        for number in range(1, MESSAGES + 1):
            await store_message(store, number * 256, f"to-{number}@example.net")
    return config


def migrate(source: Path, target: Path) -> int:
    return main(["spool", "migrate", "--config", str(source), "--to", str(target), "--json"])


def postgres_relay(home: Path, sink: Sink, *, workers: int = 2) -> RelayProcess:
    tables = {"postgres": {"url": shared_postgres().url, "schema": f"orders_{time.time_ns()}"}}
    return relay_of(home, sink.port, workers=workers, spool={"backend": "postgres"}, tables=tables)


@pytest.mark.parametrize("fields", [{"zone": "default"}, {"sender": "from@*"}], ids=["zone", "sender"])
async def test_suspended_mail_stays_where_it_has_moved_to(
    tmp_path: Path, sink: Sink, fields: dict[str, str]
) -> None:
    """The relay of the target starts afterwards; it has an order of its own."""
    source = await filled(tmp_path / "old")
    give(tmp_path / "old", order(**fields))
    with relay_of(tmp_path / "new", sink.port, workers=1) as running:
        assert await AT_ONCE(running.terminate) == 0
        give(tmp_path / "new", order("0000000a", user="nobody"))
        assert await AT_ONCE(migrate, source, running.config) == 0
        await AT_ONCE(running.start)
        await waits(running, sink)


async def waits(running: RelayProcess, sink: Sink) -> None:
    """All of it waits for the order, and leaves when that is over."""
    queue = await AT_ONCE(lambda: list(client_of(running).stream(QueueList())))
    rows = [each for each in queue if isinstance(each, DeliveryRow)]
    assert len(sink.messages) == 0, "sent although suspended"
    assert [row.order for row in rows] == [ORDER] * MESSAGES
    resumed = await AT_ONCE(run, running, "resume", ORDER)
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout
    await sink.wait_for(MESSAGES, timeout=30)


async def test_a_target_that_runs_has_the_orders_before_it_has_the_mail(tmp_path: Path, sink: Sink) -> None:
    source = await filled(tmp_path / "old")
    give(tmp_path / "old", order(everything=True))
    with postgres_relay(tmp_path / "new", sink) as running:
        await AT_ONCE(until_running, running)
        assert await AT_ONCE(migrate, source, running.config) == 0
        await waits(running, sink)
