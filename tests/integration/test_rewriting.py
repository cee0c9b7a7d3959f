"""Other addresses in a running relay: routes know them, reports name those given; rules change."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import smtplib
import time
from dataclasses import replace
from pathlib import Path

from dkim.canonicalization import Relaxed

from tests.support.dkim import PEMS
from tests.support.relay import LOOPBACK, QUICK, Running, relay_with, settings
from tests.support.sink import Sink
from zonerelay.config.settings import (
    DkimSettings,
    ListenerSettings,
    RetrySettings,
    RewriteScope,
    RewriteSettings,
    RouteSettings,
    Settings,
    SrsSettings,
    ZoneSettings,
)
from zonerelay.message.srs import Srs
from zonerelay.model.address import Mailbox
from zonerelay.model.message_id import MessageId
from zonerelay.operations.requests import QueueTrace
from zonerelay.telemetry.events.records import TraceStep

MESSAGE = (
    b"From: App <app@old.example>\r\nTo: ann@old.example\r\nBcc: x@y.example\r\nSubject: x\r\n\r\n"
    b"hello \t x\r\n"
)
MOVED = RewriteSettings(address=("old.example",), to="@new.example")
STANDSTILL = RetrySettings(schedule=(3600.0,), suspend_min=3000.0, suspend_max=3600.0)
NOWHERE = ZoneSettings(next_hop=f"{LOOPBACK}:1")


def to_sink(sink: Sink, name: str = "default", *, srs: bool = False) -> ZoneSettings:
    return ZoneSettings(name=name, next_hop=f"{LOOPBACK}:{sink.port}", srs=srs)


async def test_routes_and_queue_know_the_other_addresses_and_the_header_has_them(
    tmp_path: Path, sink: Sink
) -> None:
    zones = (NOWHERE, to_sink(sink, "new"))
    routes = (RouteSettings(recipient=("ann@new.example",), header=("From: app@new",), zone="new"),)
    chosen = settings(tmp_path, zone=zones, route=routes, rewrite=(MOVED,))
    async with relay_with(chosen) as running:
        await running.send("app@old.example", ["ann@old.example"], MESSAGE)
        (received,) = await sink.wait_for(1)
        assert (received.mail_from, received.recipients) == ("app@new.example", ("ann@new.example",))
        assert b"\r\nFrom: App <app@new.example>\r\nTo: ann@new.example\r\nSubject: x\r\n" in received.body
        assert b"Bcc" not in received.body
        found = await running.explain("ann@old.example", sender="app@old.example")
        assert [(each.what, each.becomes, each.by) for each in found.rewritten] == [
            ("sender", "app@new.example", "rewrite=1"),
            ("recipient", "ann@new.example", "rewrite=1"),
        ]
        assert (found.address, found.sender, found.domain) == (
            "ann@old.example",
            "app@old.example",
            "new.example",
        )


async def test_a_report_names_the_recipient_that_the_sender_knows(tmp_path: Path, sink: Sink) -> None:
    rules = (
        RewriteSettings(
            address=("ann@old.example",), to="permerror@new.example", where=RewriteScope.RECIPIENT
        ),
    )
    chosen = settings(tmp_path, zone=to_sink(sink), rewrite=rules)
    async with relay_with(chosen) as running:
        await running.send("app@x.example", ["ann@old.example"], b"Subject: x\r\n\r\nx\r\n")
        (report,) = await sink.wait_for(1)
        assert (report.mail_from, report.recipients) == ("", ("app@x.example",))
        assert b"\r\nOriginal-Recipient: rfc822; ann@old.example\r\n" in report.body
        assert b"\r\nFinal-Recipient: rfc822; permerror@new.example\r\n" in report.body


async def test_the_trace_names_the_rules(tmp_path: Path) -> None:
    chosen = settings(tmp_path, zone=NOWHERE, retry=STANDSTILL, rewrite=(MOVED,))
    async with relay_with(chosen) as running:
        await running.send("app@old.example", ["ann@old.example", "bob@x.example"], MESSAGE)
        (accepted,) = await running.until_logged("accepted")
        steps = await running.rows(QueueTrace(message_id=str(accepted["id"])), TraceStep)
        texts = " | ".join(step.text for step in steps)
        assert "rewritten sender rewrite=1: app@new.example" in texts
        assert "rewritten recipient rewrite=1: ann@new.example" in texts
        assert "rewritten header rewrite=1" in texts


async def test_other_rules_are_for_sessions_that_begin_later(tmp_path: Path, sink: Sink) -> None:
    chosen = settings(tmp_path, zone=to_sink(sink), rewrite=(MOVED,))
    async with relay_with(chosen) as running:
        before = await asyncio.to_thread(smtplib.SMTP, *running.address, timeout=10)

        async def old_session() -> None:
            await asyncio.to_thread(before.sendmail, "app@old.example", ["ann@old.example"], MESSAGE)

        await old_session()
        other = replace(MOVED, to="@other.example")
        current = running.worker.settings
        await running.worker.reload(replace(current, rewrite=(other,)))
        assert list(running.worker.problems) == []
        await old_session()
        await running.send("app@old.example", ["ann@old.example"], MESSAGE)
        assert (await running.explain("ann@old.example")).domain == "other.example"
        await running.worker.reload(replace(current, rewrite=(replace(MOVED, address=("a..b",)),)))
        (problem,) = running.worker.problems
        assert 'rewrite[0]: "a..b" cannot be matched' in problem
        await running.send("app@old.example", ["ann@old.example"], MESSAGE)
        await running.worker.reload(replace(current, rewrite=()))
        await running.send("app@old.example", ["ann@old.example"], MESSAGE)
        received = await sink.wait_for(5)
        domains = sorted(each.recipients[0].partition("@")[2] for each in received)
        assert domains == ["new.example"] * 2 + ["old.example"] + ["other.example"] * 2
        await asyncio.to_thread(before.quit)


# Reports to senders that SRS has made.


def with_srs(directory: Path, sink: Sink) -> Settings:
    secret = directory / "srs.secret"
    secret.write_text("a secret of some length\n")
    return settings(
        directory, zone=to_sink(sink, srs=True), srs=SrsSettings(domain="srs.example", secret=str(secret))
    )


async def rcpt(running: Running, recipient: str) -> int:
    def talk() -> int:
        with smtplib.SMTP(*running.address, timeout=10) as client:
            client.ehlo()
            client.mail("")
            return client.rcpt(recipient)[0]

    return await asyncio.to_thread(talk)


async def test_a_report_to_a_sender_that_we_made_comes_back_to_the_first_one(
    tmp_path: Path, sink: Sink
) -> None:
    chosen = with_srs(tmp_path, sink)
    async with relay_with(chosen) as running:
        await running.send("ann@first.example", ["bob@x.example"], MESSAGE)
        (forwarded,) = await sink.wait_for(1)
        assert forwarded.mail_from.startswith("SRS0=")
        strangers = replace(running.worker.settings.listener[0], allow_networks=())
        await running.worker.reload(replace(running.worker.settings, listener=(strangers,)))
        assert await rcpt(running, "ann@first.example") == 550
        await running.send("", [forwarded.mail_from], b"Subject: failed\r\n\r\nx\r\n")
        report = (await sink.wait_for(2))[1]
        assert (report.mail_from, report.recipients) == ("", ("ann@first.example",))
        found = await running.explain(forwarded.mail_from)
        assert [(each.becomes, each.by) for each in found.rewritten] == [("ann@first.example", "srs")]
        wrong = await running.explain("SRS0=aaaa=AA=first.example=ann@srs.example")
        assert wrong.rewritten[0].problem == "rejected with 550 5.1.1: old form"


async def test_srs_is_switched_on_and_off_and_keeps_to_a_secret_that_works(
    tmp_path: Path, sink: Sink
) -> None:
    chosen = with_srs(tmp_path, sink)
    strangers = ListenerSettings(address=f"{LOOPBACK}:0", allow_networks=())
    off = replace(chosen, srs=SrsSettings(), zone=(to_sink(sink),), listener=(strangers,))
    async with relay_with(off) as running:

        async def reload(srs: SrsSettings) -> None:
            await running.worker.reload(replace(running.worker.settings, srs=srs))

        await reload(chosen.srs)
        srs = running.worker.sending.srs
        assert srs is not None
        address = srs.forward(Mailbox("ann@first.example"), running.worker.clock.now())
        assert await rcpt(running, address) == 250
        missing = tmp_path / "none"
        await reload(replace(chosen.srs, secret=str(missing)))
        assert "cannot be read" in running.worker.problems[0]
        assert await rcpt(running, address) == 250
        missing.write_text("another secret of some length")
        await reload(replace(chosen.srs, secret=str(missing), old_secrets=(chosen.srs.secret,)))
        assert await rcpt(running, address) == 250
        await reload(replace(chosen.srs, secret=str(missing)))
        assert await rcpt(running, address) == 550
        await reload(SrsSettings())
        assert await rcpt(running, address) == 550


VICTIM = "victim@third.example"
GONE = "reply-550-5.1.1@first.example"
FULL = "reply-552-5.2.2@first.example"


async def test_what_a_next_hop_refuses_of_strangers_is_reported_to_no_third_person(
    tmp_path: Path, sink: Sink
) -> None:
    chosen = with_srs(tmp_path, sink)
    chosen = replace(chosen, listener=(ListenerSettings(address=f"{LOOPBACK}:0", allow_networks=()),))
    srs = Srs(chosen.srs, ["a secret of some length"])
    gone, full = (srs.forward(Mailbox(each), time.time()) for each in (GONE, FULL))
    closed = replace(chosen.zone[0], next_hop=f"{LOOPBACK}:1")
    quick = replace(QUICK, suspend_min=0.1, suspend_max=0.2)
    async with relay_with(replace(chosen, zone=(closed,), retry=quick)) as running:
        await running.send(VICTIM, [gone, full], MESSAGE)
        await running.until_logged("deferred", 2)
    # Another process goes on with it: what is known of the client is in the queue.
    async with relay_with(replace(chosen, retry=quick)) as running:
        await running.until_empty()
        assert len(running.log.named("bounced")) == 2
        assert [event["reason"] for event in running.log.named("no-dsn")] == ["stranger"]
        assert 'zonerelay_dsn_withheld_total{reason="stranger"} 1.0' in running.metrics()
        assert not running.log.named("dsn")
        # What is about the recipient is said to the next one; what is about that message is not.
        assert (await rcpt(running, gone), await rcpt(running, full)) == (550, 250)
        assert running.log.named("refused")[-1]["detail"] == "the next hop rejects it: 550 5.1.1"
        await running.send("", [full], MESSAGE)
        await running.until_logged("no-dsn", 2)


async def test_strangers_get_no_address_of_ours_for_the_sender_that_they_name(
    tmp_path: Path, sink: Sink
) -> None:
    """It would let them write to that person, and have the next host's reports sent there."""
    chosen = with_srs(tmp_path, sink)
    chosen = replace(chosen, listener=(ListenerSettings(address=f"{LOOPBACK}:0", allow_networks=()),))
    own = Srs(chosen.srs, ["a secret of some length"]).forward(Mailbox("mallory@evil.example"), time.time())
    async with relay_with(chosen) as running:
        await running.send(VICTIM, [own], MESSAGE)
        (received,) = await sink.wait_for(1)
        assert (received.mail_from, received.recipients) == ("", ("mallory@evil.example",))


# The body's hash.


async def stored_hash(running: Running) -> str:
    """Of the message that was accepted last."""
    accepted = running.log.named("accepted")[-1]
    return (await running.worker.store.read_message(MessageId(str(accepted["id"])))).body_hash


async def test_the_bodys_hash_is_stored_while_there_are_keys_and_outlives_a_restart(tmp_path: Path) -> None:
    key = tmp_path / "rsa.pem"
    key.write_bytes(PEMS["rsa.pem"]())
    signing = (DkimSettings(domain="new.example", selector="s", key_file=key),)
    chosen = settings(tmp_path, zone=NOWHERE, retry=STANDSTILL)
    form = Relaxed.canonicalize_body(b"hello \t x\r\n")
    wanted = base64.b64encode(hashlib.sha256(form).digest()).decode()
    async with relay_with(chosen) as running:
        await running.send("app@old.example", ["ann@old.example"], MESSAGE)
        assert await stored_hash(running) == ""
        await running.worker.reload(replace(running.worker.settings, dkim=signing))
        await running.send("app@old.example", ["ann@old.example"], MESSAGE)
        assert await stored_hash(running) == wanted
        kept = MessageId(str(running.log.named("accepted")[-1]["id"]))
        await running.worker.reload(replace(running.worker.settings, dkim=()))
        await running.send("app@old.example", ["ann@old.example"], MESSAGE)
        assert await stored_hash(running) == ""
    async with relay_with(chosen) as running:
        assert (await running.worker.store.read_message(kept)).body_hash == wanted
