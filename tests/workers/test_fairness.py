"""Mailboxes whose servers are slow, and rows of different priority: who waits for whom."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.outbox import OutboxBed, to_sink
from tests.support.relay import Running
from tests.support.sink import Sink
from zonerelay.model.queue_name import Priority, queue_of
from zonerelay.outbox.rows import claims
from zonerelay.outbox.rows.claims import OutboxClaims

SLOW = 4
ROWS = 500


class Tarpit:
    """Takes connections and says nothing for as long as it is there."""

    def __init__(self) -> None:
        self.port = 0
        self.taken = 0
        self._server: asyncio.Server | None = None
        self._over = asyncio.Event()

    async def __aenter__(self) -> Tarpit:
        self._server = await asyncio.start_server(self._hold, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def _hold(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.taken += 1
        await self._over.wait()
        writer.transport.abort()

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self._over.set()


def claims_of(running: Running) -> OutboxClaims:
    return running.worker.parts.queue.outbox.claims  # type: ignore[union-attr]  # what it has at hand


@pytest.mark.proof
async def test_slow_mailboxes_do_not_hold_up_the_rows_of_another_one(bed: OutboxBed, sink: Sink) -> None:
    async with Tarpit() as tarpit, bed.relay() as running:
        slow = [bed.mailbox(tarpit.port, password=None, smtp_tls="none") for _ in range(SLOW)]
        for mailbox in slow:
            bed.psql(
                "INSERT INTO outbound_messages (to_addresses, mailbox_id, subject) SELECT"
                f" ARRAY['a' || i || '@example.com'], {mailbox}, 'x' FROM generate_series(1, {ROWS}) i"
            )
        await running.until(lambda: tarpit.taken == 5 * SLOW, what="all connections are taken")
        quick = bed.mailbox(sink.port, password=None, smtp_tls="none")
        for _ in range(3):
            row = bed.insert(mailbox_id=quick)
            await bed.until(running, row, "sent", timeout=3)
        assert all(queue_of(f"mailbox/{each}") in claims_of(running)._window.queues for each in slow)
        assert len(claims_of(running).rows) > 1000


async def test_an_urgent_row_goes_before_a_long_run_of_bulk_mail(
    bed: OutboxBed, sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is claimed although bulk mail has its share already, and sent next although bulk mail was first."""
    monkeypatch.setattr(claims, "SHARE", 4)
    monkeypatch.setattr(claims, "FEW", 2)
    async with bed.relay(to_sink(sink.port, max_connections=1)) as running:
        bed.insert(to_addresses=["slow-1s@example.com"])
        await running.until(lambda: any("slow-1s" in each for each in sink.commands), what="sending")
        bed.psql(
            "INSERT INTO outbound_messages (from_address, to_addresses, priority)"
            " SELECT 'a@b.example', ARRAY['bulk@example.com'], 'bulk' FROM generate_series(1, 12)"
        )
        await running.until(
            lambda: queue_of("default", Priority.BULK) in claims_of(running)._window.queues,
            what="bulk mail is claimed",
        )
        normal = bed.insert(to_addresses=["normal@example.com"], priority="normal")
        high = bed.insert(to_addresses=["high@example.com"], priority="high")
        await running.until(
            lambda: queue_of("default", Priority.HIGH) in claims_of(running)._window.queues, what="claimed"
        )
        for row in (high, normal):
            await bed.until(running, row, "sent", timeout=4)
        await running.until(lambda: len(sink.messages) == 15, what="all of it is sent")
    order = [message.recipients[0].partition("@")[0] for message in sink.messages]
    assert order.index("high") < order.index("normal") < 5
