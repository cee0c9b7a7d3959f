"""The whole way of a message in one process: a client, the relay, scripted DNS, scripted sinks."""

from __future__ import annotations

import asyncio
import email
import email.policy
import smtplib
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.dns import SERVFAIL, FakeDns
from tests.support.relay import HOSTNAME, LOOPBACK, Running, relay_with, settings
from tests.support.sink import Sink
from zonerelay.config.settings import (
    CredentialSettings,
    InDoubtAction,
    ListenerSettings,
    RetrySettings,
    SourceSettings,
    ZoneSettings,
)
from zonerelay.inbound.refusal import Reason
from zonerelay.message.dsn import DsnKind
from zonerelay.model.queue_name import queue_of
from zonerelay.telemetry.metrics.metrics import OUTCOMES

MESSAGE = b"From: app@example.org\r\nSubject: hello\r\n\r\nOne line.\r\n.A dot.\r\n"

PATIENT = RetrySettings(schedule=(30.0,), max_age=60.0)


def mx_zone(port: int, **changes: object) -> ZoneSettings:
    return ZoneSettings(port=port, allow_private_addresses=True, **changes)  # type: ignore[arg-type]  # as given


def report(body: bytes) -> dict[str, str]:
    """Human text, per-recipient fields and returned header of a DSN."""
    parsed = email.message_from_bytes(body, policy=email.policy.default)
    assert parsed.get_content_type() == "multipart/report"
    human, status, header = parsed.iter_parts()
    return {
        "from": str(parsed["From"]),
        "auto": str(parsed["Auto-Submitted"]),
        "human": human.get_content(),
        "status": status.as_string(),
        "header": header.as_string(),
    }


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


async def test_a_refused_recipient_is_reported_and_does_not_stop_the_others(
    tmp_path: Path, sink: Sink
) -> None:
    chosen = settings(tmp_path, zone=ZoneSettings(next_hop=f"{LOOPBACK}:{sink.port}"))
    async with relay_with(chosen) as running:
        await running.send("app@example.org", ["good@example.com", "reject-550@example.com"], MESSAGE)
        first, bounce = await sink.wait_for(2)
        await running.until_empty()
        assert first.recipients == ("good@example.com",)
        assert (bounce.mail_from, bounce.recipients) == ("", ("app@example.org",))
        told = report(bounce.body)
        assert told["from"].endswith(f"<MAILER-DAEMON@{HOSTNAME}>")
        assert told["auto"] == "auto-replied"
        assert "reject-550@example.com" in told["human"]
        assert "good@example.com" not in told["status"]
        assert "Status: 5.0.0" in told["status"]
        assert "Subject: hello" in told["header"]


async def test_null_mx_bounces_without_connecting_and_servfail_waits(tmp_path: Path, sink: Sink) -> None:
    zones = {
        "nomail.example": {"MX": ["0 ."]},
        "example.org": {"MX": ["10 mx.example.org"]},
        "mx.example.org": {"A": [LOOPBACK]},
    }
    async with (
        FakeDns(zones, {"broken.example": SERVFAIL}) as dns,
        relay_with(settings(tmp_path, zone=mx_zone(sink.port), dns=dns.address, retry=PATIENT)) as running,
    ):
        await running.send("app@example.org", ["a@nomail.example", "b@broken.example"], MESSAGE)
        (bounce,) = await sink.wait_for(1)
        assert "Status: 5.1.10" in report(bounce.body)["status"]
        await running.until_logged("deferred")
        await running.until(lambda: running.queued() == 1, what="one left")


async def test_a_private_address_is_refused_unless_the_zone_allows_it(tmp_path: Path, sink: Sink) -> None:
    zone = ZoneSettings(port=sink.port)
    async with (
        FakeDns({"example.com": {"A": [LOOPBACK]}}) as dns,
        relay_with(settings(tmp_path, zone=zone, dns=dns.address, retry=PATIENT)) as running,
    ):
        await running.send("app@example.org", ["a@example.com"], MESSAGE)
        (deferred, *_) = await running.until_logged("deferred")
        assert "private" in str(deferred["reply"])
        assert sink.connections == 0


async def test_connection_lost_after_the_final_dot_is_in_doubt(tmp_path: Path, sink: Sink) -> None:
    zone = ZoneSettings(next_hop=f"{LOOPBACK}:{sink.port}", in_doubt=InDoubtAction.HOLD)
    async with relay_with(settings(tmp_path, zone=zone)) as running:
        await running.send("app@example.org", ["close-after-dot@example.com"], MESSAGE)
        (deferred, *_) = await running.until_logged("deferred")
        assert deferred["in_doubt"] is True
        counts = running.worker.store.counts
        await running.until(lambda: counts()[queue_of("default")].held == 1, what="held")


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


async def test_restart_keeps_attempts_and_due_times(tmp_path: Path, sink: Sink) -> None:
    retry = RetrySettings(schedule=(1.0,), jitter=0.0, max_age=60.0)
    chosen = settings(tmp_path, zone=ZoneSettings(next_hop=f"{LOOPBACK}:{sink.port}"), retry=retry)
    async with relay_with(chosen) as running:
        await running.send("app@example.org", ["greylist@example.com"], MESSAGE)
        (deferred,) = await running.until_logged("deferred")
    async with relay_with(chosen) as running:
        assert running.queued() in (0, 1)  # counted in the background
        await sink.wait_for(1)
        await running.until_logged("delivered")
        (delivered,) = running.log.named("delivered")
        assert delivered["attempt"] == 2
        assert delivered["id"] == deferred["id"]
        age = delivered["age"]
        assert isinstance(age, float)
        assert 0.9 < age < 5


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
    chosen = replace(
        settings(tmp_path, zone=zone, listener=listener),
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
