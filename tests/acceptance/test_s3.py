"""Real relays on one bucket: nothing acknowledged is lost when one is killed and another stands still."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
from pathlib import Path

from tests.support.process import PROGRAM, RelayProcess
from tests.support.s3_server import BUCKET, KEY, MotoServer
from tests.support.sink import Sink
from tests.support.submit import Submitter, tokens

LEASE = 2.0
IN_FLIGHT = 5


def relay_on(server: MotoServer, directory: Path, sink: Sink) -> RelayProcess:
    directory.mkdir()
    secret = directory / "secret"
    secret.write_text("not-a-secret")
    return RelayProcess(
        directory,
        next_hop=f"127.0.0.1:{sink.port}",
        spool={"backend": "s3"},
        zone={"max_connections": IN_FLIGHT, "max_connections_per_destination": IN_FLIGHT},
        tables={
            "s3": {
                "bucket": BUCKET,
                "endpoint_url": server.url,
                "access_key": KEY,
                "secret_key": str(secret),
                "lease": f"{LEASE:g}s",
                "timeout": "5s",
            },
            "retry": {"schedule": ["1s"], "suspend_min": "1s"},
        },
    )


async def test_relays_lose_nothing_when_one_is_killed_and_one_stands_still(
    tmp_path: Path, sink: Sink
) -> None:
    acknowledged: set[str] = set()

    async def load(relay: RelayProcess, prefix: str, seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        number = 0
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            number += 1
            client = Submitter(relay.smtp_port, prefix=f"{prefix}.{number}", size=3000)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client.run(2, 20), left)
            acknowledged.update(client.acknowledged)
            await asyncio.sleep(0.2)

    with MotoServer() as server:
        relays = [relay_on(server, tmp_path / f"relay{number}", sink) for number in range(3)]
        with relays[0], relays[1], relays[2]:
            work = [asyncio.create_task(load(relay, f"r{n}", 4.0)) for n, relay in enumerate(relays)]
            await asyncio.sleep(0.7)
            await asyncio.to_thread(relays[0].kill)
            relays[1].signal(signal.SIGSTOP)
            await asyncio.sleep(1.5 * LEASE)
            relays[1].signal(signal.SIGCONT)
            await asyncio.gather(*work)
            await asyncio.to_thread(relays[1].wait_until_empty)
            await asyncio.to_thread(relays[2].wait_until_empty)
            said = await asyncio.to_thread(_status, relays[2])
            assert said["backend"] == "s3"
    arrived = tokens(sink.messages)
    assert len(acknowledged) > 20
    assert not acknowledged - arrived.keys()
    twice = sum(count - 1 for token, count in arrived.items() if token in acknowledged)
    print(f"{len(acknowledged)} acknowledged, {sum(arrived.values())} arrived, {twice} twice")
    # In flight at the kill and the stop, and outcomes of moments before.
    assert twice < 100


def _status(relay: RelayProcess) -> dict[str, object]:
    words = [str(PROGRAM), "status", "--json", "--config", str(relay.config)]
    found: dict[str, object] = json.loads(
        subprocess.run(words, capture_output=True, check=True, timeout=20).stdout
    )
    return found
