"""Mail moves between relays that run. Orders of operators go along, and are in force before it can leave."""

import asyncio
import json
import random
import smtplib
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import structs

from tests.store.builders import store_message
from tests.support.crew import client_of, relay_of, run, status, until_running
from tests.support.ports import LOOPBACK
from tests.support.postgres import shared_postgres
from tests.support.process import RelayProcess
from tests.support.sink import Sink
from tests.support.waiting import until
from tests.transfer.migrations import Story, configured, contents, fill, queue, spool
from zonerelay.cli.main import main
from zonerelay.cli.spool import migrate as migrate_module
from zonerelay.model.delivery import queue_of
from zonerelay.operations.answers import DeliveryRow
from zonerelay.operations.requests import QueueList
from zonerelay.queue.orders.order import SUSPEND, Order
from zonerelay.store.contract import Finish
from zonerelay.transfer.migration import Migration

MESSAGES = 40
TO = [f"to-{number}@example.net" for number in range(1, MESSAGES + 1)]
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


async def filled(home: Path, engine: str = "leveldb", messages: int = MESSAGES, *, held: int = 0) -> Path:
    config = configured(home, engine)
    async with queue(config) as store:
        for number, recipient in enumerate(TO[:messages], 1):
            await store_message(store, number * 256, recipient, held=number == held)
    return config


def migrate(source: Path, target: Path) -> int:
    return spool(source, "migrate", "--to", str(target), "--json")


def postgres_relay(home: Path, sink: Sink, *, workers: int = 2) -> RelayProcess:
    tables = {"postgres": {"url": shared_postgres().url, "schema": f"orders_{time.time_ns()}"}}
    return relay_of(home, sink.port, workers=workers, spool={"backend": "postgres"}, tables=tables)


@pytest.mark.parametrize("fields", [{"zone": "default"}, {"sender": "from@*"}], ids=["zone", "sender"])
async def test_suspended_mail_stays_after_a_move(tmp_path: Path, sink: Sink, fields: dict[str, str]) -> None:
    """The relay of the target starts afterwards; it has an order of its own."""
    source = await filled(tmp_path / "old")
    give(tmp_path / "old", order(**fields))
    with relay_of(tmp_path / "new", sink.port, workers=1) as running:
        assert await asyncio.to_thread(running.terminate) == 0
        give(tmp_path / "new", order("0000000a", user="nobody"))
        assert await asyncio.to_thread(migrate, source, running.config) == 0
        await asyncio.to_thread(running.start)
        await waits(running, sink)


async def waits(running: RelayProcess, sink: Sink) -> None:
    """All of it waits for the order, and leaves when that is over."""
    for _ in range(100):  # a relay that runs finds what was left to it within a part of the lease
        queue = await asyncio.to_thread(lambda: list(client_of(running).stream(QueueList(limit=0))))
        rows = [each for each in queue if isinstance(each, DeliveryRow)]
        if len(rows) == MESSAGES:
            break
        await asyncio.sleep(0.2)
    assert len(sink.messages) == 0, "sent although suspended"
    assert [row.order for row in rows] == [ORDER] * MESSAGES
    resumed = await asyncio.to_thread(run, running, "resume", ORDER)
    assert resumed.returncode == 0, resumed.stderr + resumed.stdout
    await sink.wait_for(MESSAGES, timeout=30)
    assert sorted(sink.recipients()) == sorted(TO)


async def test_a_target_that_runs_has_the_orders_before_it_has_the_mail(tmp_path: Path, sink: Sink) -> None:
    source = await filled(tmp_path / "old")
    give(tmp_path / "old", order(everything=True))
    with postgres_relay(tmp_path / "new", sink) as running:
        await asyncio.to_thread(until_running, running)
        assert await asyncio.to_thread(migrate, source, running.config) == 0
        await waits(running, sink)


def test_orders_are_merged_with_those_of_the_target(tmp_path: Path) -> None:
    source, target = asyncio.run(filled(tmp_path / "old", messages=1)), configured(tmp_path / "new", "disk")
    now = time.time()
    ended = {"ended": now - 5}
    give(
        tmp_path / "old",
        order("00000001", zone="a"),
        order("00000002", zone="b", until=now + 100),
        order("00000003", zone="c", until=now + 100),
        order("00000004", zone="d"),
        order("00000005", zone="e", **ended),
        order("00000006", zone="f", until=now - 3),
    )
    give(
        tmp_path / "new",
        order("00000002", zone="b", until=now + 900),
        order("00000003", zone="c", **ended),
        order("00000005", zone="e"),
        order("0000000a", zone="a", reason="of the target"),
    )
    assert migrate(source, target) == 0
    merged = orders_of(tmp_path / "new")
    in_force = {identity for identity, each in merged.items() if each.is_in_force(time.time())}
    assert in_force == {"00000001", "00000002", "00000004", "0000000a"}
    assert merged["00000002"].until == now + 900, "the later end"
    assert {"00000003", "00000005", "00000006"} < merged.keys(), "or what they hold would be held for ever"


def test_an_order_that_the_target_has_ended_since_stays_ended(tmp_path: Path) -> None:
    """The first run was cut short, its relay was started, and an operator has ended the order there."""
    source = asyncio.run(filled(tmp_path / "old"))
    give(tmp_path / "old", order(everything=True))
    target = configured(tmp_path / "new", "disk")
    story = Story(source, target, random.Random(1))
    assert story.is_killed(9)
    (given,) = orders_of(tmp_path / "new").values()
    assert given == orders_of(tmp_path / "old")[ORDER]
    give(tmp_path / "new", msgspec.structs.replace(given, ended=time.time()))
    assert migrate(source, target) == 0
    assert orders_of(tmp_path / "new")[ORDER].ended is not None
    assert len(asyncio.run(contents(target))) == MESSAGES


@pytest.mark.parametrize("is_over", [False, True])
def test_what_an_order_holds_is_released_where_it_has_ended_meanwhile(tmp_path: Path, is_over: bool) -> None:
    """The order that holds the mail expires while it moves; a relay of the target has released all that it
    holds by then, and a sleeping copy is not of it.
    """
    source, target = configured(tmp_path / "old", "leveldb"), configured(tmp_path / "new", "disk")
    give(tmp_path / "old", order(sender="from@*", until=time.time() + 3600))

    async def fill() -> None:
        async with queue(source) as store:
            await store_message(store, 256, "by-order@example.net", held=True)
            await store_message(store, 512, "by-hand@example.net", held=True)
            keys = [each.key async for each in store.scan() if each.recipient.startswith("by-order")]
            assert len(await store.update(keys, lambda each: structs.replace(each, act=ORDER))) == 1

    asyncio.run(fill())
    assert Story(source, target, random.Random(1)).is_killed(7)
    copies = asyncio.run(contents(target))
    assert copies
    assert ORDER not in {row[1].act for row in copies.values()}, "a relay would release it"
    if is_over:
        (given,) = orders_of(tmp_path / "new").values()
        give(tmp_path / "new", msgspec.structs.replace(given, until=1.0))
        give(tmp_path / "old", msgspec.structs.replace(given, until=1.0))
    assert migrate(source, target) == 0
    after = {each: (row[1].held, row[1].act) for each, row in asyncio.run(contents(target)).items()}
    assert after["by-order@example.net"] == ((False, "") if is_over else (True, ORDER))
    assert after["by-hand@example.net"] == (True, "")


@pytest.mark.parametrize("side", ["old", "new"])
def test_immovable_orders_refuse_it(tmp_path: Path, capsys: pytest.CaptureFixture[str], side: str) -> None:
    source, target = asyncio.run(filled(tmp_path / "old")), configured(tmp_path / "new", "disk")
    before = asyncio.run(contents(source))
    give(tmp_path / side)
    (tmp_path / side / "orders" / "orders.json").write_bytes(b"")
    assert migrate(source, target) == 2
    assert f"{tmp_path}/{side}/orders/orders.json" in capsys.readouterr().err
    give(tmp_path / "old", order(zone="a"))
    give(tmp_path / "new", order(zone="b"))
    assert migrate(source, target) == 2
    assert "contains another suspension with the id" in capsys.readouterr().err
    give(tmp_path / "new", *(order(f"{number:08x}", zone=f"z{number}") for number in range(1000)))
    assert migrate(source, target) == 2
    assert "more than 1,000 active suspensions" in capsys.readouterr().err
    assert asyncio.run(contents(source)) == before
    assert not (tmp_path / "old" / "migration").exists()


@pytest.mark.parametrize("engine", ["postgres", "redis"])
def test_a_relay_of_the_target_on_another_machine_refuses_the_migration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate_module, "_PATIENCE", 1.0)
    source, target = asyncio.run(filled(tmp_path / "old")), configured(tmp_path / "new", engine)
    give(tmp_path / "old", order(everything=True))

    async def beside_another_relay() -> int:
        async with queue(target):
            return await asyncio.to_thread(migrate, source, target)

    assert asyncio.run(beside_another_relay()) == 2
    told = capsys.readouterr().err
    assert "shared with other relays (1)" in told
    assert ORDER in told
    assert asyncio.run(contents(target)) == {}
    assert not (tmp_path / "new" / "orders").exists(), "the mail of the target is not suspended"
    assert migrate(source, target) == 0, "it has stopped"
    assert ORDER in orders_of(tmp_path / "new")
    assert len(asyncio.run(contents(target))) == MESSAGES


def test_a_restore_keeps_the_orders_that_are_in_force(tmp_path: Path) -> None:
    source, target = asyncio.run(filled(tmp_path / "old", messages=1)), configured(tmp_path / "new", "disk")
    give(tmp_path / "old", order("00000001", zone="a"), order("00000002", zone="b"))
    assert spool(source, "backup", str(tmp_path / "backup")) == 0
    give(tmp_path / "new", order("00000002", zone="b", ended=time.time()), order("00000003", zone="c"))
    assert spool(target, "restore", str(tmp_path / "backup")) == 0
    merged = orders_of(tmp_path / "new")
    in_force = {identity for identity, each in merged.items() if each.is_in_force(time.time())}
    assert in_force == {"00000001", "00000003"}


def test_mail_that_is_imported_from_a_backup_has_its_orders(tmp_path: Path) -> None:
    """As `spool restore` advises where the queue is not empty."""
    source, target = asyncio.run(filled(tmp_path / "old", messages=1)), configured(tmp_path / "new", "disk")
    give(tmp_path / "old", order(zone="default"))
    assert spool(source, "backup", str(tmp_path / "backup")) == 0
    assert spool(target, "import", str(tmp_path / "backup" / "00.tar")) == 0
    assert orders_of(tmp_path / "new") == orders_of(tmp_path / "old")
    assert len(asyncio.run(contents(target))) == 1


@pytest.mark.parametrize(
    ("fields", "is_held"),
    [
        ({"zone": "default"}, True),
        ({"domain": "example.net"}, True),
        ({"sender": "from@*"}, True),
        ({"recipient": "to-1@*"}, True),
        ({"destination": "mx.example.net"}, True),
        ({"everything": True}, True),
        ({"zone": "other"}, False),
        ({"domain": "example.org"}, False),
        ({"everything": True, "until": 1.0}, False),
        ({"everything": True, "ended": 2.0}, False),
    ],
    ids=str,
)
def test_suspended_mail_is_held_where_it_is_imported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, Any], is_held: bool
) -> None:
    """The relay there has no such order. At MX hosts every destination may be the one that is meant."""
    source = asyncio.run(filled(tmp_path / "old", messages=1))
    target = configured(tmp_path / "new", "disk")
    give(tmp_path / "old", order(**fields))
    assert spool(source, "export", str(tmp_path / "mail")) == 0
    assert ("suspended by operators" in capsys.readouterr().out) is is_held
    assert spool(target, "import", str(tmp_path / "mail")) == 0
    (row,) = asyncio.run(contents(target)).values()
    assert (row[1].held, row[1].act) == ((True, ORDER) if is_held else (False, ""))


async def test_an_order_of_a_running_source_goes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator suspends mail of the source while it moves: what wakes in the target from then on waits."""
    monkeypatch.setattr(migrate_module, "STRETCH", 10)
    source, target = await filled(tmp_path / "old", "redis"), configured(tmp_path / "new", "disk")
    stretches: list[bool] = []
    finish = Migration.finish

    async def finishing(migration: Migration) -> None:
        if len(stretches) == 1:
            assert ORDER in orders_of(tmp_path / "new"), "before it wakes"
        give(tmp_path / "old", order(everything=True))
        stretches.append(True)
        await finish(migration)

    monkeypatch.setattr(Migration, "finish", finishing)
    assert await asyncio.to_thread(migrate, source, target) == 0
    assert len(stretches) > 4
    assert len(await contents(target)) == MESSAGES


def send(relay: RelayProcess, recipient: str) -> None:
    with smtplib.SMTP(LOOPBACK, relay.smtp_port, timeout=20) as client:
        client.sendmail("app@example.org", [recipient], b"Subject: new\r\n\r\nnew\r\n")


async def test_a_relay_of_a_private_target_takes_the_mail_over_when_it_starts_again(
    tmp_path: Path, sink: Sink, capsys: pytest.CaptureFixture[str]
) -> None:
    source = await filled(tmp_path / "old", "disk", held=7)
    with relay_of(tmp_path / "new", sink.port, workers=1) as running:
        assert await asyncio.to_thread(migrate, source, running.config) == 0
        spool = Path(json.loads(capsys.readouterr().out)["spool"])
        assert spool == running.spool / "127"
        await asyncio.to_thread(send, running, "new@example.net")
        await sink.wait_for(1, timeout=20)
        assert sink.recipients() == ["new@example.net"]
        assert await asyncio.to_thread(running.terminate) == 0
        await asyncio.to_thread(running.start)
        await sink.wait_for(MESSAGES, timeout=30)
        assert Counter(sink.recipients()) == Counter(["new@example.net", *(TO[:6] + TO[7:])])
        assert spool.exists(), "the held message is in it"
        words = ["queue", "release", "--all", "--yes", "--config", str(running.config)]
        await asyncio.to_thread(
            running.wait_for,
            lambda: not any(each.active for each in status(running).zones),
            what="every outcome is stored",
        )
        assert await asyncio.to_thread(main, words) == 0
        await sink.wait_for(MESSAGES + 1, timeout=20)
        await until(lambda: not spool.exists())
    assert sorted(sink.recipients()) == sorted(["new@example.net", *TO])


async def test_a_shared_source_keeps_what_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = configured(tmp_path / "a", "redis"), configured(tmp_path / "b", "leveldb")
    await fill(source, 12)
    before = await contents(source)
    async with queue(source) as store:
        busy = await store.claim(queue_of("default"), 3, now=time.time())
        assert await asyncio.to_thread(migrate, source, target) == 1
        messages = {each.message_id for each in busy}
        assert json.loads(capsys.readouterr().out)["left"] == len(messages)
        kept = {each: row for each, row in before.items() if row[0].id in messages}
        assert await contents(source) == kept, "as it was, and not held"
        await store.settle([Finish(each) for each in busy])
        assert await asyncio.to_thread(migrate, source, target) == 0
    sent = {each.recipient for each in busy}
    assert await contents(target) == {each: row for each, row in before.items() if each not in sent}


async def test_a_private_source_that_runs_is_refused(
    tmp_path: Path, sink: Sink, capsys: pytest.CaptureFixture[str]
) -> None:
    target = configured(tmp_path / "b", "disk")
    with relay_of(tmp_path / "old", sink.port, workers=1) as running:
        assert await asyncio.to_thread(migrate, running.config, target) == 2
        told = capsys.readouterr().err
    assert f"running as process {running.pid}" in told
    assert "start the relay of the other configuration first" in told
