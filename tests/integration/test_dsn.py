"""Wishes of senders in a whole relay: reports (RFC 3461), passed on to a peer with DSN, honoured elsewhere,
and mail that is held back (RFC 4865), also through a restart.
"""

import asyncio
import smtplib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.relay import LOOPBACK, Running, relay_with, settings
from tests.support.sink import Sink
from tests.support.sink_conversation import Manners
from tests.support.wishes import TEXT, Report, put, to
from zonerelay.config.settings import BounceSettings, TlsMode, ZoneSettings
from zonerelay.model.delivery import queue_of
from zonerelay.model.envelope import Notify, Ret

SUCCESS, FAILURE, DELAY, NEVER = Notify.SUCCESS, Notify.FAILURE, Notify.DELAY, Notify.NEVER


@asynccontextmanager
async def relay(directory: Path, **manners: bool) -> AsyncIterator[tuple[Running, Sink]]:
    """A relay whose next hop is the sink, for mail and for its own reports."""
    async with Sink(manners=Manners(**manners)) as sink:  # type: ignore[arg-type]  # the switches among them
        zone = ZoneSettings(next_hop=f"{LOOPBACK}:{sink.port}", tls=TlsMode.NONE)
        async with relay_with(settings(directory, zone=zone)) as running:
            yield running, sink


def kinds(running: Running) -> list[object]:
    return [event["kind"] for event in running.log.named("dsn")]


async def test_a_peer_with_dsn_is_told_everything_and_we_report_nothing(tmp_path: Path) -> None:
    async with relay(tmp_path, dsn=True) as (running, sink):
        wishes = [
            to("b@example.com", SUCCESS | FAILURE, "rfc822;Bee+2Bx@old.example"),
            to("c@example.com", NEVER),
        ]
        await put(running, wishes, ret=Ret.HDRS, envid="QQ+2B7")
        await sink.wait_for(1)
        await running.until_empty()
        assert "RET=HDRS ENVID=QQ+2B7" in sink.messages[0].parameters
        assert [line for line in sink.commands if line.startswith("RCPT")] == [
            "RCPT TO:<b@example.com> NOTIFY=SUCCESS,FAILURE ORCPT=rfc822;Bee+2Bx@old.example",
            "RCPT TO:<c@example.com> NOTIFY=NEVER ORCPT=rfc822;c@example.com",
        ]
        assert len(sink.messages) == 1
        assert not kinds(running)


async def test_for_a_peer_without_dsn_success_is_reported_to_who_asked(tmp_path: Path) -> None:
    async with relay(tmp_path) as (running, sink):
        wishes = [
            to("b@example.com", SUCCESS, "rfc822;Bee+2Bx@old.example"),
            to("c@example.com", FAILURE),
            to("d@example.com"),
            to("e@example.com", SUCCESS | FAILURE | DELAY),
        ]
        about = await put(running, wishes, ret=Ret.FULL, envid="QQ+2B7")
        mail, dsn = await sink.wait_for(2)
        await running.until_empty()
        assert "ENVID" not in mail.parameters
        assert not any("NOTIFY" in line or "ORCPT" in line for line in sink.commands)
        assert (dsn.mail_from, dsn.recipients) == ("", ("app@example.org",))
        report = Report(dsn.body)
        assert report.message["Original-Envelope-Id"] == "QQ+7"
        assert [each["Final-Recipient"] for each in report.recipients] == [
            "rfc822; b@example.com",
            "rfc822; e@example.com",
        ]
        assert [each.get("Original-Recipient") for each in report.recipients] == [
            "rfc822; Bee+x@old.example",
            None,
        ]
        assert {each["Action"] for each in report.recipients} == {"relayed"}
        assert {each["Status"] for each in report.recipients} == {"2.0.0"}
        assert report.returned.get_content_type() == "text/rfc822-headers"
        assert b"The body." not in dsn.body
        (event,) = running.log.named("dsn")
        assert (event["kind"], event["about"], event["recipients"]) == ("relayed", about, 2)


async def test_a_peer_with_dsn_that_refuses_leaves_the_report_of_the_failure_to_us(tmp_path: Path) -> None:
    async with relay(tmp_path, dsn=True) as (running, sink):
        wishes = [to("reject-550@example.com", SUCCESS | FAILURE), to("b@example.com", SUCCESS)]
        await put(running, wishes, ret=Ret.FULL, envid="E1")
        mail, dsn = await sink.wait_for(2)
        await running.until_empty()
        assert mail.recipients == ("b@example.com",)
        report = Report(dsn.body)
        assert [(each["Final-Recipient"], each["Action"]) for each in report.recipients] == [
            ("rfc822; reject-550@example.com", "failed")
        ]
        assert "Original-Recipient" not in report.recipients[0]
        assert report.returned.get_content_type() == "message/rfc822"
        assert TEXT in dsn.body
        # The report itself carries no wishes (RFC 3461 6.1).
        assert "RCPT TO:<app@example.org>" in sink.commands
        assert "RET" not in dsn.parameters
        assert "ENVID" not in dsn.parameters


async def test_what_no_host_takes_comes_back_in_a_report_that_they_take(tmp_path: Path) -> None:
    async with relay(tmp_path, eight_bit_mime=False) as (running, sink):
        await running.send("app@example.org", ["a@example.com"], TEXT)  # a host that takes mail is believed
        await sink.wait_for(1)
        signed = b"DKIM-Signature: v=1; d=example.org; b=x\r\n" + TEXT  # which is not converted
        text = signed.replace(b"Subject: ", "Subject: Grüße ".encode()) + "Grüße.\r\n".encode()
        await put(running, [to("b@example.com", FAILURE)], ret=Ret.FULL, text=text)
        _, dsn = await sink.wait_for(2)
        assert dsn.body.isascii()
        report = Report(dsn.body)
        assert report.recipients[0]["Status"] == "5.6.3"
        assert report.returned.get_content_type() == "text/rfc822-headers"


async def test_addresses_beyond_ascii_are_passed_on_and_reported_as_rfc_6533_says(tmp_path: Path) -> None:
    orcpt = r"utf-8;j\x{FC}rgen@old.example"
    async with relay(tmp_path / "with", dsn=True) as (running, sink):
        await put(running, [to("jürgen@example.com", SUCCESS, orcpt)], sender="ä@example.org")
        (mail,) = await sink.wait_for(1)
        assert "SMTPUTF8" in mail.parameters
        assert f"RCPT TO:<jürgen@example.com> NOTIFY=SUCCESS ORCPT={orcpt}" in sink.commands
    async with relay(tmp_path / "without") as (running, sink):
        await put(running, [to("jürgen@example.com", SUCCESS, orcpt)], sender="ä@example.org")
        _, dsn = await sink.wait_for(2)
        report = Report(dsn.body)
        assert report.status_type == "message/global-delivery-status"
        assert dsn.recipients == ("ä@example.org",)
        assert "SMTPUTF8" in dsn.parameters


# Mail that its sender holds back.


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
        assert 0 <= delivered["age"] < 1.0
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


async def test_a_client_that_asks_for_a_later_time_wakes_an_idle_relay(tmp_path: Path, sink: Sink) -> None:
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
