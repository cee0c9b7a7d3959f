"""Mail that its sender holds back (RFC 4865) in a whole relay: it waits, also through a restart."""

from __future__ import annotations

import asyncio
import smtplib
import time
from pathlib import Path

from tests.support.relay import LOOPBACK, relay_with, settings
from tests.support.sink import Sink
from tests.support.wishes import TEXT, put, to
from zonerelay.config.settings import BounceSettings, TlsMode, ZoneSettings
from zonerelay.model.queue_name import queue_of


async def test_it_waits_through_a_restart_and_leaves_on_time(tmp_path: Path, sink: Sink) -> None:
    zone = ZoneSettings(next_hop=f"{LOOPBACK}:{sink.port}", tls=TlsMode.NONE)
    chosen = settings(tmp_path, zone=zone, bounce=BounceSettings(delay_warning=0.01))
    release = time.time() + 1.5
    async with relay_with(chosen) as running:
        message_id = await put(running, [to("later@example.com")], release=release)
        await put(running, [to("now@example.com")])
        await sink.wait_for(1)
        await running.until(lambda: running.queued() == 1, what="one is left")
        assert running.worker.store.counts()[queue_of("default")].deferred == 1
    async with relay_with(chosen) as running:
        (waiting,) = await running.worker.store.deliveries_of(message_id)
        assert (waiting.created, waiting.next_attempt, waiting.attempts) == (release, release, 0)
        assert [each.recipients for each in sink.messages] == [("now@example.com",)]
        await sink.wait_for(2)
        assert time.time() >= release
        await running.until_empty()
        (delivered,) = running.log.named("delivered")
        assert 0 <= delivered["age"] < 1.0  # type: ignore[operator]  # a number
        assert not running.log.named("dsn")


async def test_the_age_of_the_oldest_is_that_of_mail_that_may_leave(tmp_path: Path) -> None:
    zone = ZoneSettings(next_hop=f"{LOOPBACK}:1", tls=TlsMode.NONE)
    async with relay_with(settings(tmp_path, zone=zone)) as running:
        await put(running, [to("later@example.com")], release=time.time() + 3600)
        (queue,) = (await running.status()).zones
        assert (queue.deferred, queue.oldest_seconds) == (1, 0.0)
        await put(running, [to("stuck@example.com")])
        await running.until_logged("deferred")
        (queue,) = (await running.status()).zones
        assert queue.oldest_seconds > 0.0


async def test_a_client_that_asks_for_a_later_time_gets_it_from_a_relay_that_was_idle(
    tmp_path: Path, sink: Sink
) -> None:
    """Nothing else wakes the queue between: the acceptance alone has to set its alarm."""
    zone = ZoneSettings(next_hop=f"{LOOPBACK}:{sink.port}", tls=TlsMode.NONE)
    async with relay_with(settings(tmp_path, zone=zone)) as running:
        await running.send("app@example.org", ["before@example.com"], TEXT)
        await sink.wait_for(1)
        await running.until_empty()
        before = time.time()
        await asyncio.to_thread(submit, running.address, "later@example.com", "HOLDFOR=1")
        await sink.wait_for(2)
        assert time.time() - before >= 1.0
        await running.until_empty()


def submit(address: tuple[str, int], recipient: str, option: str) -> None:
    with smtplib.SMTP(*address, timeout=20) as client:
        client.ehlo()
        client.sendmail("app@example.org", [recipient], TEXT, [option])
