"""`zonerelay spool migrate` beside relays that run: real processes, and a sink that counts what arrives."""

from __future__ import annotations

import asyncio
import json
import smtplib
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.store.builders import store_message
from tests.support.crew import status
from tests.support.ports import LOOPBACK
from tests.support.postgres import shared_postgres
from tests.support.process import RelayProcess
from tests.support.sink import Sink
from tests.support.waiting import until
from tests.transfer.migrations import configured, contents, fill, queue
from zonerelay.cli.main import main
from zonerelay.model.queue_name import queue_of
from zonerelay.store.contract import Finish

MESSAGES = 30


async def filled(home: Path, engine: str) -> Path:
    """The queue of a relay that is stopped, with one message that is held."""
    config = configured(home, engine)
    async with queue(config) as store:
        for number in range(1, MESSAGES + 1):
            await store_message(store, number * 256, f"to-{number}@example.net", held=number == 7)
    return config


def relay(home: Path, sink: Sink, engine: str) -> RelayProcess:
    tables = {"postgres": {"url": shared_postgres().url, "schema": f"live_{time.time_ns()}"}}
    return RelayProcess(
        home,
        next_hop=f"{LOOPBACK}:{sink.port}",
        spool={"backend": engine},
        tables=tables if engine == "postgres" else {},
    )


def send(relay: RelayProcess, recipient: str) -> None:
    with smtplib.SMTP(LOOPBACK, relay.smtp_port, timeout=20) as client:
        client.sendmail("app@example.org", [recipient], b"Subject: new\r\n\r\nnew\r\n")


async def migrate(source: Path, target: Path) -> int:
    words = ["spool", "migrate", "--config", str(source), "--to", str(target), "--json"]
    return await asyncio.to_thread(main, words)


def arrived(sink: Sink) -> Counter[str]:
    return Counter(recipient for message in sink.messages for recipient in message.recipients)


EXPECTED = Counter([f"to-{number}@example.net" for number in range(1, MESSAGES + 1) if number != 7])


async def test_a_relay_on_a_shared_target_sends_what_has_moved(tmp_path: Path, sink: Sink) -> None:
    source = await filled(tmp_path / "old", "leveldb")
    with relay(tmp_path / "new", sink, "postgres") as running:
        assert await migrate(source, running.config) == 0
        await asyncio.to_thread(send, running, "new@example.net")
        await sink.wait_for(MESSAGES, timeout=20)
        assert await asyncio.to_thread(running.terminate) == 0
    assert arrived(sink) == EXPECTED + Counter(["new@example.net"])
    left = await asyncio.to_thread(lambda: asyncio.run(contents(running.config)))
    assert [(each, row[1].held) for each, row in left.items()] == [("to-7@example.net", True)]


async def test_a_relay_of_a_private_target_takes_the_mail_over_when_it_starts_again(
    tmp_path: Path, sink: Sink, capsys: pytest.CaptureFixture[str]
) -> None:
    source = await filled(tmp_path / "old", "disk")
    with relay(tmp_path / "new", sink, "leveldb") as running:
        assert await migrate(source, running.config) == 0
        spool = Path(json.loads(capsys.readouterr().out)["spool"])
        assert spool == running.spool / "127"
        await asyncio.to_thread(send, running, "new@example.net")
        await sink.wait_for(1, timeout=20)
        assert arrived(sink) == Counter(["new@example.net"])
        assert await asyncio.to_thread(running.terminate) == 0
        await asyncio.to_thread(running.start)
        await sink.wait_for(MESSAGES, timeout=30)
        assert arrived(sink) == EXPECTED + Counter(["new@example.net"])
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
    assert max(arrived(sink).values()) == 1


async def test_a_shared_source_that_runs_keeps_what_it_is_sending(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = configured(tmp_path / "a", "redis"), configured(tmp_path / "b", "leveldb")
    await fill(source, 12)
    before = await contents(source)
    async with queue(source) as store:
        busy = await store.claim(queue_of("default"), 3, now=time.time())
        assert await migrate(source, target) == 1
        messages = {each.message_id for each in busy}
        assert json.loads(capsys.readouterr().out)["left"] == len(messages)
        kept = {each: row for each, row in before.items() if row[0].id in messages}
        assert await contents(source) == kept, "as it was, and not held"
        await store.settle([Finish(each) for each in busy])
        assert await migrate(source, target) == 0
    sent = {each.recipient for each in busy}
    assert await contents(target) == {each: row for each, row in before.items() if each not in sent}


async def test_a_private_source_that_runs_is_refused(
    tmp_path: Path, sink: Sink, capsys: pytest.CaptureFixture[str]
) -> None:
    target = configured(tmp_path / "b", "disk")
    with relay(tmp_path / "old", sink, "leveldb") as running:
        assert await migrate(running.config, target) == 2
        told = capsys.readouterr().err
    assert f"running as process {running.pid}" in told
    assert "start the relay of the other configuration first" in told
