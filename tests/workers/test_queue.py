"""How rows are claimed, kept and given back: one relay, two, a dead one, one that was only slow."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Literal

import pytest

from tests.support.outbox import OutboxBed, outbox_of, to_sink
from tests.support.relay import Running
from tests.support.sink import Sink
from zonerelay.model.delivery import DeliveryKey, queue_of
from zonerelay.model.envelope import Priority
from zonerelay.outbox.database.sql import OutboxStatements
from zonerelay.outbox.database.tables import TableNames
from zonerelay.outbox.rows import claims
from zonerelay.outbox.rows.claims import OutboxClaims

LIMIT = 10


async def test_select_for_update_skip_locked(bed: OutboxBed, sink: Sink) -> None:
    """Two workers that claim at the same time never have the same row, at most as many as they asked for, and
    do not wait for a row that somebody has locked.
    """
    async with bed.relay(to_sink(sink.port)):
        pass  # makes the tables
    rows = [bed.insert() for _ in range(25)]
    later = bed.insert(next_retry_at="tomorrow")
    past = bed.insert(next_retry_at="yesterday")
    statement = OutboxStatements(TableNames(bed.schema, "outbound_messages", "mailboxes"))
    links = [await bed.link() for _ in range(3)]
    sessions = [
        (await link.fetch(statement.register, f"worker {n}", 60.0))[0][0] for n, link in enumerate(links)
    ]
    async with links[2].transaction() as fetch:
        await fetch("SELECT id FROM outbound_messages WHERE id = $1 FOR UPDATE", rows[0])
        async with asyncio.timeout(5):
            claimed = await asyncio.gather(
                *(
                    link.fetch(statement.claim, LIMIT, s, [], "default", False)
                    for link, s in zip(links[:2], sessions, strict=False)
                )
            )
    had = [row[0] for some in claimed for row in some]
    assert [len(some) for some in claimed] == [LIMIT, LIMIT]
    assert len(set(had)) == 2 * LIMIT
    assert rows[0] not in had
    rest = await links[0].fetch(statement.claim, 100, sessions[0], [], "default", False)
    assert {row[0] for row in rest} | set(had) == {*rows, past}
    assert bed.row(later)["status"] == "queued"
    assert bed.row(past)["status"] == "processing"
    for link in links:
        await link.close()


async def test_two_relays_share_the_rows(bed: OutboxBed, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "MOST", 40)
    monkeypatch.setattr(claims, "BATCH", 20)
    zone = to_sink(sink.port)
    async with bed.relay(zone) as first, bed.relay(zone, name="second") as second:
        bed.psql(
            "INSERT INTO outbound_messages (from_address, to_addresses, subject)"
            " SELECT 'app@example.org', ARRAY['user' || i || '@example.com'], 's'"
            " FROM generate_series(1, 300) i"
        )
        await first.until(lambda: len(sink.messages) >= 300, what="all of them")
        await first.until(
            lambda: bed.psql("SELECT count(*) FROM outbound_messages WHERE status <> 'sent'") == "0",
            what="sent",
        )
        assert len({message.recipients for message in sink.messages}) == len(sink.messages) == 300
        assert first.log.named("delivered")
        assert second.log.named("delivered")


async def test_an_insert_is_heard_of_at_its_commit_and_not_before(bed: OutboxBed, sink: Sink) -> None:
    async with bed.relay(to_sink(sink.port)) as running:  # it looks by itself once a minute
        link = await bed.link()
        async with link.transaction() as fetch:
            await fetch(
                "INSERT INTO outbound_messages (from_address, to_addresses)"
                " VALUES ('app@example.org', '{someone@example.com}')"
            )
            await asyncio.sleep(0.2)
            assert not sink.messages
        async with asyncio.timeout(2):
            await sink.wait_for(1)
        await link.close()
        await running.until_logged("delivered")


async def test_a_row_that_comes_due_is_sent_without_being_looked_for(bed: OutboxBed, sink: Sink) -> None:
    async with bed.relay(to_sink(sink.port)) as running:
        soon = bed.psql("SELECT clock_timestamp() + interval '0.5 seconds'")
        row = bed.insert(next_retry_at=soon)
        found = await bed.until(running, row, "sent", timeout=3)
        assert str(found["sent_at"]) > soon.replace(" ", "T")


async def test_rows_of_a_relay_that_is_gone_go_back_after_its_lease(bed: OutboxBed, sink: Sink) -> None:
    async with bed.relay(to_sink(sink.port), outbox={"lease": 1.2}) as running:
        row = bed.insert(next_retry_at="infinity")
        bed.psql(
            "INSERT INTO outbound_messages_relays"
            " VALUES (gen_random_uuid(), 'dead', now() + interval '0.5 s');"
            " UPDATE outbound_messages SET status = 'processing', claim_token = gen_random_uuid(),"
            " next_retry_at = NULL,"
            " claimed_by = (SELECT session FROM outbound_messages_relays WHERE name = 'dead')"
        )
        assert not sink.messages
        await bed.until(running, row, "sent", timeout=4)
        assert "zonerelay_outbox_reaped_total 1.0" in running.worker.metrics.exposition().decode()


async def test_a_relay_that_lost_its_claim_changes_nothing(bed: OutboxBed, sink: Sink) -> None:
    async with bed.relay(to_sink(sink.port)) as running:
        row = await bed.until_slow(running, sink)
        bed.psql(
            "UPDATE outbound_messages SET claim_token = gen_random_uuid(), claimed_by ="
            f" (SELECT session FROM outbound_messages_relays) WHERE id = {row}"
        )
        await running.until_logged("delivered")
        await asyncio.sleep(0.1)
        found = bed.row(row)
        assert (found["status"], found["attempts"], found["sent_at"]) == ("processing", 0, None)


async def test_a_full_zone_leaves_room(bed: OutboxBed, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims, "SHARE", 4)
    monkeypatch.setattr(claims, "BATCH", 3)
    monkeypatch.setattr(claims, "FEW", 2)
    async with bed.relay(to_sink(sink.port, max_connections=1)) as running:
        mailbox = bed.mailbox(sink.port, password=None, smtp_tls="none")
        slow = [bed.insert(to_addresses=[f"slow-1s+{n}@example.com"]) for n in range(8)]
        quick = bed.insert(mailbox_id=mailbox)
        await bed.until(running, quick, "sent", timeout=3)
        assert [bed.row(each)["status"] for each in slow].count("queued") >= 2


async def test_the_relay_takes_up_its_rows_when_the_database_is_back(bed: OutboxBed, sink: Sink) -> None:
    async with bed.relay(to_sink(sink.port)) as running:
        row = await bed.until_slow(running, sink)
        bed.psql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'zonerelay outbox'"
        )
        await running.send("app@example.org", ["other@example.com"], b"Subject: x\r\n\r\nx\r\n")
        assert (await bed.until(running, row, "sent"))["attempts"] == 1
        assert len([m for m in sink.messages if "slow-1s@example.com" in m.recipients]) == 1
        bed.insert()
        await sink.wait_for(3)


async def test_operators_see_rows_hold_them_and_let_them_go(bed: OutboxBed, sink: Sink) -> None:
    from zonerelay.control.client import ControlClient
    from zonerelay.control.socket import control_socket_path
    from zonerelay.operations.answers import ChangeResult
    from zonerelay.operations.requests import CHANGES

    async with bed.relay(to_sink(sink.port)) as running:
        row = bed.insert(to_addresses=["defer-451@example.com", "a@example.com"])
        await bed.until(running, row, "queued")
        await running.until_logged("deferred")
        client = ControlClient(control_socket_path(running.worker.settings))

        async def change(action: Literal["hold", "release", "drop"]) -> ChangeResult:
            return await asyncio.to_thread(client.ask, CHANGES[action](everything=True), ChangeResult)

        await bed.until(running, row, "queued")
        assert (await change("hold")).changed == 1
        assert bed.row(row)["next_retry_at"] == "infinity"
        assert (await change("release")).changed == 1
        await running.until_logged("deferred", 2)
        await bed.until(running, row, "queued")
        assert (await change("drop")).changed == 1
        found = bed.row(row)
        assert found["status"] == "failed"
        assert "dropped by the operator" in str(found["error_log"])
        assert [message.recipients for message in sink.messages] == [("a@example.com",)]


# Mailboxes whose servers are slow, and rows of different priority: who waits for whom


SLOW = 4
ROWS = 500


class Tarpit:
    """Takes connections and says nothing for as long as it is there."""

    def __init__(self) -> None:
        self.port = 0
        self.taken = 0
        self._server: asyncio.Server | None = None
        self._over = asyncio.Event()

    async def __aenter__(self) -> "Tarpit":
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
    return outbox_of(running).claims


@pytest.mark.proof
async def test_pages_of_the_queue_have_each_recipient_of_a_row_once(bed: OutboxBed, sink: Sink) -> None:
    people = [f"{name}@example.com" for name in ("c", "a", "d", "b")]
    async with bed.relay(to_sink(sink.port)) as running:
        for _ in range(2):
            bed.insert(to_addresses=people, next_retry_at="tomorrow")
        found: list[DeliveryKey] = []
        for _ in range(2 * len(people)):
            async with aclosing(outbox_of(running).scan(after=found[-1] if found else None)) as rest:
                found.append((await anext(rest)).key)
        assert sorted(set(found)) == found
        assert len(found) == 2 * len(people)


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
        await bed.until_slow(running, sink)
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


# The database goes away while mail is under way


@asynccontextmanager
async def cut_off(bed: OutboxBed, running: Running) -> AsyncIterator[None]:
    """The relay's role may not log in, and its connections have ended."""
    bed.psql(f"ALTER ROLE {bed.role} NOLOGIN")
    bed.psql(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{bed.role}'")
    keeper = outbox_of(running).keeper
    await running.until(lambda: not keeper.usable, what="trouble")
    try:
        yield
    finally:
        bed.psql(f"ALTER ROLE {bed.role} LOGIN")


async def test_what_is_sent_after_the_lease_has_lapsed_waits_for_no_retry(bed: OutboxBed, sink: Sink) -> None:
    """It was ours all the time, for nobody has taken it over. What is being sent is broken off, too."""
    async with bed.relay(to_sink(sink.port, max_connections=1)) as running:
        first = await bed.until_slow(running, sink)
        row = bed.insert()
        store, held = outbox_of(running), claims_of(running)
        await running.until(lambda: len(held._attempted(held.rows.values())) == 2, what="handed out")
        store.keeper._held_until = float("-inf")  # as after a standstill
        await running.until(lambda: not held._attempted(held.rows.values()), what="given back")
        assert not sink.messages
        assert store.keeper._control is not None
        await store.keeper._renew(store.keeper._control)
        for each in (first, row):
            assert (await bed.until(running, each, "sent", timeout=4))["attempts"] == 1
    assert len(sink.messages) == 2


async def test_a_row_whose_reading_the_connection_ends_waits_for_no_retry(bed: OutboxBed, sink: Sink) -> None:
    reading = "FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%attachments::text), 0)%'"
    async with bed.relay(to_sink(sink.port, max_connections=1)) as running:
        first = await bed.until_slow(running, sink)
        large = bed.insert(text_body="x" * 20_000)
        await running.until(lambda: bed.row(large)["status"] == "processing", what="claimed")
        link = await bed.link()
        async with link.transaction() as fetch:
            await fetch("LOCK TABLE outbound_messages")
            await running.until(lambda: bed.psql(f"SELECT count(*) {reading}") == "1", what="reading")
            bed.psql(f"SELECT pg_terminate_backend(pid) {reading}")
        await link.close()
        for each in (first, large):
            assert (await bed.until(running, each, "sent", timeout=4))["attempts"] == 1
    assert len(sink.messages) == 2


async def test_a_claim_whose_answer_was_lost_does_not_wait_for_ever(bed: OutboxBed, sink: Sink) -> None:
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


async def test_a_row_that_is_queued_again_while_it_is_sent_goes_once(bed: OutboxBed, sink: Sink) -> None:
    async with bed.relay(to_sink(sink.port)) as running:
        row = await bed.until_slow(running, sink)
        bed.psql(
            "UPDATE outbound_messages SET status = 'queued', claimed_by = NULL, claim_token = NULL"
            " WHERE status = 'processing'"
        )
        outbox_of(running).claims.look()
        await bed.until(running, row, "sent", timeout=4)
        claims = outbox_of(running).claims
        await running.until(lambda: not claims.rows and not claims._window.queues, what="forgotten")
    assert len(sink.messages) == 1


async def test_a_row_that_is_deleted_while_it_waits_is_forgotten(bed: OutboxBed, sink: Sink) -> None:
    async with bed.relay(to_sink(sink.port, max_connections=1)) as running:
        await bed.until_slow(running, sink)
        large = bed.insert(text_body="x" * 20_000)
        await running.until(lambda: bed.row(large)["status"] == "processing", what="claimed")
        bed.psql(f"DELETE FROM outbound_messages WHERE id = {large}")
        after = bed.insert()
        await bed.until(running, after, "sent")
        await running.until(lambda: not claims_of(running).rows, what="forgotten")
        assert not claims_of(running)._lost
    assert len(sink.messages) == 2
