"""The whole way of a message in one process: a client, the relay, scripted DNS, scripted sinks."""

import asyncio
import smtplib
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.dns import FakeDns
from tests.support.relay import LOOPBACK, Running, relay_with, settings
from tests.support.sink import Sink
from zonerelay.config.settings import (
    CredentialSettings,
    ListenerSettings,
    ReportSettings,
    SourceSettings,
    ZoneSettings,
)
from zonerelay.inbound.refusal import Reason
from zonerelay.message.dsn import DsnKind
from zonerelay.operations.answers import RelayStatus
from zonerelay.operations.errors import ControlError
from zonerelay.telemetry.metrics.metrics import OUTCOMES
from zonerelay.worker import report
from zonerelay.worker.endpoints import Endpoints
from zonerelay.worker.report import DailyReport, latest

MESSAGE = b"From: app@example.org\r\nSubject: hello\r\n\r\nOne line.\r\n.A dot.\r\n"


class Silent:
    async def relay_status(self) -> RelayStatus:
        raise ControlError("no worker answers")


async def test_a_report_is_sent_once_although_a_stop_or_a_reload_comes_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the write of the report and that of the file that records it."""
    writes: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
    chosen = settings(tmp_path, zone=mx_zone(1))
    due = replace(chosen, report=ReportSettings(to=("boss@example.com",)))
    note = tmp_path / "report.sent"
    note.write_text("1000\n")
    async with relay_with(chosen) as running, asyncio.timeout(20):
        monkeypatch.setattr(running.worker.settler, "write", lambda _, then: writes.put_nowait(then))
        daily = DailyReport(running.worker, cast("Endpoints", Silent()))
        await daily.configure(due)
        stored = await writes.get()
        await daily.configure(due)
        closing = asyncio.create_task(daily.close())
        await asyncio.sleep(0)
        stored()
        await closing
        assert float(note.read_text()) == latest(due.report.at, time.time())
        note.write_text("4000000000\n")  # the clock was far ahead
        await daily.configure(due)
        await running.until(lambda: float(note.read_text()) <= time.time(), what="reports go on")
        await daily.close()
        note.write_text("1000\n")  # as if it could not be written
        await daily.configure(due)
        looked = asyncio.Event()

        def noticed(at: str, now: float) -> float:
            looked.set()
            return latest(at, now)

        monkeypatch.setattr(report, "latest", noticed)
        await looked.wait()
        await daily.close()
        assert writes.empty()


def mx_zone(port: int, **changes: object) -> ZoneSettings:
    return ZoneSettings(port=port, allow_private_addresses=True, **changes)  # type: ignore[arg-type]  # as given


async def test_mail_goes_to_the_mx_host_with_the_lowest_preference(tmp_path: Path, sink: Sink) -> None:
    zones = {
        "example.com": {"MX": ["20 away.example.com", "10 mx.example.com"]},
        "mx.example.com": {"A": [LOOPBACK]},
        "away.example.com": {"A": ["127.0.0.9"]},
    }
    async with (
        FakeDns(zones) as dns,
        relay_with(settings(tmp_path, zone=mx_zone(sink.port), dns=dns.address)) as running,
    ):
        await running.send("app@example.org", ["someone@example.com"], MESSAGE)
        (received,) = await sink.wait_for(1)
        await running.until_empty()
        assert received.mail_from == "app@example.org"
        assert received.recipients == ("someone@example.com",)
        header, _, body = received.body.partition(b"\r\n\r\n")
        assert body == b"One line.\r\n.A dot.\r\n"
        assert header.startswith(b"Received: from ")
        assert b"for <someone@example.com>" in header
        assert b"\r\nDate: " in header
        assert b"\r\nMessage-ID: <" in header
        (delivered,) = running.log.named("delivered")
        assert delivered["host"] == "mx.example.com"


async def test_an_eight_bit_message_and_utf8_addresses_arrive_unchanged(tmp_path: Path, sink: Sink) -> None:
    chosen = settings(tmp_path, zone=ZoneSettings(next_hop=f"{LOOPBACK}:{sink.port}"))
    async with relay_with(chosen) as running:

        def submit() -> None:
            with smtplib.SMTP(*running.address) as client:
                client.ehlo("müller.example".encode("idna").decode())
                options = ["BODY=8BITMIME", "SMTPUTF8"]
                client.sendmail(
                    "jörg@example.org", ["üser@example.com"], "Subject: ä\r\n\r\nö\r\n".encode(), options
                )

        await asyncio.to_thread(submit)
        (received,) = await sink.wait_for(1)
        assert received.recipients == ("üser@example.com",)
        assert "SMTPUTF8" in received.parameters
        assert received.body.endswith("\r\n\r\nö\r\n".encode())


async def test_a_second_relay_on_the_same_spool_is_refused_in_words(tmp_path: Path) -> None:
    from zonerelay.process.setup import StartError

    chosen = settings(tmp_path, zone=ZoneSettings(next_hop=f"{LOOPBACK}:1"))
    async with relay_with(chosen):
        with pytest.raises(StartError, match="another"):
            async with relay_with(chosen):
                pass


def numbers(running: Running) -> dict[str, dict[str, float]]:
    """Of every counter its samples, by their labels in the order of the labels' names."""
    families = text_string_to_metric_families(running.worker.metrics.exposition().decode())
    return {
        family.name: {",".join(s.labels[name] for name in sorted(s.labels)): s.value for s in family.samples}
        for family in families
        if family.type == "counter" and family.name.startswith("zonerelay")
    }


async def test_every_counter_is_there_with_0_before_the_first_event(tmp_path: Path) -> None:
    """`increase()` does not see the first event of a counter that appears with it."""
    zone = ZoneSettings(next_hop="127.0.0.1:1", credentials=("main",))
    listener = ListenerSettings(address=f"{LOOPBACK}:0", policy="tests.bench.policies:Nothing")
    chosen = settings(
        tmp_path,
        zone=zone,
        listener=listener,
        source=(SourceSettings(name="one", address=(LOOPBACK,)),),
        credential=(CredentialSettings(name="main", user="u", password="p"),),
    )
    async with relay_with(chosen) as running:
        found = numbers(running)
        assert [name for name, samples in found.items() if not samples] == []
        assert {value for samples in found.values() for value in samples.values()} == {0}
        assert found["zonerelay_deliveries"].keys() == {f"{outcome},default" for outcome in OUTCOMES}
        assert found["zonerelay_inbound_refused"].keys() == set(Reason)
        assert found["zonerelay_dsn"].keys() == set(DsnKind)
        assert "rcpt,timeout" in found["zonerelay_policy_failures"]
        assert "refused,default" in found["zonerelay_smarthost_logins"]
        bulk = ZoneSettings(name="bulk", next_hop="127.0.0.1:1")
        more = (*chosen.source, SourceSettings(name="two", address=("127.0.0.2",)))
        await running.worker.reload(replace(chosen, zone=(zone, bulk), source=more))
        found = numbers(running)
        assert found["zonerelay_deliveries"]["bounced,bulk"] == 0
        assert found["zonerelay_destinations_suspended"]["bulk"] == 0
        assert found["zonerelay_outbound_tls_sessions"]["opportunistic,fallback,bulk"] == 0
        assert found["zonerelay_source_refusals"]["two"] == 0


async def test_open_connections_to_peers_show_in_the_metrics(tmp_path: Path, sink: Sink) -> None:
    zone = ZoneSettings(next_hop=f"{LOOPBACK}:{sink.port}", connection_idle_timeout=60.0)
    async with relay_with(settings(tmp_path, zone=zone)) as running:
        line = b'zonerelay_outbound_connections{zone="default"} '
        assert line + b"0.0" in running.worker.metrics.exposition()
        await running.send("app@example.org", ["someone@example.com"], MESSAGE)
        await running.until_empty()
        assert line + b"1.0" in running.worker.metrics.exposition()
