"""A backup of a shared store joins no queue, and what is in it is whole, whatever the relays do meanwhile."""

from __future__ import annotations

import asyncio
import json
import tarfile
from dataclasses import fields
from pathlib import Path

import pytest

from tests.store.builders import NOW, message_id, store_message
from tests.store.spools import Spool
from tests.support.redis_server import shared_server
from tests.support.s3_server import SECRET
from tests.transfer.migrations import spool
from tests.transfer.queues import rows
from tests.transfer.test_exchange import fill
from zonerelay.config.settings import Backend
from zonerelay.model.queue_name import queue_of
from zonerelay.store.contract import Finish

SHARED = [Backend.REDIS, Backend.POSTGRES, Backend.S3]


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", SECRET)


def configuration_of(opened: Spool) -> Path:
    """The configuration file of a relay on the store."""
    home = opened.settings.path.parent
    home.mkdir(exist_ok=True)
    path = home / "zonerelay.toml"
    text = f'[spool]\nbackend = "{opened.settings.backend.value}"\npath = "{opened.settings.path}"\n'
    for name in ("redis", "postgres", "s3"):
        settings = getattr(opened, name)
        if settings is None:
            continue
        text += f"[{name}]\n"
        for each in fields(settings):
            value = getattr(settings, each.name)
            if isinstance(value, str) and value:
                text += f"{each.name} = {json.dumps(value)}\n"
    path.write_text(text)
    return path


@pytest.mark.parametrize("backend", SHARED)
def test_a_backup_beside_a_relay_is_restored_exactly(tmp_path: Path, backend: Backend) -> None:
    one = Spool(tmp_path / "one" / "spool", backend=backend)
    other = Spool(tmp_path / "other" / "spool", backend=backend)
    config = configuration_of(one)

    async def made() -> object:
        async with one:
            await fill(one.store)
            await one.store.claim(queue_of("default"), 1, now=NOW)
            stored = await rows(one.store)
            node = one.store.node
            assert await asyncio.to_thread(spool, config, "backup", str(tmp_path / "backup")) == 0
            assert (one.store.node, one.store.unhealthy()) == (node, None)
            return stored

    async def restored() -> object:
        async with other:
            return await rows(other.store)

    stored = asyncio.run(made())
    assert spool(configuration_of(other), "restore", str(tmp_path / "backup")) == 0
    assert asyncio.run(restored()) == stored


def saved(backup: Path) -> dict[int, bytes]:
    """Each message of a backup with its body."""
    found = {}
    with tarfile.open(backup / "00.tar") as tar:
        for member in tar.getmembers():
            if member.name.endswith(".eml"):
                body = tar.extractfile(member)
                assert body is not None
                found[int(member.name[-20:-4], 16)] = body.read()
    return found


def body(number: int) -> bytes:
    return b"%09d" % number * (9000 if number % 7 == 0 else 300)


STAYING, PASSING = 60, 40


@pytest.mark.parametrize("backend", SHARED)
def test_what_stays_is_in_it_and_each_message_is_whole(tmp_path: Path, backend: Backend) -> None:
    """Forty messages are there at a time, of which the oldest leaves when one comes in."""
    one = Spool(tmp_path / "one" / "spool", backend=backend)
    config = configuration_of(one)

    async def run() -> tuple[int, int]:
        async with one:
            waiting = []
            for number in range(1, STAYING + PASSING + 1):
                made = await store_message(one.store, number, body=body(number))
                waiting += made if number > STAYING else []
            working = asyncio.create_task(
                asyncio.to_thread(spool, config, "backup", str(tmp_path / "backup"))
            )
            number = STAYING + PASSING
            while not working.done():
                number += 1
                waiting += await store_message(one.store, number, body=body(number))
                await one.store.settle([Finish(waiting.pop(0))])
            return await working, number

    status, last = asyncio.run(run())
    assert status == 0
    assert last > STAYING + PASSING + 10, "the relay waited for the backup"
    found = saved(tmp_path / "backup")
    assert found.keys() >= set(range(1, STAYING + 1))
    assert all(octets == body(number) for number, octets in found.items())


def test_a_message_that_cannot_be_read_is_named_and_the_others_are_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = Spool(tmp_path / "one" / "spool", backend=Backend.REDIS)
    config = configuration_of(one)

    async def filled() -> None:
        async with one:
            await fill(one.store)

    asyncio.run(filled())
    assert one.redis is not None
    chunk = f"message {message_id(2)} 000003"
    assert shared_server().ask("HDEL", f"{one.redis.prefix}values:0", chunk) == b":1\r\n"
    shared_server().ask("ZREM", f"{one.redis.prefix}keys:0", chunk)
    assert spool(config, "backup", str(tmp_path / "backup"), "--json") == 1
    assert json.loads(capsys.readouterr().out)["unusable"] == 1
    assert saved(tmp_path / "backup").keys() == {1}
