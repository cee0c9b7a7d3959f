"""A mixed load for forty receivers as they are, good and bad, all at once; and the same with kill -9.

The receivers are strict: they note every octet that comes before its time, every parameter that was not
offered, every body that is not as it was sent. What they say is in `tests/support/receivers/cast.py`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.dkim import PEMS, entry, records, verified
from tests.support.dns import FakeDns
from tests.support.ports import free_port
from tests.support.process import RelayProcess
from tests.support.receivers import watched
from tests.support.receivers.cast import (
    BLOCKED_SOURCE,
    CAST,
    EHLO_NAMES,
    GOOD_SOURCE,
    NOWHERE,
    NULL_MX,
    destinations,
    zones,
)
from tests.support.receivers.journal import Report
from tests.support.receivers.load import ORIGIN, Mail, Sender, plan
from tests.support.receivers.play import Stage, playing
from tests.support.receivers.verdict import Ledger, percentile

RATE = 500.0
MAX_AGE = 20
ENTRIES = (entry(ORIGIN, "rsa"), entry(ORIGIN, "ed", "ed.pem"))

PLAIN_P99 = 2.0
"""Seconds in the queue for mail to good receivers, while bad ones have mail, too."""
LONGEST_PAUSE = 0.25
"""Of the relay's event loop, on a machine that is busy with us as well."""


def make_relay(directory: Path, port: int, dns: str) -> RelayProcess:
    keys = directory / "keys"
    keys.mkdir(parents=True)
    for each in ENTRIES:
        file = keys / each.key_file.name
        file.write_bytes(PEMS[each.key_file.name]())
        file.chmod(0o600)
    signing = [
        {"domain": each.domain, "selector": each.selector, "key_file": str(keys / each.key_file.name)}
        for each in ENTRIES
    ]
    sources = [
        {"name": name.partition(".")[0], "address": [ip], "ehlo_name": name}
        for ip, name in EHLO_NAMES.items()
    ]
    return RelayProcess(
        directory,
        zone={
            "port": port,
            "tls": "opportunistic",
            "allow_private_addresses": True,
            "ipv6": False,
            "sources": [str(each["name"]) for each in sources],
            "max_connections": 100,
            "max_connections_per_destination": 4,
            "connection_idle_timeout": "2s",
        },
        tables={
            "source": sources,
            "dkim": signing,
            "destination": destinations(CAST),
            "dns": {"servers": [dns], "timeout": "2s"},
            "retry": {
                "schedule": ["1s", "2s"],
                "suspend_min": "1s",
                "suspend_max": "2s",
                "max_age": f"{MAX_AGE}s",
            },
            "bounce": {"enabled": True},
            "delivery": {
                "connect_timeout": "2s",
                "greeting_timeout": "4s",
                "final_dot_timeout": "3s",
                "quit_timeout": "1s",
            },
        },
        launcher=[sys.executable],
        program=Path(watched.__file__),
        environment={"WATCHED": str(directory / "watched.json")},
    )


@asynccontextmanager
async def stage(directory: Path) -> AsyncIterator[tuple[Stage, RelayProcess]]:
    port = free_port(host="127.0.1.1")
    async with FakeDns(zones(CAST)) as dns, playing(port) as players:
        relay = make_relay(directory, port, dns.address)
        try:
            await asyncio.to_thread(relay.start)
            yield players, relay
        finally:
            await asyncio.to_thread(relay.kill)


def of(mails: Sequence[Mail], *names: str) -> list[Mail]:
    return [mail for mail in mails if mail.to in names]


def plain(mails: Sequence[Mail]) -> list[Mail]:
    return of(mails, *(each.name for each in CAST if each.plain))


def errors(report: Report) -> dict[str, list[str]]:
    return {each.name: each.errors for each in report.accounts if each.errors}


def exceeded(report: Report) -> dict[str, list[str]]:
    return {each.name: each.seen.exceeded for each in report.accounts if each.seen.exceeded}


def troubles(relay: RelayProcess) -> list[object]:
    return list(relay.events("trouble"))


async def test_forty_receivers_at_once(tmp_path: Path) -> None:
    mails = plan(CAST, seed=1)
    began = time.monotonic()
    async with stage(tmp_path) as (players, relay):
        sender = Sender(relay.smtp_port, RATE)
        cpu = relay.cpu_seconds()
        await sender.run(mails)
        sending = time.monotonic() - began
        print("SENT", sending, len(sender.sent), sender.refusals[:5], flush=True)
        await asyncio.to_thread(relay.wait_until_empty, timeout=MAX_AGE + 10)
        cpu = relay.cpu_seconds() - cpu
        print("EMPTY", time.monotonic() - began, flush=True)
        found_troubles = troubles(relay)
        metrics = relay.metrics()
        assert await asyncio.to_thread(relay.terminate) == 0
        report = await players.report()
    pauses = json.loads((tmp_path / "watched.json").read_text())
    ledger = Ledger.of(report)
    delays = ledger.delays(plain(mails), sender.sent)
    print(
        f"{len(mails)} messages sent in {sending:.1f} s, done after {time.monotonic() - began:.1f} s, {cpu:.1f} s CPU"
    )
    print(
        f"plain: p50 {percentile(delays, 0.5):.3f}, p99 {percentile(delays, 0.99):.3f}, most {delays[-1]:.3f} s"
    )
    print(f"pauses: {[round(pause, 3) for pause, _ in pauses['worst']]}; receivers: {report.lag:.3f}")
    for account in report.accounts:
        print(account.name, account.counts, account.seen)
    for pause, stack in pauses["worst"]:
        if stack:
            print(pause, "".join(stack))
    print(metrics and {key: value for key, value in metrics.items() if "tls_sessions" in key})

    assert not sender.refusals
    assert len(sender.sent) == len(mails)
    assert not ledger.wrongs(mails)
    assert not errors(report)
    assert not exceeded(report)
    assert not found_troubles
