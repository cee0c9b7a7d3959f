"""What a failed attempt does to a row: when it is tried again, when it has failed, what is written of it."""

import asyncio
import re

from tests.support.outbox import OutboxBed, to_sink
from tests.support.ports import free_port
from tests.support.sink import Sink

HIDDEN = r"<redacted:u-[a-z2-7]{13}@d-[a-z2-7]{13}>"


async def test_failed_smtp_call_updates_next_retry(bed: OutboxBed, sink: Sink) -> None:
    """n² minutes after the n-th failed attempt, by the database's clock; the tenth ends it."""
    async with bed.relay(to_sink(sink.port), outbox={"poll_interval": 0.1}) as running:
        row = bed.insert(to_addresses=["defer-451@example.com"])
        for attempts in (1, 2, 3):
            await running.until_logged("deferred", attempts)
            found = await bed.until(running, row, "queued")
            assert found["attempts"] == attempts
            assert 60 * attempts**2 - 5 < bed.retry_in(row) <= 60 * attempts**2
            assert "451 4.0.0 as requested by the address" in str(found["error_log"])
            if attempts < 3:
                bed.psql("UPDATE outbound_messages SET next_retry_at = NULL")
        bed.psql(
            "UPDATE outbound_messages SET next_retry_at = NULL, attempts = 9,"
            """ recipient_state = '{"defer-451@example.com": {"attempts": 9}}'"""
        )
        found = await bed.until(running, row, "failed")
        assert (found["attempts"], found["next_retry_at"], found["sent_at"]) == (10, None, None)
        assert "after 10 attempts" in str(found["error_log"])
        assert not sink.messages


async def test_5xx_fails_at_once_and_no_address_is_in_the_error_log(bed: OutboxBed, sink: Sink) -> None:
    sink.script = lambda verb, argument: (
        f"550 5.1.1 {argument.partition(':')[2]} user unknown" if verb == "RCPT" else None
    )
    async with bed.relay(to_sink(sink.port)) as running:
        row = bed.insert(to_addresses=["alice@example.com"], bcc_addresses=["bob@example.com"])
        found = await bed.until(running, row, "failed")
        assert found["attempts"] == 1
        lines = str(found["error_log"]).splitlines()
        assert len(lines) == 2
        for at, line in enumerate(lines, 1):
            wanted = rf"{HIDDEN} \(recipient {at} of 2\) failed.*550 5.1.1 {HIDDEN} user unknown"
            assert re.fullmatch(wanted, line), line
        assert "alice" not in str(found["error_log"]) + str(found["recipient_state"]["alice@example.com"])  # type: ignore[index]
        # The row is the report: nobody is sent another.
        assert not running.log.named("dsn")
        assert {each["reason"] for each in running.log.named("no-dsn")} == {"outbox"}


async def test_a_server_that_cannot_be_reached_is_tried_again(bed: OutboxBed) -> None:
    async with bed.relay() as running:
        mailbox = bed.mailbox(free_port(), password=None, smtp_tls="none")
        row = bed.insert(mailbox_id=mailbox)
        await running.until_logged("deferred")
        found = await bed.until(running, row, "queued")
        assert "refused" in str(found["error_log"])
        assert bed.retry_in(row) > 10
        await asyncio.sleep(0)


async def test_a_failed_row_queued_again_goes_to_those_without_it(bed: OutboxBed, sink: Sink) -> None:
    refused = True
    sink.script = lambda verb, argument: (
        "550 5.1.1 no" if refused and verb == "RCPT" and "b@" in argument else None
    )
    async with bed.relay(to_sink(sink.port)) as running:
        row = bed.insert(to_addresses=["a@example.com", "b@example.com"])
        await bed.until(running, row, "failed")
        refused = False
        bed.psql("UPDATE outbound_messages SET status = 'queued', attempts = 0, error_log = NULL")
        await bed.until(running, row, "sent", timeout=3)
    assert [message.recipients for message in sink.messages] == [("a@example.com",), ("b@example.com",)]
