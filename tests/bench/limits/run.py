"""One run: DNS, receivers, a real relay, load, reloads in the middle, and the receivers' report.

The configuration is reloaded `RELOADS` times, each time another way: settings that have nothing to do with
limits, lower limits of one destination, and the old ones again. What is promised while a limit falls: the old
one until the reload and `GRACE` are over, when connections from before it have come to their end; then the
new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from tests.bench.limits import plan as plans
from tests.bench.limits.ledger import Promise
from tests.bench.limits.load import Feed, send
from tests.bench.limits.plan import Plan, rated
from tests.bench.limits.receivers import Change, Report
from tests.support.debian import REPOSITORY
from tests.support.dns import FakeDns
from tests.support.ports import LOOPBACK, free_port
from tests.support.process import RelayProcess
from tests.support.redis_server import shared_server
from tests.support.toml import Table, toml_document

GRACE = 4.0
LOWER = rated(8, 1.0, connections=2)
CHANGING = "changing"
NEVER_TAKE = ("dead", "silent")

_DEFAULT: Table = {
    "name": "default",
    "tls": "none",
    "allow_private_addresses": True,
    "ipv6": False,
    "max_connections": plans.ZONE_CONNECTIONS,
    "max_connections_per_destination": plans.USUAL.connections,
    "max_recipients_per_transaction": plans.USUAL.recipients,
    "max_messages_per_connection": plans.USUAL.messages,
    "connection_idle_timeout": "2s",
    "in_doubt": "retry",
}


class Run(msgspec.Struct, frozen=True):
    """`cpu`: the relay's part of one core. `faults`: what it had to say that nobody expects."""

    seconds: float
    report: Report
    sent: int
    reloads: int
    cpu: float
    faults: list[str]

    @property
    def exceeded(self) -> list[str]:
        return [
            f"{observed.kind} {observed.name}: {what}"
            for observed in self.report.observed
            for seen in observed.history
            for what in seen.exceeded
        ]

    @property
    def idle(self) -> list[str]:
        """Limits that nothing was sent under: they prove nothing."""
        return [
            f"{observed.kind} {observed.name}: no transactions"
            for observed in self.report.observed
            if observed.name not in NEVER_TAKE and not any(seen.transactions for seen in observed.history)
        ]

    @property
    def is_good(self) -> bool:
        return not (self.exceeded or self.idle or self.faults)


async def run(directory: Path, seconds: float, *, reloads: int = 6, workers: int = 1, nodes: int = 1) -> Run:
    """`workers` of one machine; or `nodes`: relays that share a spool in Redis, of one worker each."""
    chosen = plans.standard(free_port(host="127.0.1.1"))
    async with FakeDns(chosen.dns()) as dns, _receivers(chosen) as receivers:
        relays = _relays(directory, chosen, dns.address, workers=workers, nodes=nodes)
        try:
            for relay in relays:
                await asyncio.to_thread(relay.start)
            outcome = await _observe(relays, chosen, receivers, seconds, reloads)
            for relay in relays:
                await asyncio.to_thread(relay.terminate)
        finally:
            for relay in relays:
                relay.kill()
        assert receivers.stdin is not None
        assert receivers.stdout is not None
        receivers.stdin.close()
        report = msgspec.json.decode(await receivers.stdout.read(), type=Report)
        faults = [trouble for relay in relays for trouble in _faults(relay)]
        return msgspec.structs.replace(outcome, report=report, faults=faults)


async def _observe(
    relays: Sequence[RelayProcess], chosen: Plan, receivers: Process, seconds: float, reloads: int
) -> Run:
    queued = _Queued(relays[0])  # of nodes that share a spool each counts all
    feed = Feed(chosen, lambda: queued.number)
    began, cpu = time.monotonic(), sum(relay.cpu_seconds() for relay in relays)
    loading = [asyncio.create_task(send(feed, LOOPBACK, relay.smtp_port)) for relay in relays]
    watching = asyncio.create_task(queued.watch())
    try:
        for number in range(reloads):
            await asyncio.sleep(seconds / (reloads + 1))
            await _reload(relays, receivers, number)
        await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))
        used = sum(relay.cpu_seconds() for relay in relays) - cpu
    finally:
        for task in (*loading, watching):
            task.cancel()
        await asyncio.gather(*loading, watching, return_exceptions=True)
    passed = time.monotonic() - began
    return Run(passed, Report([], 0), feed.sent, len(relays[0].events("reloaded")), used / passed, [])


class _Queued:
    def __init__(self, relay: RelayProcess) -> None:
        self.number = 0
        self._relay = relay

    async def watch(self) -> None:
        while True:
            found = await asyncio.to_thread(self._relay.metric, "zonerelay_queue_deliveries")
            self.number = int(found)
            await asyncio.sleep(0.5)


async def _reload(relays: Sequence[RelayProcess], receivers: Process, number: int) -> None:
    usual = rated(20, 1.0, connections=6)
    kind = number % 3
    if kind == 0:
        for relay in relays:
            await _edit(relay, "connection_idle_timeout", f'"{2 + number}s"')
    elif kind == 1:
        for relay in relays:
            await _edit_destination(relay, LOWER)
        await asyncio.sleep(GRACE)
        await _tell(receivers, LOWER)
    else:
        await _tell(receivers, usual)
        for relay in relays:
            await _edit_destination(relay, usual)


async def _edit(relay: RelayProcess, key: str, value: str) -> None:
    """In the first table that has the key."""
    text = relay.config.read_text()
    at = text.index(f"\n{key} = ") + 1
    await _write(relay, f"{text[:at]}{key} = {value}{text[text.index(chr(10), at) :]}")


async def _edit_destination(relay: RelayProcess, promise: Promise) -> None:
    text = relay.config.read_text()
    begin = text.index('mx = ["mx14.test"]')
    end = text.index("\n\n", begin)
    block = toml_document({"mx": ["mx14.test"], **_told(promise)}, {})
    await _write(relay, text[:begin] + block.rstrip() + text[end:])


def _told(promise: Promise) -> Table:
    return {"max_connections": promise.connections, "max_rate": promise.text()}


async def _write(relay: RelayProcess, text: str) -> None:
    before = len(relay.events("reloaded"))
    relay.config.write_text(text)
    relay.signal(signal.SIGHUP)
    await asyncio.to_thread(
        relay.wait_for, lambda: len(relay.events("reloaded")) > before, what="a reload", timeout=20.0
    )


async def _tell(receivers: Process, promise: Promise) -> None:
    assert receivers.stdin is not None
    receivers.stdin.write(msgspec.json.encode(Change(CHANGING, promise)) + b"\n")
    await receivers.stdin.drain()


@contextlib.asynccontextmanager
async def _receivers(chosen: Plan) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bench.limits.receivers", stdin=PIPE, stdout=PIPE, cwd=REPOSITORY
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(chosen) + b"\n")
        if await process.stdout.readline() != b"ready\n":
            raise RuntimeError("the receivers did not start")
        yield process
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def _relays(directory: Path, chosen: Plan, dns: str, *, workers: int, nodes: int) -> list[RelayProcess]:
    if nodes == 1:
        return [_relay(directory, chosen, dns, workers=workers)]
    url = shared_server().url
    return [_relay(directory / f"node{number}", chosen, dns, redis=url) for number in range(nodes)]


def _relay(directory: Path, chosen: Plan, dns: str, *, workers: int = 1, redis: str = "") -> RelayProcess:
    paced = {
        **_DEFAULT,
        "name": "paced",
        "max_connections": plans.PACED_CONNECTIONS,
        "max_connections_per_destination": plans.USUAL_PACED.connections,
        "max_rate": chosen.zones["paced"].text(),
    }
    return RelayProcess(
        directory,
        top={"workers": workers},
        spool={"backend": "redis"} if redis else {},
        tables={
            **({"redis": {"url": redis, "prefix": "limits:"}} if redis else {}),
            "zone": [{**zone, "port": chosen.port} for zone in (_DEFAULT, paced)],
            "route": [{"zone": "paced", "recipient_domain": ["*.paced.test"]}],
            "destination": chosen.destinations(),
            "dns": {"servers": [dns], "timeout": "2s"},
            "retry": {"schedule": ["1s", "2s"], "suspend_min": "1s", "suspend_max": "3s", "jitter": 0.1},
            "bounce": {"enabled": False},
            "delivery": {"connect_timeout": "2s", "greeting_timeout": "4s", "quit_timeout": "1s"},
        },
        listener={"max_errors": 1000},
    )


def _faults(relay: RelayProcess) -> list[str]:
    found: Sequence[dict[str, object]] = relay.events("trouble")
    return [str(event) for event in found]
