"""What a transcript shows of a line, and when it ends; who follows the events sees all of them."""

from __future__ import annotations

import base64
from ipaddress import ip_network

import pytest

from tests.support.mail import Log
from zonerelay.model.clock import ManualClock
from zonerelay.telemetry.events import events
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.events.records import MailEvent, TranscriptLine
from zonerelay.telemetry.events.transcript import (
    MAX_SHOWN,
    MAX_TRANSCRIPTS,
    BoundedStream,
    RunningTranscript,
    Transcripts,
)
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.metrics import Metrics

SECRET = base64.b64encode(b"\0app\0correct horse").decode()


def running(*, octets: int = 10_000, sessions: int = 3) -> tuple[Transcripts, BoundedStream[TranscriptLine]]:
    transcripts, stream = Transcripts(ManualClock()), BoundedStream[TranscriptLine](100)
    networks = (ip_network("192.0.2.0/24"),)
    transcript = RunningTranscript(
        stream, networks=networks, domain="example.com", octets=octets, sessions=sessions
    )
    assert transcripts.start(transcript)
    return transcripts, stream


async def told(stream: BoundedStream[TranscriptLine]) -> list[str]:
    return [f"{line.direction} {line.text}" for line in (await stream.take())[0]]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("MAIL FROM:<a b@example.org> SIZE=10 RET=HDRS", "MAIL FROM:<a b@example.org> SIZE=10 RET=HDRS"),
        ("ehlo\x1b[2Jx", "(9 bytes not shown)"),
        ("EHLO \x1b[2Jx", "EHLO ␛[2Jx"),
        ("AUTH PLAIN " + SECRET, f"AUTH PLAIN ({len(SECRET)} bytes not shown)"),
        ("auth login", "auth login"),
        ("AUTH " + SECRET, f"({len(SECRET) + 5} bytes not shown)"),
        ("AUTH=PLAIN " + SECRET, f"({len(SECRET) + 11} bytes not shown)"),
        (SECRET, f"({len(SECRET)} bytes not shown)"),
        ("XCLIENT ADDR=192.0.2.1 LOGIN=app HELO=x", "XCLIENT ADDR=192.0.2.1 LOGIN=(not shown) HELO=x"),
        ("Authorization: Bearer abc", "(25 bytes not shown)"),
        ("data and much more of a letter", "(30 bytes not shown)"),
        ("RCPT TO:<" + "x" * 2000 + ">", "RCPT TO:<" + "x" * (MAX_SHOWN - 9) + "… (2010 bytes)"),
    ],
    ids=lambda value: value[:20].encode("ascii", "backslashreplace").decode(),
)  # fmt: skip
async def test_a_line_of_a_client_is_shown_where_it_is_a_command(line: str, shown: str) -> None:
    transcripts, stream = running()
    record = transcripts.inbound("192.0.2.9")
    assert record is not None
    record.command(line.encode())
    assert (await told(stream))[1:] == [f"received {shown}"]


async def test_chunks_and_messages_are_counted_and_not_shown() -> None:
    transcripts, stream = running()
    record = transcripts.outbound({"mx.test", "Example.COM."}, "", "192.0.2.1:25")
    assert record is not None
    record.commands(b"MAIL FROM:<>\r\nBDAT 12\r\nQUIT\r\nsec")
    record.commands(b"retBDAT 3 LAST\r\nabc")
    record.replies(b"250 2.0.0 ok\r\n250 2.0")
    record.replies(b".0 ok\r\n")
    record.commands(b"DATA\r\n")
    record.replies(b"354 go on\r\n")
    record.commands(b"QUIT\r\nthe text\r\n.\r\n")
    record.replies(b"250 2.0.0 queued\r\n")
    record.command(b"AUTH PLAIN " + SECRET.encode())
    record.replies(b"535 5.7.8 not " + SECRET.encode() + b"\r\n")
    assert (await told(stream))[1:] == [
        "sent MAIL FROM:<>",
        "sent BDAT 12",
        "sent BDAT 3 LAST",
        "received 250 2.0.0 ok",
        "received 250 2.0.0 ok",
        "sent DATA",
        "received 354 go on",
        "note the message as sent: 19 bytes, not shown",
        "received 250 2.0.0 queued",
        f"sent AUTH PLAIN ({len(SECRET)} bytes not shown)",
        f"received 535 ({len(SECRET) + 10} bytes not shown)",
    ]


async def test_a_transcript_ends_with_its_octets_and_its_sessions() -> None:
    transcripts, stream = running(octets=100)
    record = transcripts.inbound("192.0.2.9")
    assert record is not None
    assert transcripts.inbound("192.0.2.9", record) is record
    assert transcripts.inbound("198.51.100.1") is None
    for _ in range(10):
        record.command(b"RCPT TO:<someone@example.com>")
    assert len(await told(stream)) < 6
    assert "number of bytes" in stream.why
    transcripts, stream = running(sessions=2)
    assert [transcripts.inbound(f"192.0.2.{host}") is None for host in range(3)] == [False, False, True]
    assert "sessions" in stream.why


async def test_few_transcripts_run_at_a_time() -> None:
    transcripts, _ = running()
    others = [
        RunningTranscript(BoundedStream(1), domain="x", octets=1, sessions=1) for _ in range(MAX_TRANSCRIPTS)
    ]
    assert [transcripts.start(each) for each in others] == [True] * (MAX_TRANSCRIPTS - 1) + [False]
    transcripts.stop(others[0])
    assert transcripts.start(others[-1])


async def test_a_follower_sees_every_event_that_the_log_has() -> None:
    log = Log()
    found = Events(log, Metrics(), Redactor(b"", enabled=False), ManualClock())
    stream: BoundedStream[MailEvent] = BoundedStream(100)
    found.follow(stream)
    found.sts.failed("a.example", "no certificate", kept_until=None)
    found.limits.lost("authority", "gone")
    found.name_servers.lost("192.0.2.53", "timed out")
    found.smarthosts.refused("default", "login", "mx.example", "535 no")
    found.webhooks.failing("shop", "timed out")
    found.zone_missing("old", 3)
    seen, _ = await stream.take()
    assert [(each.event, each.fields) for each in seen] == log.events
    classes = [each for name, each in vars(events).items() if name.endswith("Events")]
    assert len(log.events) == len(classes), "a new class of events has a line above"
    found.leave(stream)
    found.webhooks.restored("shop")
    assert log.events[-1][0] == "webhook-restored"
