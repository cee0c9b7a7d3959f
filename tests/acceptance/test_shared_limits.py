"""A relay with two workers, real processes: the receiver sees the limits of one relay."""

from __future__ import annotations

import asyncio
import signal
import smtplib
from pathlib import Path

from tests.support.counting import CountingReceiver
from tests.support.process import RelayProcess

LIMIT = 3


def submit(relay: RelayProcess, count: int) -> None:
    """One connection for each message, so that both workers get some."""
    for number in range(count):
        with smtplib.SMTP("127.0.0.1", relay.smtp_port, timeout=20) as client:
            client.sendmail("app@example.org", [f"u{number}@example.com"], b"Subject: x\r\n\r\nbody\r\n")


async def test_two_workers_of_a_supervisor_are_one_relay_to_the_receiver(tmp_path: Path) -> None:
    receiver = CountingReceiver(delay=0.1)
    await receiver.start()
    relay = RelayProcess(
        tmp_path,
        next_hop=f"127.0.0.1:{receiver.port}",
        top={"workers": 2},
        zone={"max_connections_per_destination": LIMIT},
    )
    try:
        await asyncio.to_thread(relay.start)
        await asyncio.to_thread(submit, relay, 50)
        async with asyncio.timeout(20):
            while receiver.messages < 50:
                await asyncio.sleep(0.05)
        assert receiver.peak == LIMIT
        await asyncio.to_thread(relay.terminate)
        assert not relay.events("limits-lost")
        assert relay.returncode == 0
    finally:
        if relay.running:
            relay.signal(signal.SIGKILL)
        await receiver.close()
