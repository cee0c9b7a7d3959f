"""A real relay and a real client: blind copies do not show; other addresses and SRS come with a SIGHUP."""

from __future__ import annotations

import asyncio
import email
import re
import signal
import smtplib
from email.message import EmailMessage
from pathlib import Path

import pytest

from tests.support.ports import LOOPBACK
from tests.support.process import RelayProcess
from tests.support.sink import Sink

RULE = """
[[rewrite]]
address = ["old.example"]
to = "@new.example"
"""
SRS = """
[srs]
domain = "srs.example"
secret = "env:SRS_SECRET"
"""


def message() -> EmailMessage:
    made = EmailMessage()
    made["From"] = "Jürgen, App <app@old.example>"
    made["To"] = '"Ann (x)" <ann@old.example>, Bob <bob@x.example>'
    made["Bcc"] = "Cat <cat@x.example>, dog@x.example"
    made["Return-Path"] = "<somebody@x.example>"
    made["Subject"] = "Grüße"
    made.set_content("Hello ann@old.example\n" * 100)
    return made


def submit(relay: RelayProcess, *, by_chunks: bool = False) -> None:
    """`sendmail`, because `send_message` takes Bcc out itself."""
    recipients = ["ann@old.example", "bob@x.example", "cat@x.example", "dog@x.example"]
    octets = message().as_bytes().replace(b"\n", b"\r\n")
    with smtplib.SMTP(LOOPBACK, relay.smtp_port, timeout=10) as client:
        if not by_chunks:
            client.sendmail("app@old.example", recipients, octets)
            return
        client.ehlo()
        client.mail("app@old.example")
        for recipient in recipients:
            client.rcpt(recipient)
        client.send(b"BDAT 40\r\n" + octets[:40] + b"BDAT %d LAST\r\n" % len(octets[40:]) + octets[40:])
        assert [client.getreply()[0] for _ in range(2)] == [250, 250]


def hang_up(relay: RelayProcess, old: str, new: str) -> None:
    reloads = len(relay.events("reloaded"))
    text = relay.config.read_text()
    assert text.count(old) == 1
    relay.config.write_text(text.replace(old, new))
    relay.signal(signal.SIGHUP)
    relay.wait_for(lambda: len(relay.events("reloaded")) > reloads, what="reloaded")


@pytest.mark.parametrize("by_chunks", [False, True], ids=["DATA", "BDAT"])
async def test_blind_copies_do_not_show(tmp_path: Path, sink: Sink, by_chunks: bool) -> None:
    with RelayProcess(tmp_path / "relay", next_hop=f"{LOOPBACK}:{sink.port}") as relay:
        await asyncio.to_thread(submit, relay, by_chunks=by_chunks)
        async with asyncio.timeout(20):
            while sum(len(each.recipients) for each in sink.messages) < 4:
                await asyncio.sleep(0.02)
    for received in sink.messages:
        header, _, body = received.body.partition(b"\r\n\r\n")
        assert re.search(rb"^(?:bcc|return-path)", header, re.IGNORECASE | re.MULTILINE) is None
        assert b"dog" not in header
        sent, got = message(), email.message_from_bytes(received.body)
        for name in ("From", "To", "Subject", "Content-Type"):
            assert got[name] == email.message_from_bytes(sent.as_bytes())[name]
        assert body.replace(b"\r\n", b"\n") == sent.as_bytes().partition(b"\n\n")[2]


async def test_other_addresses_and_srs_are_taken_up_by_a_running_relay(tmp_path: Path, sink: Sink) -> None:
    relay = RelayProcess(
        tmp_path / "relay",
        next_hop=f"{LOOPBACK}:{sink.port}",
        environment={"SRS_SECRET": "a secret of some length"},
    )
    with relay:
        await asyncio.to_thread(hang_up, relay, "[admin]", f"{RULE}\n[admin]")
        await asyncio.to_thread(submit, relay)
        async with asyncio.timeout(20):
            while sum(len(each.recipients) for each in sink.messages) < 4:
                await asyncio.sleep(0.02)
        assert {each.mail_from for each in sink.messages} == {"app@new.example"}
        assert "ann@new.example" in {name for each in sink.messages for name in each.recipients}
        got = email.message_from_bytes(sink.messages[0].body)
        assert got["From"].endswith(" <app@new.example>")
        assert got["To"] == '"Ann (x)" <ann@new.example>, Bob <bob@x.example>'

        sink.messages.clear()
        await asyncio.to_thread(hang_up, relay, RULE, SRS)
        await asyncio.to_thread(hang_up, relay, 'tls = "none"', 'tls = "none"\nsrs = true')
        with smtplib.SMTP(LOOPBACK, relay.smtp_port, timeout=10) as client:
            await asyncio.to_thread(
                client.sendmail, "ann@first.example", ["b@x.example"], b"Subject: x\r\n\r\n"
            )
        (forwarded,) = await sink.wait_for(1)
        assert forwarded.mail_from.startswith("SRS0=")
        listener = f'address = "{LOOPBACK}:{relay.smtp_port}"'
        await asyncio.to_thread(hang_up, relay, listener, f"{listener}\nallow_networks = []")
        with smtplib.SMTP(LOOPBACK, relay.smtp_port, timeout=10) as client:
            await asyncio.to_thread(client.ehlo)
            assert (await asyncio.to_thread(client.mail, ""))[0] == 250
            assert (await asyncio.to_thread(client.rcpt, "ann@first.example"))[0] == 550
            assert (await asyncio.to_thread(client.rcpt, "SRS0=aaaa=AA=first.example=ann@srs.example"))[
                0
            ] == 550
            assert (await asyncio.to_thread(client.rcpt, forwarded.mail_from))[0] == 250
            assert (await asyncio.to_thread(client.data, b"Subject: failed\r\n\r\n"))[0] == 250
        report = (await sink.wait_for(2))[1]
        assert (report.mail_from, report.recipients) == ("", ("ann@first.example",))
        assert relay.events("trouble") == []
