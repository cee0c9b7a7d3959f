"""Lists are stored one after the other, and what is in memory is bounded, however many deliveries wait."""

import asyncio
import gc
import smtplib
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.dns import FakeDns
from tests.support.relay import LOOPBACK, Running, relay_with, settings
from tests.support.smtp_client import connected
from zonerelay.config.settings import ZoneSettings
from zonerelay.inbound.cleanup.intake import LIST
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.queue.scheduler import Scheduler
from zonerelay.queue.zone import window
from zonerelay.store.queue import claims, in_flight
from zonerelay.store.queue.body import BodyWriter


async def submitted(port: int, recipients: int) -> bytes:
    """All recipients at once; the reply to the final dot."""
    async with connected(port, b"EHLO app.example.org") as client:
        to = b"".join(b"RCPT TO:<u%d@example.com>\r\n" % number for number in range(recipients))
        client.write(b"MAIL FROM:<a@example.org>\r\n" + to + b"DATA\r\n")
        assert await client.refusals(recipients + 2) == []
        return await client.say(b"Subject: x\r\n\r\nx\r\n.")


async def test_of_several_lists_one_is_stored_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


# ---- what is in memory is bounded: objects are counted, for RSS has noise ---------------------------


BOUNDS = {
    window: ("LOW_MARK", "CLAIM_LIMIT", "MAX_PASSED_OVER"),
    in_flight: ("HOT_MESSAGES",),
    claims: ("_READ_AHEAD", "_MOST"),
}
SMALL = 40


def objects() -> Counter[str]:
    gc.collect()
    kinds = map(type, gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("zonerelay."))


async def feed(running: Running, first: int, count: int) -> None:
    def submit() -> None:
        with smtplib.SMTP(*running.address, timeout=20) as client:
            for number in range(first, first + count):
                to = f"u@d{number % 20}.example"
                client.sendmail("a@example.org", [to], "Subject: x\r\n\r\nx\r\n")

    await asyncio.to_thread(submit)
    await asyncio.sleep(0.5)  # until the queue has looked at it


@pytest.mark.parametrize("by_mx", [False, True])
async def test_mail_behind_receivers_that_hang_stays_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_mx: bool
) -> None:
    for module, names in BOUNDS.items():
        for name in names:
            monkeypatch.setattr(module, name, SMALL)
    defaults = Scheduler.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "window", SMALL)
    async with AsyncExitStack() as stack:
        # The kernel takes the connections, and nothing greets.
        sink = stack.enter_context(socket.create_server((LOOPBACK, 0), backlog=200))
        port = sink.getsockname()[1]
        dns = await stack.enter_async_context(
            FakeDns({f"d{n}.example": {"A": [LOOPBACK]} for n in range(20)})
        )
        zone = ZoneSettings(port=port, allow_private_addresses=True)
        if not by_mx:
            zone = ZoneSettings(next_hop=f"{LOOPBACK}:{port}")
        running = await stack.enter_async_context(relay_with(settings(tmp_path, zone=zone, dns=dns.address)))
        await feed(running, 0, 150)
        before = objects()
        await feed(running, 150, 250)
        assert running.queued() == 400
        grown = {name: more for name, more in (objects() - before).items() if more > SMALL}
        assert grown == {}
