"""Rows become mail: what is sent, through which server, with which log-in, and what fails at once."""

import asyncio
import base64
import email.policy
import json

from tests.support.outbox import OutboxBed, outbox_of, to_sink
from tests.support.sink import Sink
from tests.support.smarthost import SMARTHOST_PASSWORD, Smarthost

SQUARE = "{{a@example.com,b@example.com},{c@example.com,d@example.com}}"
"""An array of two dimensions: it cannot be joined to one of one."""
WRONG: list[tuple[dict[str, object], str]] = [
    ({"to_addresses": []}, "cc_addresses and bcc_addresses contain no recipient"),
    ({"to_addresses": ["nobody"]}, "to_addresses contains no address"),
    ({"to_addresses": SQUARE}, "to_addresses must be a one-dimensional list"),
    (
        {"to_addresses": SQUARE, "cc_addresses": ["a@example.com"]},
        "to_addresses must be a one-dimensional list",
    ),
    ({"to_addresses": ["a@example.com>\r\nRCPT TO:<b@example.com"]}, "to_addresses contains a line end"),
    ({"from_address": None}, "from_address contains no address"),
    ({"subject": "x\nBcc: b@example.com"}, "subject contains a line end"),
    ({"headers": {"X-A": "x\r\nBcc: b@example.com"}}, "headers: X-A contains a line end"),
    ({"headers": {"X-A: b\r\nBcc": "b@example.com"}}, "headers contains an invalid field name"),
    ({"headers": {"bcc": "b@example.com"}}, "headers must not contain"),
    ({"attachments": '[{"content": "%%%"}]'}, "attachments[0].content is not base64"),
    ({"zone": "nowhere"}, "the zone of the row is not configured"),
    ({"zone": "x" * 50_000}, "the zone of the row is not configured"),
    ({"zone": "mailbox/77"}, "the zone of the row is not configured"),
    ({"zone": "default;high"}, "the zone of the row is not configured"),
    ({"created_at": "infinity"}, "created_at is missing or out of range"),
    ({"created_at": "20000-01-01"}, "created_at is missing or out of range"),
    ({"mailbox_id": None, "text_body": "x" * 3000}, "max_message_size"),
    ({"to_addresses": [f"{'a' * 60}{n}@example.com" for n in range(1001)]}, "more than 1000 recipients"),
]


async def test_successful_smtp_dispatch(bed: OutboxBed, smarthost: Smarthost) -> None:
    """By STARTTLS and with the log-in of the row's mailbox, whose password is encrypted in the database."""
    async with bed.relay() as running:
        row = bed.insert(mailbox_id=bed.mailbox(smarthost.port), from_address=None)
        found = await bed.until(running, row, "sent")
        assert (found["attempts"], found["error_log"], found["next_retry_at"]) == (1, None, None)
        assert found["claimed_by"] is found["claim_token"] is None
        assert found["sent_at"] is not None
        assert smarthost.logins == [("PLAIN", "relay", 235)]
        assert smarthost.submitters == ["relay"]
        assert "STARTTLS" in smarthost.commands
        assert "MAIL FROM:<box@example.org>" in [line.partition(" SIZE")[0] for line in smarthost.commands]
        assert b"From: box@example.org\r\n" in smarthost.messages[0].body
        labels = running.worker.metrics.exposition().decode()
        assert 'zonerelay_deliveries_total{outcome="delivered",zone="mailbox"} 1.0' in labels
        assert "mailbox/" not in labels


async def test_mime_multipart_construction(bed: OutboxBed, sink: Sink) -> None:
    async with bed.relay(to_sink(sink.port)) as running:
        row = bed.insert(
            from_address="Häuptling <app@example.org>",
            to_addresses=['"Doe, Jane" <jane@example.com>', "bob@bücher.example"],
            cc_addresses=["cc@example.com"],
            bcc_addresses=["hidden@example.com"],
            subject="Grüße aus dem Büro",
            text_body="Hallo,\n.\nWelt – ok\n",
            html_body="<p>Hallo <b>Welt</b></p>",
            headers={"Reply-To": "Antwort <answer@example.org>", "X-Campaign": "spring"},
            attachments=json.dumps(
                [
                    {
                        "filename": "Übersicht.pdf",
                        "content_type": "application/pdf",
                        "content": base64.b64encode(b"%PDF\0" * 100).decode(),
                    }
                ]
            ),
        )
        await bed.until(running, row, "sent")
    (sent,) = sink.messages
    assert set(sent.recipients) == {
        *("jane@example.com", "bob@xn--bcher-kva.example", "cc@example.com", "hidden@example.com")
    }
    parsed = email.message_from_bytes(sent.body, policy=email.policy.default)
    assert parsed.get_content_type() == "multipart/mixed"
    alternative, attached = parsed.iter_parts()
    assert alternative.get_content_type() == "multipart/alternative"
    plain, html = alternative.iter_parts()
    assert [plain.get_content_type(), html.get_content_type()] == ["text/plain", "text/html"]
    assert plain.get_content().replace("\r\n", "\n") == "Hallo,\n.\nWelt – ok\n"
    assert html.get_content().replace("\r\n", "\n") == "<p>Hallo <b>Welt</b></p>\n"
    assert (attached.get_filename(), attached.get_content()) == ("Übersicht.pdf", b"%PDF\0" * 100)
    assert parsed["subject"] == "Grüße aus dem Büro"
    assert parsed["from"] == "Häuptling <app@example.org>"
    assert parsed["to"] == '"Doe, Jane" <jane@example.com>, bob@xn--bcher-kva.example'
    assert (parsed["cc"], parsed["reply-to"]) == ("cc@example.com", "Antwort <answer@example.org>")
    assert parsed["bcc"] is None
    assert b"hidden" not in sent.body
    assert (parsed["mime-version"], parsed["x-campaign"]) == ("1.0", "spring")
    assert parsed["message-id"].endswith("@example.org>")
    assert not parsed.defects
    assert sent.body.isascii()


async def test_who_has_a_message_is_not_sent_it_again(bed: OutboxBed, sink: Sink) -> None:
    async with bed.relay(to_sink(sink.port)) as running:
        row = bed.insert(to_addresses=["a@example.com", "greylist@example.com", "reject-550@example.com"])
        await running.until_logged("deferred")
        found = await bed.until(running, row, "queued")
        assert 50 < bed.retry_in(row) <= 60
        bed.psql("UPDATE outbound_messages SET next_retry_at = now()")
        found = await bed.until(running, row, "queued")
        outbox_of(running).claims.look()
        found = await bed.until(running, row, "failed")
    assert sink.recipients() == [*("a@example.com", "greylist@example.com")]
    assert {message.body for message in sink.messages} == {sink.messages[0].body}
    assert str(found["error_log"]).count("\n") == 0
    assert "550 5.0.0 as requested by the address" in str(found["error_log"])


async def test_wrong_rows_fail_at_once_and_hinder_nobody(bed: OutboxBed, sink: Sink) -> None:
    async with bed.relay(to_sink(sink.port), outbox={"max_message_size": 2048}) as running:
        rows = [bed.insert(**columns) for columns, _ in WRONG]
        good = bed.insert()
        await bed.until(running, good, "sent")
        for row, (_, words) in zip(rows, WRONG, strict=True):
            found = await bed.until(running, row, "failed")
            assert words in str(found["error_log"])
            assert "b@example.com" not in str(found["error_log"])
        assert [message.recipients for message in sink.messages] == [("someone@example.com",)]
        bed.insert(zone="alice@example.com", next_retry_at="tomorrow")
        reader = outbox_of(running).reader
        await reader.count()
        assert "alice@example.com" not in {queue.text for queue in reader.counts}  # it would be a label


async def test_odd_rows_are_sent_all_the_same(bed: OutboxBed, sink: Sink) -> None:
    """States that no relay has written, the first moment of all, a zone that is empty, a recipient twice."""
    async with bed.relay(to_sink(sink.port)) as running:
        state = """{"someone@example.com": {"code": 99999, "attempts": -5, "done": "sent"}}"""
        for columns in (
            {"recipient_state": state},
            {"recipient_state": "[]"},
            {"created_at": "1970-01-01 00:00:00+00"},
            {"zone": ""},
            {"to_addresses": ["a@example.com", "a@example.com"], "cc_addresses": []},
        ):
            await bed.until(running, bed.insert(**columns), "sent", timeout=3)
    assert len(sink.messages) == 5


async def test_a_mailbox_that_is_deleted_sends_nothing_more(bed: OutboxBed, sink: Sink) -> None:
    async with bed.relay(outbox={"poll_interval": 0.2}) as running:
        mailbox = bed.mailbox(sink.port, password=None, smtp_tls="none")
        await bed.until(running, bed.insert(mailbox_id=mailbox), "sent")
        # Not on the event loop: the relay may be in the middle of a statement that locks the table.
        await asyncio.to_thread(
            bed.psql,
            "ALTER TABLE outbound_messages DROP CONSTRAINT outbound_messages_mailbox_id_fkey;"
            " DELETE FROM mailboxes",
        )
        await asyncio.sleep(0.5)
        found = await bed.until(running, bed.insert(mailbox_id=mailbox), "failed")
        assert found["error_log"] == "no mailbox has this mailbox_id"
    assert len(sink.messages) == 1


async def test_a_wrong_password_makes_mail_wait_for_another(bed: OutboxBed, smarthost: Smarthost) -> None:
    async with bed.relay(outbox={"poll_interval": 0.2}) as running:
        mailbox = bed.mailbox(smarthost.port, password="wrong")
        row = bed.insert(mailbox_id=mailbox)
        await running.until_logged("login-refused")
        found = await bed.until(running, row, "queued")
        assert "535 5.7.8 no such user or password" in str(found["error_log"])
        assert found["attempts"] == 0
        assert any("cannot log in" in each for each in running.worker.all_problems())
        sealed = bed.sealed(SMARTHOST_PASSWORD, smarthost.port)
        bed.psql(f"UPDATE mailboxes SET smtp_password_encrypted = '{sealed}'")
        await asyncio.sleep(0.4)
        bed.psql("UPDATE outbound_messages SET next_retry_at = NULL")
        await bed.until(running, row, "sent")
        assert smarthost.logins == [("PLAIN", "relay", 535), ("PLAIN", "relay", 235)]


async def test_a_password_that_cannot_be_opened_makes_mail_wait(bed: OutboxBed, smarthost: Smarthost) -> None:
    async with bed.relay() as running:
        sealed = bed.sealed(SMARTHOST_PASSWORD, smarthost.port, key=b"x" * 32)
        other_server = bed.sealed(SMARTHOST_PASSWORD, smarthost.port + 1)
        rows = [
            bed.insert(mailbox_id=bed.mailbox(smarthost.port, smtp_password_encrypted=each))
            for each in (sealed, other_server)
        ]
        await running.until_logged("login-broken", 2)
        for row in rows:
            found = await bed.until(running, row, "queued")
            assert "cannot be decrypted" in str(found["error_log"])
        assert smarthost.logins == []
