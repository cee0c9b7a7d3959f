"""Name servers that do not answer are told of, and files of the system that change are read again."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.dns import SERVFAIL, SILENCE, FakeDns, InjectedFaults, OnError, Zones, hurry
from tests.support.relay import LOOPBACK, Running, relay_with, settings
from tests.support.sink import Sink
from zonerelay.config.settings import DnsSettings, RetrySettings, ZoneSettings
from zonerelay.model.clock import ManualClock
from zonerelay.routing.dns import resolver
from zonerelay.routing.dns.answers import DnsStatus
from zonerelay.routing.dns.resolver import FAILURES, PROBE, Hosts, Resolver

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
    async with FakeDns(zones(), {"d0.example": SILENCE}) as dns, relay(tmp_path, dns.address) as running:
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


# ---- files of the system that change while the relay runs -------------------------------------------


SYSTEM_ZONES: Zones = {
    "one.example": {"MX": ["10 mx.example"]},
    "two.example": {"MX": ["10 mx.example"]},
    "host.corp.example": {"A": ["192.0.2.7"]},
    "mx.example": {"A": ["127.0.0.1"]},
}
SILENT: InjectedFaults = dict.fromkeys((*SYSTEM_ZONES, PROBE), SILENCE)


@pytest.fixture
def resolv_conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "resolv.conf"
    monkeypatch.setattr(resolver, "RESOLV_CONF", str(file))
    return file


def own_address(number: int) -> str:
    """An address of this machine that no other process of the tests uses: resolv.conf knows port 53 only."""
    return f"127.{number}.{os.getpid() >> 8 & 0xFF}.{os.getpid() & 0xFF}"


@asynccontextmanager
async def system_server(number: int, faults: InjectedFaults | None = None) -> AsyncIterator[FakeDns]:
    server = FakeDns(SYSTEM_ZONES, faults, host=own_address(number), port=53)
    try:
        await server.__aenter__()
    except PermissionError:
        pytest.skip("only root may serve port 53")
    try:
        yield server
    finally:
        await server.__aexit__(None, None, None)


def rename(file: Path, text: str) -> None:
    draft = file.with_name("draft")
    draft.write_text(text)
    draft.replace(file)


def in_place(file: Path, text: str) -> None:
    file.write_text("")
    file.write_text(text)


def another_target(file: Path, text: str) -> None:
    """As systemd-resolved and resolvconf have it: the file is a link into /run."""
    target = file.with_name(f"target-{len(list(file.parent.iterdir()))}")
    target.write_text(text)
    draft = file.with_name("link")
    draft.symlink_to(target)
    draft.replace(file)


def removed_first(file: Path, text: str) -> None:
    file.unlink()
    file.write_text(text)


@pytest.mark.parametrize("change", [rename, in_place, another_target, removed_first])
async def test_a_changed_resolv_conf_counts(resolv_conf: Path, change: Callable[[Path, str], None]) -> None:
    async with system_server(81, SILENT) as old, system_server(82) as new:
        resolv_conf.write_text(f"nameserver {own_address(81)}\n")
        asked = Resolver(DnsSettings(timeout=0.3), ManualClock(), hosts=Hosts({}))
        try:
            assert (await asked.mx("one.example")).status is DnsStatus.TIMEOUT
            change(resolv_conf, f"nameserver {own_address(82)}\n")
            assert (await asked.mx("two.example")).status is DnsStatus.OK
            assert own_address(82) in asked.watch.state()
            assert new.count("two.example", "MX") == 1
            assert old.count("two.example", "MX") == 0
            # The search list is that of the new file, too.
            change(resolv_conf, f"search corp.example\nnameserver {own_address(82)}\n")
            assert (await asked.addresses("host", ipv6=False)).ips == ("192.0.2.7",)
        finally:
            await asked.close()


@pytest.mark.parametrize("text", [None, "", "search example.com\n", "nameserver 127.0.0", "nameserver \xff"])
async def test_a_resolv_conf_without_servers_leaves_the_old(resolv_conf: Path, text: str | None) -> None:
    """It is being written, or the network is away for a moment."""
    async with system_server(81):
        resolv_conf.write_text(f"nameserver {own_address(81)}\n")
        asked = Resolver(DnsSettings(timeout=5.0), ManualClock(), hosts=Hosts({}))
        try:
            assert (await asked.mx("one.example")).status is DnsStatus.OK
            if text is None:
                resolv_conf.unlink()
            else:
                resolv_conf.write_text(text, "latin-1")
            assert (await asked.mx("two.example")).status is DnsStatus.OK
        finally:
            await asked.close()


async def test_configured_servers_stay_whatever_resolv_conf_says(resolv_conf: Path) -> None:
    async with FakeDns(SYSTEM_ZONES) as server:
        resolv_conf.write_text("nameserver 192.0.2.1\n")
        asked = Resolver(DnsSettings(servers=(server.address,)), ManualClock(), hosts=Hosts({}))
        resolv_conf.write_text("nameserver 192.0.2.2\n")
        assert (await asked.mx("one.example")).status is DnsStatus.OK
        assert asked.watch.state().startswith(server.address)
        await asked.close()


async def test_mail_flows_again_when_resolv_conf_has_a_server(tmp_path: Path, resolv_conf: Path) -> None:
    """Without mail, without a reload and without a restart (foxcpp/maddy#475)."""
    zone = ZoneSettings(port=1, allow_private_addresses=True)
    by_system = replace(settings(tmp_path, zone=zone), dns=DnsSettings(timeout=1.0))
    async with system_server(81, SILENT), system_server(82):
        resolv_conf.write_text(f"nameserver {own_address(81)}\n")
        async with relay_with(by_system) as running:
            await running.send("app@example.org", ["someone@one.example"], MESSAGE)
            (lost,) = await running.until_logged("name-servers-lost")
            assert lost["servers"] == own_address(81)
            rename(resolv_conf, f"nameserver {own_address(82)}\n")
            (restored,) = await running.until_logged("name-servers-restored")
            assert restored["servers"] == own_address(82)
            # Port 1 refuses: the mail got as far as a connection.
            await running.until(
                lambda: any("4.4.1" in str(each) for each in running.log.named("deferred")),
                what="an attempt at the MX host",
            )


def test_a_changed_hosts_file_counts_for_the_next_look_up(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    found = Hosts(file=file)
    assert found.lookup("smarthost") == ()
    file.write_text("192.0.2.1 smarthost\n")
    assert found.lookup("smarthost") == ("192.0.2.1",)
    rename(file, "192.0.2.22 SmartHost.\n")
    assert found.lookup("smarthost") == ("192.0.2.22",)
    file.unlink()
    assert found.lookup("smarthost") == ()
    assert found.lookup("localhost")
