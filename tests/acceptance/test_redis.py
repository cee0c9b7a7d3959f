"""Real relays on one Redis server: nothing acknowledged is lost whatever is killed, stopped or cut off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.process import PROGRAM, RelayProcess
from tests.support.redis_server import RedisServer
from tests.support.sink import Sink
from tests.support.submit import Submitter, tokens

LEASE = 1.5
IN_FLIGHT = 10
ENOUGH = 200
"""Messages, for the faults to have hit some: a busy machine takes longer over them."""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def relay_on(server: RedisServer, directory: Path, sink: Sink) -> RelayProcess:
    return RelayProcess(
        directory,
        next_hop=f"127.0.0.1:{sink.port}",
        spool={"backend": "redis"},
        zone={"max_connections": IN_FLIGHT, "max_connections_per_destination": IN_FLIGHT},
        tables={
            "redis": {"url": server.url, "prefix": "accepted:", "lease": f"{LEASE:g}s", "timeout": "5s"},
            "retry": {"schedule": ["1s"], "suspend_min": "1s"},
        },
    )


async def test_three_relays_lose_nothing_whatever_happens_to_them(
    tmp_path: Path, sink: Sink, server: RedisServer
) -> None:
    relays = [relay_on(server, tmp_path / f"relay{number}", sink) for number in range(3)]
    acknowledged: set[str] = set()

    async def load(relay: RelayProcess, prefix: str, seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        number = 0
        while (left := deadline - asyncio.get_running_loop().time()) > 0 or len(acknowledged) <= ENOUGH:
            number += 1
            client = Submitter(relay.smtp_port, prefix=f"{prefix}.{number}", size=3000)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client.run(4, 50), max(left, 1.0))
            acknowledged.update(client.acknowledged)
            await asyncio.sleep(0.05)

    with relays[0], relays[1], relays[2]:
        work = [asyncio.create_task(load(relay, f"r{n}", 5.0)) for n, relay in enumerate(relays)]
        await asyncio.sleep(1.0)
        await asyncio.to_thread(relays[0].kill)
        relays[1].signal(signal.SIGSTOP)
        await asyncio.sleep(1.5 * LEASE)
        relays[1].signal(signal.SIGCONT)
        await asyncio.sleep(0.5)
        server.kill()
        await asyncio.sleep(0.3)
        server.start()
        await asyncio.wait_for(asyncio.gather(*work), 60)
        await asyncio.to_thread(relays[0].restart)
        await asyncio.to_thread(relays[2].wait_until_empty, timeout=20.0)
    arrived = tokens(sink.messages)
    assert len(acknowledged) > ENOUGH
    assert not acknowledged - arrived.keys()
    twice = sum(count - 1 for token, count in arrived.items() if token in acknowledged)
    print(f"{len(acknowledged)} acknowledged, {sum(arrived.values())} arrived, {twice} twice")
    # In flight at the kill, the stop and the restart, and outcomes of moments before.
    assert twice < 500


async def test_operators_verbs_and_figures_work_and_a_lost_server_is_451(
    tmp_path: Path, sink: Sink, server: RedisServer
) -> None:
    relay = relay_on(server, tmp_path, sink)

    def run(*words: str) -> str:
        command = [str(PROGRAM), *words, "--config", str(relay.config)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout

    with relay:
        client = Submitter(relay.smtp_port, prefix="first")
        await client.run(1, 1)
        await sink.wait_for(1, timeout=10)
        await asyncio.to_thread(relay.wait_until_empty)
        assert relay.metric("zonerelay_messages_accepted_total") == 1
        assert json.loads(await asyncio.to_thread(run, "status", "--json"))["backend"] == "redis"
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(relay.wait_for, lambda: relay.http("/readyz")[0] == 503, what="not ready")
        refused = Submitter(relay.smtp_port, prefix="refused")
        await refused.run(1, 1)
        assert [reply[:3] for reply in refused.replies] == [b"451"]
        await asyncio.to_thread(server.start)
        await asyncio.to_thread(relay.wait_for, lambda: relay.http("/readyz")[0] == 200, what="ready")
        server.ask("SET", "unrelated", "1")
        sink_port_gone = relay.config.read_text().replace(f":{sink.port}", ":1")
        relay.config.write_text(sink_port_gone)
        relay.signal(signal.SIGHUP)
        await asyncio.to_thread(relay.wait_for, lambda: bool(relay.events("reloaded")), what="reloaded")
        waiting = Submitter(relay.smtp_port, prefix="waiting")
        await waiting.run(1, 3)
        await asyncio.to_thread(relay.wait_for, lambda: bool(relay.events("deferred")), what="deferred")
        assert "3" in await asyncio.to_thread(run, "queue", "hold", "--zone", "default", "--yes")
        listed = await asyncio.to_thread(run, "queue", "list", "--json")
        assert listed.count('"held"') == 3
        assert relay.metric("zonerelay_queue_deliveries", state="held") == 3
        await asyncio.to_thread(run, "queue", "drop", "--zone", "default", "--yes")
        await asyncio.to_thread(relay.wait_until_empty)
