from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any  # Any: what json.loads gives

import pytest

from zonerelay.config.settings import LogFormat
from zonerelay.model.address import Mailbox
from zonerelay.model.clock import ManualClock
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Envelope, Message, Origin, Recipient
from zonerelay.model.message_id import MessageId
from zonerelay.model.outcome import Outcome, Verdict
from zonerelay.model.queue_name import queue_of
from zonerelay.model.reply import Reply
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.logs.logs import (
    IN_FULL,
    INTERVAL,
    LIMITED,
    MAX_BUFFERED,
    MAX_FIELD,
    MAX_LINE,
    LogWriter,
    configure,
)
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


async def _emit_and_wait(sink: LogWriter) -> None:
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
        for _ in range(3 * MAX_BUFFERED // 1000):
            sink.emit("info", "e", {"text": "x" * 1000})
        assert sink.dropped > 0
        os.set_blocking(reader, False)
        received = b""
        while not sink.flush():
            received += output.read() or b""
        received += output.read() or b""
    events = [json.loads(line) for line in received.splitlines()]
    assert events[-1] == {**events[-1], "event": "log-dropped", "count": sink.dropped}
    assert len(events) - 1 + sink.dropped == 3 * MAX_BUFFERED // 1000


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
        assert len(line) <= MAX_LINE
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
    CLOCK.advance(INTERVAL)
    lines.sink.emit("error", event, {LIMITED[event]: "admin-http"})
    (limited,) = [each for each in lines.events() if each["event"] == "log-limited"]
    assert (limited["of"], limited["kind"], limited["count"]) == (event, "admin-http", 1000 - IN_FULL)
    assert len([each for each in lines.events() if each["event"] == event]) == IN_FULL + 2
    for _ in range(IN_FULL + 4):
        lines.sink.emit("error", event, {LIMITED[event]: "admin-http"})
    lines.sink.close()
    assert [each["count"] for each in lines.events() if each["event"] == "log-limited"] == [1000 - IN_FULL, 5]
