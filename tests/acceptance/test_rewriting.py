"""A real relay and a real client: blind copies do not show."""

from __future__ import annotations

import email
import re
import smtplib
from email.message import EmailMessage
from pathlib import Path

import pytest

from tests.support.ports import LOOPBACK
from tests.support.process import RelayProcess
from tests.support.sink import Sink


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


@pytest.mark.parametrize("by_chunks", [False, True], ids=["DATA", "BDAT"])
def test_blind_copies_do_not_show(tmp_path: Path, sink: Sink, by_chunks: bool) -> None:
    with RelayProcess(tmp_path / "relay", next_hop=f"{LOOPBACK}:{sink.port}") as relay:
        submit(relay, by_chunks=by_chunks)
        sink.until_recipients(4)
    for received in sink.messages:
        header, _, body = received.body.partition(b"\r\n\r\n")
        assert re.search(rb"^(?:bcc|return-path)", header, re.IGNORECASE | re.MULTILINE) is None
        assert b"dog" not in header
        sent, got = message(), email.message_from_bytes(received.body)
        for name in ("From", "To", "Subject", "Content-Type"):
            assert got[name] == email.message_from_bytes(sent.as_bytes())[name]
        assert body.replace(b"\r\n", b"\n") == sent.as_bytes().partition(b"\n\n")[2]
