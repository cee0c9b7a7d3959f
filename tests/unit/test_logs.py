"""Logs: lines, those about clients that are refused again and again, and transcripts."""

import asyncio
import base64
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from ipaddress import ip_network
from pathlib import Path
from typing import IO, Any  # Any: what json.loads gives

import pytest

from tests.support.event_log import EventLog, events_into
from tests.support.waiting import until
from zonerelay.config.settings import LogFormat
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import Delivery, queue_of
from zonerelay.model.envelope import Envelope, Mailbox, Message, MessageId, Origin, Recipient
from zonerelay.model.reply import Outcome, Reply, Verdict
from zonerelay.telemetry.events import transcript as recording
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.events.records import MailEvent, TranscriptLine
from zonerelay.telemetry.events.transcript import MAX_TRANSCRIPTS, BoundedStream, Transcripts
from zonerelay.telemetry.logs import logs
from zonerelay.telemetry.logs import logs as strangers
from zonerelay.telemetry.logs.logs import IN_FULL, LIMITED, MAX_FIELD, configure
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.metrics import Metrics

CLOCK = ManualClock(1_700_000_000.25)


class Lines:
    """A sink that writes to a file, and what has arrived there."""

    def __init__(self, file: IO[bytes], format: LogFormat = LogFormat.JSON, **options: Any) -> None:
        self.file = file
        self.sink = configure(format, clock=CLOCK, stream=file, **options)

    def text(self) -> str:
        return Path(self.file.name).read_text("utf-8")

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text().splitlines()]


@pytest.fixture
def lines(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Lines]:
    """In JSON, or in the format that a test is parametrised with."""
    with (tmp_path / "log").open("wb") as file:
        yield Lines(file, getattr(request, "param", LogFormat.JSON))


def our_handlers() -> list[logging.Handler]:
    return [h for h in logging.getLogger().handlers if type(h).__module__ == "zonerelay.telemetry.logs.logs"]


@pytest.fixture(autouse=True)
def _detached() -> Iterator[None]:
    """No later test may log into a file that this one has closed."""
    yield
    for handler in our_handlers():
        logging.getLogger().removeHandler(handler)


def test_an_event_is_one_json_line_with_time_level_and_event(lines: Lines) -> None:
    lines.sink.emit("info", "accepted", {"id": "x", "size": 3, "text": 'a "b"\n'})
    assert lines.events() == [
        {
            "time": "2023-11-14T22:13:20.250Z",
            "level": "info",
            "event": "accepted",
            "id": "x",
            "size": 3,
            "text": 'a "b"\n',
        }
    ]
    assert lines.text().count("\n") == 1


async def test_events_of_one_turn_of_the_loop_leave_together_at_its_end(lines: Lines) -> None:
    for number in range(3):
        lines.sink.emit("info", "e", {"n": number})
    assert lines.text() == ""
    await asyncio.sleep(0)
    assert [event["n"] for event in lines.events()] == [0, 1, 2]


def test_what_a_closed_loop_left_behind_is_written_at_exit(lines: Lines) -> None:
    async def crash() -> None:
        lines.sink.emit("info", "last", {})
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        asyncio.run(crash())
    lines.sink.close()
    assert [event["event"] for event in lines.events()] == ["last"]


def test_the_next_loop_still_writes_after_one_died_with_a_flush_scheduled(lines: Lines) -> None:
    async def emit_too_late() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: lines.sink.emit("info", "first", {}))

    loop = asyncio.new_event_loop()
    loop.run_until_complete(emit_too_late())
    loop.close()
    assert lines.text() == ""
    asyncio.run(_emit_and_wait(lines.sink))
    assert len(lines.events()) == 2


async def _emit_and_wait(sink: logs.LogWriter) -> None:
    sink.emit("info", "e", {})
    await asyncio.sleep(0)


@pytest.mark.parametrize("lines", [LogFormat.TEXT], indirect=True)
def test_text_format_is_for_eyes_and_quotes_what_could_mislead(lines: Lines) -> None:
    fields = {"a": "x", "b": "two words\nforged=1", "c": "", "d": None, "next_attempt": 1_700_000_060.25}
    lines.sink.emit("warning", "refused", fields)
    assert lines.text() == (
        '2023-11-14T22:13:20.250Z warning refused a=x b="two words\\nforged=1" '
        "next_attempt=2023-11-14T22:14:20Z\n"
    )


@pytest.mark.parametrize("lines", list(LogFormat), indirect=True)
def test_a_value_that_cannot_be_written_never_raises(lines: Lines) -> None:
    broken: dict[Any, Any] = {"half": "\ud800", "odd": object(), 3: b"\xff"}
    lines.sink.emit("info", "odd", broken)
    assert "odd" in lines.text()


def test_a_reader_that_is_behind_costs_lines_not_time() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as output, os.fdopen(writer, "wb") as file:
        sink = configure("json", clock=CLOCK, stream=file)
        for _ in range(3 * logs.MAX_BUFFERED // 1000):
            sink.emit("info", "e", {"text": "x" * 1000})
        assert sink.dropped > 0
        os.set_blocking(reader, False)
        received = b""
        while not sink.flush():
            received += output.read() or b""
        received += output.read() or b""
    events = [json.loads(line) for line in received.splitlines()]
    assert events[-1] == {**events[-1], "event": "log-dropped", "count": sink.dropped}
    assert len(events) - 1 + sink.dropped == 3 * logs.MAX_BUFFERED // 1000


class Interrupted(deque[bytes]):
    """Lines of a log into which another thread logs while they are taken out."""

    def __init__(self, emit: Callable[[], None]) -> None:
        super().__init__()
        self.thread = threading.Thread(target=emit)
        self._added = threading.Event()

    def append(self, line: bytes) -> None:
        super().append(line)
        self._added.set()

    def popleft(self) -> bytes:
        self._interrupt()
        return super().popleft()

    def clear(self) -> None:
        self._interrupt()
        super().clear()

    def _interrupt(self) -> None:
        if self.thread.ident is None:
            self._added.clear()
            self.thread.start()
            assert self._added.wait(10)


def test_no_line_is_lost_when_a_thread_logs_while_lines_are_written(lines: Lines) -> None:
    """And nothing is counted as buffered for ever: in the end that would drop all lines."""
    sink = lines.sink
    sink._lines = waiting = Interrupted(lambda: sink.emit("info", "second", {}))
    sink.emit("info", "first", {})
    waiting.thread.join(10)
    assert [event["event"] for event in lines.events()] == ["first", "second"]
    assert sink._buffered == 0


def test_a_line_longer_than_the_pipe_takes_arrives_whole() -> None:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as output, os.fdopen(writer, "wb") as file:
        sink = configure("json", clock=CLOCK, stream=file)
        sink.emit("info", "long", {f"text{number}": "x" * MAX_FIELD for number in range(12)})
        sink.emit("info", "next", {})
        os.set_blocking(reader, False)
        first, second = (output.read() or b"").splitlines()
    assert len(json.loads(first)["text11"]) == MAX_FIELD
    assert json.loads(second)["event"] == "next"


@pytest.mark.parametrize("text", ["x", "\x01", "€", '"', "\ud800", "\\"], ids=ascii)
@pytest.mark.parametrize("lines", list(LogFormat), indirect=True)
def test_whatever_a_field_quotes_the_line_has_a_limit(lines: Lines, text: str) -> None:
    lines.sink.emit("info", "deferred", {"id": "18f", "reply": text * 20_000, "host": text * 255})
    lines.sink.emit("info", "deferred", {f"field{number}": text * 20_000 for number in range(20)})
    lines.sink.flush()
    for line in lines.text().encode("utf-8", "surrogatepass").splitlines():
        assert len(line) <= logs.MAX_LINE
        assert b"0 characters)" in line or b"2 characters)" in line
    assert "18f" in lines.text()


def test_a_field_that_is_cut_off_says_how_long_it_was(lines: Lines) -> None:
    lines.sink.emit("info", "e", {"text": "x" * (MAX_FIELD + 1), "other": "y" * MAX_FIELD, "n": 10**30})
    lines.sink.flush()
    [event] = lines.events()
    assert event["text"] == "x" * MAX_FIELD + f"… ({MAX_FIELD + 1} characters)"
    assert event["other"] == "y" * MAX_FIELD


def test_a_reader_that_is_gone_does_not_stop_mail() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as file:
        sink = configure("json", clock=CLOCK, stream=file)
        sink.emit("info", "e", {})
    assert sink.dropped == 1


def test_pythons_logging_arrives_as_an_event_and_is_redacted(tmp_path: Path) -> None:
    redactor = Redactor(b"k" * 32, enabled=True)
    with (tmp_path / "log").open("wb") as file:
        lines = Lines(file, redact=redactor.text)
        try:
            raise ValueError("no such user alice@example.com")
        except ValueError:
            logging.getLogger("some.library").exception("failed for %s", "bob@example.com")
    (event,) = lines.events()
    assert (event["event"], event["level"], event["logger"]) == ("log", "error", "some.library")
    assert "ValueError" in event["traceback"]
    assert redactor.mailbox(Mailbox("alice@example.com")) in event["traceback"]
    assert "alice" not in lines.text()
    assert "bob" not in lines.text()


def test_a_librarys_bad_format_string_is_not_our_problem(lines: Lines) -> None:
    record = logging.LogRecord("some.library", logging.ERROR, "", 1, "%d", ("not a number",), None)
    our_handlers()[0].handle(record)
    (event,) = lines.events()
    assert (event["event"], event["logger"]) == ("log", "some.library")


def test_aiosmtpds_command_lines_are_not_logged(lines: Lines) -> None:
    logging.getLogger("mail.log").info("%r >> %r", "peer", b"MAIL FROM:<alice@example.com>")
    assert lines.text() == ""


def test_configuring_again_replaces_the_earlier_sink(lines: Lines, tmp_path: Path) -> None:
    with (tmp_path / "second").open("wb") as file:
        second = Lines(file)
        logging.getLogger("some.library").error("once")
        assert len(second.events()) == 1
    assert lines.text() == ""


def test_events_tell_the_life_of_a_message_without_naming_anybody(lines: Lines) -> None:
    events = Events(lines.sink, Metrics(), Redactor(b"k" * 32, enabled=True), CLOCK)
    alice, bob = Mailbox("alice@example.com"), Mailbox("bob@example.org")
    envelope = Envelope(
        id=MessageId("0" * 16),
        sender=alice,
        recipients=(Recipient(address=bob),),
        created=CLOCK.now() - 2,
        origin=Origin(client_address="192.0.2.77", user="shop"),
    )
    events.accepted(Message(envelope=envelope, size=4096, chunks=1), bare_lf=3)
    delivery = Delivery(
        queue=queue_of("default"), message_id=envelope.id, recipient=bob, created=envelope.created
    )
    refused = Outcome(Verdict.BOUNCED, Reply(550, "1.1", "<bob@example.org> unknown"), host="mx.example.org")
    events.attempted([(delivery, refused, None)], destination="d", seconds=0.5)
    events.refused(envelope.origin, "RCPT", Reply(550, "7.1", "no"), "relay-denied", mailbox=bob)
    events.operated("drop", 3, detail="recipient=bob@example.org")
    text = lines.text()
    assert [event["event"] for event in lines.events()] == ["accepted", "bounced", "refused", "operated"]
    assert lines.events()[1]["age"] == 2.0
    assert not any(secret in text for secret in ("alice", "bob", "192.0.2.77", "<bob"))


def test_trouble_says_where_it_was_raised(lines: Lines) -> None:
    events = Events(lines.sink, Metrics(), Redactor(b"k" * 32, enabled=True), CLOCK)
    try:
        int("x")
    except ValueError as error:
        events.error("courier", error)
    (event,) = lines.events()
    assert event["where"] == "courier"
    assert event["at"].startswith("test_logs.py:")


@pytest.mark.parametrize("event", LIMITED)
def test_what_clients_cause_at_will_has_few_lines_and_a_count(lines: Lines, event: str) -> None:
    """A stranger caused 2,400 `trouble` lines a second."""
    for _ in range(1000):
        lines.sink.emit("error", event, {LIMITED[event]: "admin-http", "error": "x"})
        lines.sink.emit("info", "accepted", {"id": "0"})
    lines.sink.emit("error", event, {LIMITED[event]: "another", "error": "x"})
    found = [each for each in lines.events() if each["event"] == event]
    assert len(found) == IN_FULL + 1
    assert sum(each["event"] == "accepted" for each in lines.events()) == 1000
    CLOCK.advance(logs.INTERVAL)
    lines.sink.emit("error", event, {LIMITED[event]: "admin-http"})
    (limited,) = [each for each in lines.events() if each["event"] == "log-limited"]
    assert (limited["of"], limited["kind"], limited["count"]) == (event, "admin-http", 1000 - IN_FULL)
    assert len([each for each in lines.events() if each["event"] == event]) == IN_FULL + 2
    for _ in range(IN_FULL + 4):
        lines.sink.emit("error", event, {LIMITED[event]: "admin-http"})
    lines.sink.close()
    assert [each["count"] for each in lines.events() if each["event"] == "log-limited"] == [1000 - IN_FULL, 5]


# The lines about clients that are refused again and again


DENIED = Reply(550, "7.1", "Relaying denied")


@pytest.fixture
def log() -> EventLog:
    return EventLog()


@pytest.fixture
def watched(log: EventLog) -> Events:
    return events_into(log, ManualClock())


def refuse(watched: Events, client: str, times: int, reason: str = "relay", *, stranger: bool = True) -> None:
    for _ in range(times):
        watched.refused(Origin(client_address=client, stranger=stranger), "RCPT", DENIED, reason)


def test_first_refusals_of_a_client_have_lines_and_others_are_counted(watched: Events, log: EventLog) -> None:
    refuse(watched, "192.0.2.1", 1000)
    refuse(watched, "192.0.2.1", 5, "syntax")
    for _ in range(7):
        watched.login("wrong", "192.0.2.1", user="app")
    refuse(watched, "192.0.2.2", 1)
    assert len(log.named("refused")) == IN_FULL + 1
    assert not log.named("refused-more")
    watched.close()
    [told] = log.named("refused-more")
    assert told == {
        "client": "192.0.2.1",
        "count": 1000 + 5 + 7 - IN_FULL,
        "reasons": f"relay {1000 - IN_FULL}, login-wrong 7, syntax 5",
    }
    refuse(watched, "192.0.2.1", 3)  # another interval
    assert len(log.named("refused")) == IN_FULL + 1 + 3
    assert watched.metrics.refused._numbers["relay",] == 1004


def test_log_ins_that_succeed_always_have_their_line(watched: Events, log: EventLog) -> None:
    for _ in range(100):
        watched.login("ok", "192.0.2.1", user="app")
    assert len(log.named("logged-in")) == 100


def test_many_refusals_have_so_many_lines_but_those_of_known_clients(watched: Events, log: EventLog) -> None:
    for number in range(logs.MAX_CLIENTS - 1):
        refuse(watched, f"10.0.{number // 250}.{number % 250}", 2)
    refuse(watched, "192.0.2.9", IN_FULL, stranger=False)
    for number in range(5000):
        refuse(watched, f"2001:db8::{number:x}", 1)
    assert len(log.named("refused")) == logs.ALL_IN_FULL + IN_FULL
    watched.close()
    told = log.named("refused-more")
    assert len(told) == logs.TOLD + 1
    assert sum(fields["count"] for fields in told) == 2 * (logs.MAX_CLIENTS - 1) + 5000 - logs.ALL_IN_FULL
    assert told[-1]["client"] == "others"


async def test_intervals_have_ends(watched: Events, log: EventLog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "INTERVAL", 0.02)
    refuse(watched, "192.0.2.1", IN_FULL + 1)
    await until(lambda: log.named("refused-more"), seconds=10)
    assert log.named("refused-more") == [{"client": "192.0.2.1", "count": 1, "reasons": "relay 1"}]


# What a transcript shows of a line, and when it ends; who follows the events sees all of them


SECRET = base64.b64encode(b"\0app\0correct horse").decode()


def running(*, octets: int = 10_000, sessions: int = 3) -> tuple[Transcripts, BoundedStream[TranscriptLine]]:
    transcripts, stream = Transcripts(ManualClock()), BoundedStream[TranscriptLine](100)
    networks = (ip_network("192.0.2.0/24"),)
    transcript = recording.RunningTranscript(
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
        ("RCPT TO:<" + "x" * 2000 + ">", "RCPT TO:<" + "x" * (recording.MAX_SHOWN - 9) + "… (2010 bytes)"),
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
        recording.RunningTranscript(BoundedStream(1), domain="x", octets=1, sessions=1)
        for _ in range(MAX_TRANSCRIPTS)
    ]
    assert [transcripts.start(each) for each in others] == [True] * (MAX_TRANSCRIPTS - 1) + [False]
    transcripts.stop(others[0])
    assert transcripts.start(others[-1])


async def test_a_follower_sees_every_event_that_the_log_has() -> None:
    log = EventLog()
    found = Events(log, Metrics(), Redactor(b"", enabled=False), ManualClock())
    stream: BoundedStream[MailEvent] = BoundedStream(100)
    found.follow(stream)
    found.zone_missing("old", 3)
    shown, _ = await stream.take()
    assert [(each.event, each.fields) for each in shown] == log.events
    found.leave(stream)
    found.webhook_restored("shop")
    assert log.events[-1][0] == "webhook-restored"
