"""Orders of operators outlast a kill -9 of a relay with several workers."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import msgspec
import pytest

from tests.support.crew import AT_ONCE, client_of, pid_of, relay_of, run, status, until_running
from tests.support.sink import Sink
from tests.support.submit import Submitter, tokens
from zonerelay.operations.answers import DeliveryRow, OrderGiven, OrdersEnded
from zonerelay.operations.requests import QueueList


@pytest.mark.proof
async def test_what_was_suspended_waits_through_kill_9_and_leaves_once(tmp_path: Path, sink: Sink) -> None:
    """A sender and a zone are suspended one after the other, in both workers, while mail comes in."""
    with relay_of(tmp_path, sink.port) as relay:
        await AT_ONCE(until_running, relay)
        answer = await AT_ONCE(
            run, relay, "suspend", "--sender", "*@example.org", "--reason", "too much", "--json"
        )
        sender = msgspec.json.decode(answer.stdout, type=OrderGiven).order
        assert (sender.reason, sender.until) == ("too much", None)
        client = Submitter(relay.smtp_port, prefix="first")
        await client.run(8, 40)

        def held() -> bool:
            return sum(zone.held for zone in status(relay).zones) == 40

        await AT_ONCE(relay.wait_for, held, what="all mail is held")
        assert await AT_ONCE(relay.metric, "zonerelay_orders", effect="suspend") == 1
        assert len({event["id"][-2:] for event in relay.events("held")}) == 2, "both workers took mail"
        answer = await AT_ONCE(
            run, relay, "suspend", "--zone", "default", "--reason", "repairs", "--for", "1h"
        )
        assert answer.returncode == 0, answer.stderr
        submitting = asyncio.create_task(Submitter(relay.smtp_port, prefix="second").run(8, 100))
        await asyncio.sleep(0.3)
        for pid in [await AT_ONCE(pid_of, relay, worker) for worker in (0, 1)]:
            os.kill(pid, signal.SIGKILL)
        await AT_ONCE(relay.kill)
        await asyncio.wait({submitting})
        await AT_ONCE(relay.restart)
        await AT_ONCE(until_running, relay)
        shown = await AT_ONCE(run, relay, "status")
        assert "repairs" in shown.stdout
        assert "too much" in shown.stdout
        queue = await AT_ONCE(lambda: list(client_of(relay).stream(QueueList(limit=0))))
        rows = [each for each in queue if isinstance(each, DeliveryRow)]
        assert len(rows) > 40
        assert all(row.order for row in rows)
        assert sink.messages == []
        assert (await AT_ONCE(run, relay, "resume", "--zone", "default")).returncode == 0
        await AT_ONCE(
            relay.wait_for, lambda: sum(z.held for z in status(relay).zones) == len(rows), what="held"
        )
        answer = await AT_ONCE(run, relay, "resume", sender.id, "--json")
        assert msgspec.json.decode(answer.stdout, type=OrdersEnded).released == len(rows)
        await AT_ONCE(relay.wait_until_empty)
        assert (await AT_ONCE(run, relay, "resume", sender.id)).returncode == 1
        found = tokens(sink.messages)
        assert client.acknowledged <= found.keys()
        assert set(found.values()) == {1}, "each was sent once"
