"""A repair of a shared store leaves it sound, loses nothing that can be read, and may be killed anywhere."""

import asyncio
import base64
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.store.builders import message_id
from tests.store.spools import Spool
from tests.store.test_spool_check import (
    FOUR,
    ONE,
    SHARED,
    TWO,
    change_keys,
    checked,
    put,
    remove,
    repaired,
    with_large,
)
from tests.support.postgres import PostgresServer
from tests.support.s3_server import SECRET
from tests.transfer.test_backup import configuration_of
from zonerelay.cli.main import main
from zonerelay.config.settings import Backend, PostgresSettings
from zonerelay.store.check import DamageKind
from zonerelay.store.contract import CHUNK_SIZE, StoreError

IDS = {message_id(number) for number in (1, 2, 4)}
"""Of the messages that `damage` is about."""


async def damage(spool: Spool) -> None:
    """Message 1 loses part of its body, 2 its deliveries (or its record), one delivery of 4 its record."""
    await change_keys(
        spool,
        remove(b"message %b 000002" % ONE, b"delivery-zone default %b " % TWO),
        put(b"delivery-zone other%%20zone %b e9" % FOUR, b"{"),
    )


_KILLED = """
import asyncio, base64, os, pickle, signal, sys
from pathlib import Path
from zonerelay.store.keys.partition import open_partition
from zonerelay.store.offline import opened_engine, repair_spool

settings, place, left = pickle.loads(base64.b64decode(sys.argv[1]))

def salvage(each):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    (place / each.message_id).write_bytes(b"".join(each.body()))

asyncio.run(repair_spool(
    settings, 0, salvage, lambda done, total: None, carry_out=True, environment={"SECRET": "not-a-secret"}
))
"""


@pytest.mark.parametrize("backend", SHARED)
async def test_a_repair_that_is_killed_is_completed_by_the_next(tmp_path: Path, backend: Backend) -> None:
    async with Spool(tmp_path / "spool", backend=backend) as spool:
        await with_large(spool)
    await damage(spool)
    place = tmp_path / "salvage"
    place.mkdir()
    for left in (1, 2, 3):
        told_to = base64.b64encode(pickle.dumps((spool.all_settings, place, left)))
        killed = await asyncio.to_thread(
            lambda words: subprocess.run(words, check=False),
            [sys.executable, "-c", _KILLED, told_to.decode()],
        )
        assert killed.returncode in (-9, 0)
        if killed.returncode == 0:
            break
    done, rest = await repaired(spool)
    assert {path.name for path in place.iterdir()} | rest.keys() >= IDS
    assert done.after == 7
    assert not (await checked(spool, tmp_path))[1].counts


async def test_a_body_that_the_database_cannot_read_is_found(tmp_path: Path) -> None:
    """The file of large values is cut off, as a disk or a file system may do it."""
    with PostgresServer() as server:
        settings = PostgresSettings(url=server.url, schema="mail", lease=60.0)
        spool = Spool(tmp_path / "spool", backend=Backend.POSTGRES, postgres=settings)
        async with spool:
            await with_large(spool)
        place = "SELECT pg_relation_filepath(reltoastrelid) FROM pg_class WHERE relname = 'entry'"
        path = server.directory / "data" / server.psql(place).strip()
        server.shut_down()
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size // 2 // 8192 * 8192)
        server.start()
        _, findings = await checked(spool, tmp_path)
        assert findings.counts == {DamageKind.UNREADABLE: 1}
        assert findings.kept[0].message_id == f"{5:016x}"
        with pytest.raises(StoreError, match="administrator must repair it first"):
            await repaired(spool)
        assert (await checked(spool, tmp_path))[1].counts == findings.counts


def test_the_commands_say_what_is_wrong_and_what_they_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", SECRET)
    spool = Spool(tmp_path / "home" / "spool", backend=Backend.S3)
    config = configuration_of(spool)

    async def filled() -> None:
        async with spool:
            await with_large(spool)

    asyncio.run(filled())
    asyncio.run(damage(spool))

    def command(*words: str) -> tuple[int, Any]:  # Any: what the command prints
        capsys.readouterr()
        status = main(["spool", *words, "--json", "--config", str(config)])
        return status, json.loads(capsys.readouterr().out)

    status, found = command("check")
    assert (status, found["clean"]) == (1, False)
    assert found["path"].endswith(f"prefix {spool.s3.prefix}" if spool.s3 else "")
    status, looked = command("repair")
    assert (status, looked["done"], looked["kept"]) == (1, False, [])
    status, done = command("repair", "--yes")
    assert (status, done["done"], done["before"], done["after"]) == (1, True, 11, 7)
    salvage = Path(done["salvage"])
    assert (salvage / "incomplete" / f"{message_id(1)}.eml").stat().st_size == CHUNK_SIZE + 5
    assert (
        json.loads((salvage / f"{message_id(4)}.json").read_bytes())["deliveries"][0]["recipient"]
        == "e9@late.example"
    )
    assert command("check")[1]["counts"] == {}
    assert command("repair", "--yes")[0] == 0
