"""What is in memory is bounded, however many deliveries wait: objects are counted, for RSS has noise."""

from __future__ import annotations

import asyncio
import gc
import smtplib
import socket
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support.dns import FakeDns
from tests.support.relay import LOOPBACK, Running, relay_with, settings
from zonerelay.config.settings import ZoneSettings
from zonerelay.queue.scheduler import Scheduler
from zonerelay.queue.zone import window
from zonerelay.store.queue import claims, in_flight

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
