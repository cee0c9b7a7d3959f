"""A real relay on a disk queue, and on a shelf: nothing acknowledged is lost, operators' commands work."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
from pathlib import Path

from tests.support.ports import free_port
from tests.support.process import PROGRAM, RelayProcess
from tests.support.sink import Sink
from tests.support.submit import Submitter, tokens

ROUNDS = 3
IN_FLIGHT = 10


def relay_in(directory: Path, port: int) -> RelayProcess:
    return RelayProcess(
        directory,
        next_hop=f"127.0.0.1:{port}",
        spool={
            "backend": "disk",
            "env_directory": str(directory / "messages"),
            "meta_directory": str(directory / "states"),
            "scratch_directory": str(directory / "scratch"),
        },
        zone={"max_connections": IN_FLIGHT, "max_connections_per_destination": IN_FLIGHT},
        tables={"retry": {"schedule": ["1s"], "suspend_min": "1s"}},
    )


def left(directory: Path) -> int:
    """Files of messages."""
    return len(list((directory / "messages").glob("message-*")))


async def test_kill_9_under_load_loses_nothing(tmp_path: Path, sink: Sink) -> None:
    chance = random.Random(11)
    acknowledged: set[str] = set()
    relay = relay_in(tmp_path, sink.port)
    with relay:
        for number in range(ROUNDS):
            client = Submitter(
                relay.smtp_port, prefix=f"round{number}", size=chance.choice([500, 5000, 900_000])
            )
            load = asyncio.create_task(client.run(20, 100_000))
            await asyncio.sleep(chance.uniform(0.2, 0.6))
            await asyncio.to_thread(relay.kill)
            await load
            acknowledged |= client.acknowledged
            await asyncio.to_thread(relay.restart)
        await asyncio.to_thread(relay.wait_until_empty)
        await asyncio.to_thread(relay.terminate)
    arrived = tokens(sink.messages)
    assert len(acknowledged) > ROUNDS * 5
    assert not acknowledged - arrived.keys()
    assert not left(tmp_path), "something was left behind"


def command(relay: RelayProcess, *words: str) -> str:
    """Anew while it says that a delivery is just being attempted: they are, every second."""
    line = [str(PROGRAM), "queue", *words, "--config", str(relay.config)]
    for _ in range(20):
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        if "try again" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    return done.stdout


async def run(relay: RelayProcess, *words: str) -> str:
    return await asyncio.to_thread(command, relay, *words)


async def test_operators_hold_show_release_and_drop(tmp_path: Path) -> None:
    port = free_port()
    relay = relay_in(tmp_path, port)
    with relay:
        await Submitter(relay.smtp_port, prefix="kept").run(1, 3)
        await asyncio.to_thread(relay.wait_for, lambda: len(relay.events("deferred")) >= 3, what="deferred")
        listed = [json.loads(line) for line in (await run(relay, "list", "--json")).splitlines()]
        first, second, _ = (str(entry["message_id"]) for entry in listed)
        await run(relay, "hold", first)
        await run(relay, "drop", "--purge", second)
        assert "kept-1" in await run(relay, "show", first)
        assert left(tmp_path) == 2
        await asyncio.to_thread(relay.restart)
        sink = Sink(port=port)
        await sink.start()
        await sink.wait_for(1, timeout=20)
        await run(relay, "release", first)
        await sink.wait_for(2, timeout=20)
        await asyncio.to_thread(relay.wait_until_empty)
        assert tokens(sink.messages).keys() == {"kept-1", "kept-3"}
        await sink.close()


async def test_shelf_survives_an_orderly_restart(tmp_path: Path) -> None:
    port = free_port()
    relay = RelayProcess(
        tmp_path,
        next_hop=f"127.0.0.1:{port}",
        spool={"backend": "memory", "shelve": str(tmp_path / "queue.shelf")},
        tables={"retry": {"schedule": ["1s"], "suspend_min": "1s"}},
    )
    with relay:
        client = Submitter(relay.smtp_port, prefix="kept")
        await client.run(2, 10)
        assert await asyncio.to_thread(relay.terminate) == 0
        await asyncio.to_thread(relay.start)
        assert "a crash loses" in relay.log_text()
        sink = Sink(port=port)
        await sink.start()
        await sink.wait_for(10, timeout=20)
        assert tokens(sink.messages).keys() == client.acknowledged
        await sink.close()
