"""A mixed load for forty receivers as they are, good and bad, all at once; and the same with kill -9.

The receivers are strict: they note every octet that comes before its time, every parameter that was not
offered, every body that is not as it was sent. What they say is in `tests/support/receivers/cast.py`.
"""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.bench.big_queue.loop_watch import Seen
from tests.support.debian import REPOSITORY
from tests.support.dkim import PEMS, entry, records, verified
from tests.support.dns import FakeDns
from tests.support.ports import free_port
from tests.support.process import RelayProcess
from tests.support.receivers import cast
from tests.support.receivers.cast import CAST
from tests.support.receivers.journal import Report
from tests.support.receivers.load import ORIGIN, Mail, Sender, plan
from tests.support.receivers.play import Stage, playing
from tests.support.receivers.verdict import Ledger, percentile
from tests.support.toml import Table

RATE = 500.0
MAX_AGE = 30
ENTRIES = (entry(ORIGIN, "rsa"), entry(ORIGIN, "ed", "ed.pem"))

LIMITS: Table = {"max_connections": cast.ZONE_CONNECTIONS, "max_connections_per_destination": 4}

PLAIN_P99 = 2.0
"""Seconds in the queue for mail to good receivers, while bad ones have mail, too."""
LONGEST_PAUSE = 0.5
"""Of the relay's event loop, on a machine that is busy with us as well."""


def make_relay(directory: Path, port: int, dns: str, limits: Table) -> RelayProcess:
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
        for ip, name in cast.EHLO_NAMES.items()
    ]
    return RelayProcess(
        directory,
        zone={
            "port": port,
            "tls": "opportunistic",
            "allow_private_addresses": True,
            "ipv6": False,
            "sources": [str(each["name"]) for each in sources],
            **limits,
            "connection_idle_timeout": "2s",
        },
        tables={
            "source": sources,
            "dkim": signing,
            "destination": cast.destinations(CAST),
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
        launcher=[sys.executable, "-m", "tests.bench.big_queue.watched", str(directory / "pauses")],
        environment={"PYTHONPATH": str(REPOSITORY)},
    )


@asynccontextmanager
async def stage(directory: Path, limits: Table = LIMITS) -> AsyncIterator[tuple[Stage, RelayProcess]]:
    port = free_port(host="127.0.1.1")
    async with FakeDns(cast.zones(CAST)) as dns, playing(port) as players:
        relay = make_relay(directory, port, dns.address, limits)
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


def longest_pauses(directory: Path) -> list[float]:
    """Of the relay's event loop, longest first; those of the start are in it."""
    seen = [msgspec.json.decode(line, type=Seen) for line in (directory / "pauses").read_bytes().splitlines()]
    return sorted((round(each.pause.wall, 3) for each in seen if each.pause is not None), reverse=True)


def said(report: Report, name: str) -> dict[str, int]:
    return report.account(name).counts


def encrypted(report: Report, name: str) -> set[bool]:
    return {arrival.encrypted for arrival in report.arrivals if arrival.host == name}


@pytest.mark.alone  # measures how long mail waits, and has to be quick enough for receivers to object
async def test_forty_receivers_at_once(tmp_path: Path) -> None:
    mails = plan(CAST, seed=1)
    began = time.monotonic()
    async with stage(tmp_path) as (players, relay):
        sender = Sender(relay.smtp_port, RATE)
        await sender.run(mails)
        await asyncio.to_thread(relay.wait_until_empty, timeout=MAX_AGE + 15)
        faults = relay.events("trouble")
        suspended = Counter(event["destination"].partition(":")[0] for event in relay.events("suspended"))
        assert await asyncio.to_thread(relay.terminate) == 0
        report = await players.report()
    ledger = Ledger.of(report)
    delays = ledger.delays(plain(mails), sender.sent)
    pauses = longest_pauses(tmp_path)
    print(f"{len(mails)} messages done after {time.monotonic() - began:.1f} s")
    half, most = percentile(delays, 0.5), percentile(delays, 0.99)
    print(f"plain: p50 {half:.3f}, p99 {most:.3f}, longest {delays[-1]:.3f} s")
    print(f"pauses of the relay's loop: {pauses[:3]}, of the receivers': {report.lag:.3f} s")

    # Everybody got it once, or somebody was told.
    assert not sender.refusals
    assert len(sender.sent) == len(mails)
    assert not ledger.wrongs(mails)
    assert not faults
    assert ledger.statuses(of(mails, cast.NULL_MX)).keys() == {"5.1.10"}
    assert ledger.statuses(of(mails, cast.NOWHERE)).keys() == {"5.1.2"}
    assert ledger.statuses(plain(mails)).keys() == {"5.1.1"}
    # No receiver saw anything that a client may not do, or more than it was promised.
    assert not errors(report)
    assert not exceeded(report)
    # What is promised is used, or it would prove nothing.
    provider = report.account("provider").seen
    assert provider.connections == provider.promise.connections
    assert report.account("rated").seen.used > 0.6  # two connections are enough for its rate
    # Good ones do not wait for bad ones.
    assert most < PLAIN_P99
    assert max(pauses, default=0.0) < LONGEST_PAUSE
    # A host that takes only some of our connections is no dead one.
    assert suspended["mx.dead.test"] > 1
    assert suspended["mx.crowded.test"] <= 1
    assert suspended.keys().isdisjoint(
        {"mx.plain1.test", "mx.hurried.test", "mx.closing.test", "mx.few.test"}
    )
    check_addresses(report)
    check_tls(report)
    check_moods(report)
    check_signatures(report)


def check_addresses(report: Report) -> None:
    """A refused source makes way for the other, and nothing else does."""
    for name in ("blocks-greeting", "blocks-mail", "blocks-dot"):
        assert 0 < said(report, name)["blocked"] <= 4
        assert {each.client for each in report.arrivals if each.host == name} == {cast.GOOD_SOURCE}
    for name in ("plain1", "plain2", "plain3", "grey"):
        assert {each.client for each in report.arrivals if each.host == name} == {
            cast.BLOCKED_SOURCE,
            cast.GOOD_SOURCE,
        }
    assert said(report, "grey")["asked from another address"] == 0


def check_tls(report: Report) -> None:
    for name in ("plain1", "plain3", "origin", "tls-expired", "required-expired"):
        assert encrypted(report, name) == {True}, name
    for name in ("tls-garbage", "tls-closed", "tls-absent", "tls-refused"):
        assert encrypted(report, name) == {False}, name
    for name in ("required-garbage", "verify-expired"):
        assert encrypted(report, name) == set(), name


def check_moods(report: Report) -> None:
    """What makes them difficult has happened."""
    assert any(said(report, name).get("over rate") for name in ("hurried", "impatient"))
    assert said(report, "crowded")["connections refused"] > 0
    for name in ("resets", "resets-chunks"):
        assert said(report, name)["resets"] > 0
    assert any(each.doubtful for each in report.arrivals if each.host == "mute")
    assert report.account("rated").seen.transactions > 120


def check_signatures(report: Report) -> None:
    published = records(ENTRIES)
    samples = [each for each in report.arrivals if each.raw and each.token]
    assert len(samples) > 100
    for each in samples:
        assert verified(each.raw, published) == [True, True], each.token


async def test_kill_9_in_the_middle_loses_nothing(tmp_path: Path) -> None:
    mails = plan([each for each in CAST if not each.hopeless], seed=2, part=0.4)
    sender = Sender(0, RATE)
    async with stage(tmp_path) as (players, relay):
        sender.port = relay.smtp_port
        for wait in (0.6, 0.6):
            left = [mail for mail in mails if mail.token not in sender.sent.keys() | sender.unclear]
            sending = asyncio.create_task(sender.run(left))
            await asyncio.sleep(wait)
            await asyncio.to_thread(relay.kill)
            await sending
            await asyncio.to_thread(relay.restart)
        await sender.run([mail for mail in mails if mail.token not in sender.sent.keys() | sender.unclear])
        await asyncio.to_thread(relay.wait_until_empty, timeout=MAX_AGE + 15)
        report = await players.report()
    ledger = Ledger.of(report)
    sent = [mail for mail in mails if mail.token in sender.sent]
    again = {
        arrival.token
        for arrival in report.arrivals
        for each in arrival.recipients
        if ledger.arrived[each] > 1 + ledger.doubts[each]
    }
    print(f"{len(sent)} acknowledged, {len(sender.unclear)} unclear, {len(again)} came again")
    assert len(sent) > 0.8 * len(mails)
    assert not ledger.lost(sent)
    assert not errors(report)
    assert not exceeded(report)
    # In flight at a kill, and what had an outcome in the 50 ms before.
    assert len(again) <= 2 * (cast.ZONE_CONNECTIONS + RATE * 0.2)


async def test_silent_hosts_hold_up_nobody_with_the_default_limits(tmp_path: Path) -> None:
    def mail_for(*names: str) -> list[Mail]:
        members = [replace(each, mails=30, lists=0) for each in CAST if each.name in names]
        return [mail for mail in plan(members, seed=3, prefix=names[0]) if mail.to in names]

    async with stage(tmp_path, {}) as (players, relay):
        sender = Sender(relay.smtp_port, RATE)
        await sender.run(mail_for("silent", "half-silent", "mute"))
        await asyncio.sleep(0.5)
        good = mail_for("plain1", "plain2")
        await sender.run(good)
        await asyncio.sleep(1.5)  # the greeting timeout is 4 s
        await asyncio.to_thread(relay.kill)
        report = await players.report()
    assert said(report, "silent")["connections"] >= 1  # one at a time, until it answers
    assert not Ledger.of(report).lost(good)
