"""Messages with very many recipients are stored one after the other, and nothing else waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.ports import LOOPBACK
from tests.support.relay import relay_with, settings
from tests.support.smtp_client import connected
from zonerelay.config.settings import ZoneSettings
from zonerelay.inbound.cleanup.intake import LIST
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.store.queue.body import BodyWriter


async def submitted(port: int, recipients: int) -> bytes:
    """All recipients at once; the reply to the final dot."""
    async with connected(port, b"EHLO app.example.org") as client:
        to = b"".join(b"RCPT TO:<u%d@example.com>\r\n" % number for number in range(recipients))
        client.write(b"MAIL FROM:<a@example.org>\r\n" + to + b"DATA\r\n")
        assert await client.refusals(recipients + 2) == []
        return await client.say(b"Subject: x\r\n\r\nx\r\n.")


async def test_of_several_lists_one_is_stored_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five of 5,000 recipients that ended in the same turn kept the loop from everybody for 0.4 seconds."""
    let, begun = asyncio.Semaphore(0), 0
    commit = BodyWriter.commit

    async def held_up(self: BodyWriter, deliveries: Sequence[Delivery], **more: object) -> Message:
        nonlocal begun
        if len(deliveries) > LIST:
            begun += 1
            await let.acquire()
        return await commit(self, deliveries, **more)  # type: ignore[arg-type]  # passed on by name

    monkeypatch.setattr(BodyWriter, "commit", held_up)
    async with relay_with(settings(tmp_path, zone=ZoneSettings(next_hop=f"{LOOPBACK}:1"))) as running:
        (address,) = running.worker.addresses()
        port = int(address.rpartition(":")[2])
        lists = [asyncio.create_task(submitted(port, LIST + 1)) for _ in range(3)]
        try:
            await running.until(lambda: begun == 1, what="the first list")
            assert (await submitted(port, LIST)).startswith(b"250")
            for number in range(1, 4):
                assert begun == number
                let.release()
                await running.until(lambda: begun == min(number + 1, 3), what="the next list")  # noqa: B023
        finally:
            for _ in lists:
                let.release()
        assert [(await each)[:3] for each in lists] == [b"250"] * 3
        assert running.queued() == LIST + 3 * (LIST + 1)
