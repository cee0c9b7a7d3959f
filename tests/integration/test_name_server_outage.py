"""Name servers that do not answer are told of; a domain whose own servers are broken is not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.dns import SERVFAIL, SILENCE, FakeDns, InjectedFaults, OnError, Zones, hurry
from tests.support.relay import LOOPBACK, Running, relay_with, settings
from tests.support.sink import Sink
from zonerelay.config.settings import RetrySettings, ZoneSettings
from zonerelay.routing.dns.resolver import FAILURES, PROBE

MESSAGE = b"From: app@example.org\r\nSubject: hello\r\n\r\nOne line.\r\n"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def zones() -> Zones:
    mail = {f"d{number}.example": {"MX": ["10 mx.example"]} for number in range(FAILURES)}
    return {**mail, "mx.example": {"A": [LOOPBACK]}}


@asynccontextmanager
async def relay(directory: Path, dns: str) -> AsyncIterator[Running]:
    # Nothing listens there: what matters is that mail is looked up.
    zone = ZoneSettings(port=1, allow_private_addresses=True)
    async with relay_with(settings(directory, zone=zone, dns=dns)) as running:
        yield running


async def send(running: Running, domain: str = "d0.example") -> None:
    await running.send("app@example.org", [f"someone@{domain}"], MESSAGE)


def reachable(running: Running) -> bool:
    return b"zonerelay_name_servers_reachable 1.0" in running.worker.metrics.exposition()


async def outages(running: Running) -> list[str]:
    return [problem for problem in (await running.status()).problems if "name server" in problem]


@pytest.mark.parametrize("trouble", [SILENCE, "closed"])
async def test_an_outage_is_told_and_so_is_its_end(tmp_path: Path, trouble: OnError | str) -> None:
    silent: InjectedFaults = dict.fromkeys((*zones(), PROBE), SILENCE)
    async with FakeDns(zones(), silent if trouble is SILENCE else None) as dns:
        address = dns.address if trouble is SILENCE else f"{LOOPBACK}:1"
        async with relay(tmp_path, address) as running:
            assert await outages(running) == []
            await send(running)
            (lost,) = await running.until_logged("name-servers-lost")
            assert lost["servers"] == address
            (problem,) = await outages(running)
            assert address in problem
            assert not reachable(running)
            if trouble is SILENCE:
                dns.faults.clear()
                await running.until_logged("name-servers-restored")
                assert await outages(running) == []
                assert reachable(running)
            assert len(running.log.named("name-servers-lost")) == 1


async def test_mail_of_an_outage_leaves_soon_after_it(tmp_path: Path, sink: Sink) -> None:
    silent: InjectedFaults = dict.fromkeys((*zones(), PROBE), SILENCE)
    zone = ZoneSettings(port=sink.port, allow_private_addresses=True)
    retry = RetrySettings(schedule=(3600.0,))
    async with (
        FakeDns(zones(), silent) as dns,
        relay_with(settings(tmp_path, zone=zone, dns=dns.address, retry=retry)) as running,
    ):
        await send(running)
        await running.until_logged("deferred")
        await running.until_logged("name-servers-lost")
        dns.faults.clear()
        await running.until_logged("delivered")


async def test_a_domain_whose_servers_are_silent_is_no_outage(tmp_path: Path) -> None:
    async with (
        FakeDns(zones(), {"d0.example": SILENCE}) as dns,
        relay(tmp_path, dns.address) as running,
    ):
        await send(running)
        await running.until_logged("deferred")
        assert (PROBE, "A", "udp") in dns.queries
        assert not running.log.named("name-servers-lost")


async def test_servers_that_fail_for_every_name_are_an_outage(tmp_path: Path) -> None:
    failing: InjectedFaults = dict.fromkeys(zones(), SERVFAIL)
    async with FakeDns(zones(), failing) as dns, relay(tmp_path, dns.address) as running:
        for number in range(FAILURES):
            assert not running.log.named("name-servers-lost")
            await send(running, f"d{number}.example")
        await running.until_logged("name-servers-lost")
        dns.faults.clear()
        await running.until_logged("name-servers-restored")
        assert await outages(running) == []
