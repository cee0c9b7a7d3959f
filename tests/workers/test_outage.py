"""The database goes away while mail is under way: nothing is lost, and nothing waits longer than it must."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.support.outbox import OutboxBed, to_sink
from tests.support.relay import Running
from tests.support.sink import Sink


@asynccontextmanager
async def cut_off(bed: OutboxBed, running: Running) -> AsyncIterator[None]:
    """The relay's role may not log in, and its connections have ended."""
    bed.psql(f"ALTER ROLE {bed.role} NOLOGIN")
    bed.psql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{bed.role}'")
    keeper = running.worker.parts.queue.outbox.keeper  # type: ignore[union-attr]  # what the relay knows of it
    await running.until(lambda: not keeper.usable, what="trouble")
    try:
        yield
    finally:
        bed.psql(f"ALTER ROLE {bed.role} LOGIN")


async def test_what_is_to_be_sent_after_the_lease_has_lapsed_waits_for_the_lease_and_for_no_retry(
    bed: OutboxBed, sink: Sink
) -> None:
    """It was ours all the time, for nobody has taken it over. What is being sent is broken off, too."""
    async with bed.relay(to_sink(sink.port, max_connections=1)) as running:
        first = bed.insert(to_addresses=["slow-1s@example.com"])
        await running.until(lambda: any("slow-1s" in each for each in sink.commands), what="sending")
        row = bed.insert()
        store = running.worker.parts.queue.outbox  # what waits for the first
        assert store is not None
        await running.until(lambda: len(store._handed) == 2, what="handed out")
        store.keeper._held_until = float("-inf")  # as after a standstill
        await running.until(lambda: not store._handed, what="given back")
        assert not sink.messages
        await store.keeper._renew()
        for each in (first, row):
            assert (await bed.until(running, each, "sent", timeout=4))["attempts"] == 1
    assert len(sink.messages) == 2


async def test_a_claim_whose_answer_was_lost_with_the_connection_does_not_wait_for_ever(
    bed: OutboxBed, sink: Sink
) -> None:
    """The database has committed it, the relay does not know: the row is ours, and nobody works on it."""
    async with bed.relay(to_sink(sink.port)) as running:
        row = bed.insert(next_retry_at="infinity")
        bed.psql(
            "UPDATE outbound_messages SET status = 'processing', next_retry_at = NULL,"
            " claim_token = gen_random_uuid(), claimed_by = (SELECT session FROM outbound_messages_relays)"
        )
        async with cut_off(bed, running):
            assert not sink.messages
        await bed.until(running, row, "sent", timeout=4)


async def test_a_row_that_is_queued_again_while_it_is_sent_is_not_sent_twice(
    bed: OutboxBed, sink: Sink
) -> None:
    async with bed.relay(to_sink(sink.port)) as running:
        row = bed.insert(to_addresses=["slow-1s@example.com"])
        await running.until(lambda: any("slow-1s" in each for each in sink.commands), what="sending")
        bed.psql(
            "UPDATE outbound_messages SET status = 'queued', claimed_by = NULL, claim_token = NULL"
            " WHERE status = 'processing'"
        )
        running.worker.parts.queue.outbox.claims.look()  # type: ignore[union-attr]  # as the next poll does
        await bed.until(running, row, "sent", timeout=4)
        claims = running.worker.parts.queue.outbox.claims  # type: ignore[union-attr]  # nothing is left
        await running.until(lambda: not claims.rows and not claims._window.queues, what="forgotten")
    assert len(sink.messages) == 1


async def test_a_row_that_is_deleted_while_it_waits_is_forgotten(bed: OutboxBed, sink: Sink) -> None:
    async with bed.relay(to_sink(sink.port, max_connections=1)) as running:
        bed.insert(to_addresses=["slow-1s@example.com"])
        await running.until(lambda: any("slow-1s" in each for each in sink.commands), what="sending")
        large = bed.insert(text_body="x" * 20_000)
        await running.until(lambda: bed.row(large)["status"] == "processing", what="claimed")
        bed.psql(f"DELETE FROM outbound_messages WHERE id = {large}")
        after = bed.insert()
        await bed.until(running, after, "sent")
        store = running.worker.parts.queue.outbox  # nothing is left
        assert store is not None
        await running.until(lambda: not store.claims.rows, what="forgotten")
        assert not store._lost
        assert not store._handed
    assert len(sink.messages) == 2
