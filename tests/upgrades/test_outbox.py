"""Tables of an outbox that older releases have made, with their rows."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.support.outbox import KEY, LOOPBACK, OutboxBed, to_sink
from tests.support.sink import Sink
from tests.upgrades import fixtures, outbox
from tests.upgrades.engines import Records, read_schema
from tests.upgrades.test_guard import compare
from zonerelay.outbox.database.passwords import unseal

FILES = sorted(fixtures.DIRECTORY.glob(f"*/{outbox.FILE}"))


@pytest.fixture(params=FILES, ids=lambda path: path.parent.name)
def restored(request: pytest.FixtureRequest, bed: OutboxBed) -> OutboxBed:
    outbox.restore(request.param.read_bytes(), bed)
    return bed


async def test_rows_are_sent_to_those_who_have_not_got_them(restored: OutboxBed, sink: Sink) -> None:
    restored.psql("UPDATE outbound_messages SET next_retry_at = NULL")
    async with restored.relay(to_sink(sink.port)) as running:
        await restored.until(running, 3, "sent")
        await restored.until(running, 4, "sent")
    assert [restored.row(row)["status"] for row in range(1, 6)] == [
        "sent",
        "failed",
        "sent",
        "sent",
        "failed",
    ]
    sent = sink.recipients()
    assert sent == ["blind@example.com", "copy@example.com", "later@example.com", "someone@example.com"]
    whole = next(message.body for message in sink.messages if b"X-Campaign: spring" in message.body)
    assert b"aGVsbG8=" in whole
    assert b"<p>hello</p>" in whole
    sealed = restored.psql("SELECT smtp_password_encrypted FROM mailboxes")
    assert unseal(sealed, (KEY,), host=LOOPBACK, port=outbox.PORT, user="relay") == "right"


def test_rows_are_stored_as_in_the_newest_fixture(bed: OutboxBed) -> None:
    async def written() -> None:
        async with Sink() as sink:
            await outbox.fill(bed, sink)

    asyncio.run(written())
    now = read_schema(bed.server.url, bed.schema)
    before = OutboxBed(bed.directory)
    try:
        outbox.restore((fixtures.newest() / outbox.FILE).read_bytes(), before)
        compare("outbox", *(map(_still, (read_schema(before.server.url, before.schema), now))))
    finally:
        before.drop()


def _still(records: Records) -> Records:
    """Times differ, and so do an initialisation vector and what it makes of a password."""
    moving = r'"(at|next|sent_at|next_retry_at|smtp_password_encrypted)": ("[^"]*"|[0-9.]+)'
    return {name: re.sub(moving, r'"\1": …', text) for name, text in records.items()}
