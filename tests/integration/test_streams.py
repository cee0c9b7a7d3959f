"""What operators read along: the tail of events, and transcripts of sessions, of one worker and of two."""

import asyncio
import base64
import smtplib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import aiohttp
import pytest

from tests.support.certificates import DAY, make
from tests.support.control import Workers, control_socket
from tests.support.credentials import file_of, user
from tests.support.holding_peer import Hold, HoldingPeer
from tests.support.relay import LOOPBACK, MemoryLog, Running, relay_with, settings
from tests.support.smarthost import SMARTHOST_PASSWORD as PASSWORD
from tests.support.smarthost import Smarthost
from tests.support.tls_client import trusting
from tests.support.waiting import until
from zonerelay.admin.http import ControlSocket
from zonerelay.config import settings as options
from zonerelay.config.settings import AuthSettings, ListenerAuth, ListenerTls, Settings, TlsMode, ZoneSettings
from zonerelay.control.client import written
from zonerelay.control.socket import CallSocket, control_socket_path
from zonerelay.control.streams import EVENTS_ROOM, LiveStreams
from zonerelay.model.clock import SystemClock
from zonerelay.operations import answers as messages
from zonerelay.operations.answers import DeliveryRow, EndFrame, Frame, StreamGap
from zonerelay.operations.catalogue import OperationCall
from zonerelay.operations.errors import ControlError
from zonerelay.operations.requests import QueueList, Request, Tail, Transcript
from zonerelay.supervisor.merge.fan_out import FanOut
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.events.records import MailEvent, TranscriptLine
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.metrics import Metrics

BODY = "the text of the message"
MESSAGE = f"Subject: hello\r\n\r\n{BODY}\r\nQUIT\r\n".encode()


@dataclass
class Reader:
    """Reads an answer as it comes."""

    found: list[Frame] = field(default_factory=list)

    async def read(self, path: Path, request: Request) -> None:
        with suppress(asyncio.CancelledError):
            method, target, body = written(request)
            fields = {"Accept": "application/x-ndjson"}
            async with (
                aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as session,
                session.request(method, f"http://localhost{target}", data=body, headers=fields) as response,
            ):
                async for line in response.content:
                    self.found.append(messages.decode_frame(line))

    async def until(self, condition: Callable[[], bool]) -> None:
        await until(condition)

    def events(self) -> list[tuple[str, str]]:
        named = [each for each in self.found if isinstance(each, MailEvent)]
        return [(each.event, str(each.fields.get("recipient") or each.fields.get("to"))) for each in named]

    def text(self) -> str:
        marks = {"received": "<", "sent": ">", "note": "*"}
        lines = [each for each in self.found if isinstance(each, TranscriptLine)]
        return "\n".join(f"{line.side} {marks[line.direction]} {line.text}" for line in lines)


@asynccontextmanager
async def reading(path: Path, request: Request, begun: Callable[[], bool]) -> AsyncIterator[Reader]:
    reader = Reader()
    task = asyncio.create_task(reader.read(path, request))
    try:
        await reader.until(lambda: begun() or task.done())
        yield reader
    finally:
        task.cancel()
        await task


def socket_of(running: Running) -> Path:
    return control_socket_path(running.worker.settings)


def tailed(running: Running) -> Callable[[], bool]:
    return lambda: bool(running.worker.events._followers)


def recorded(running: Running) -> Callable[[], bool]:
    return lambda: running.worker.events.transcripts.on


def configured(directory: Path, next_hop: str) -> Settings:
    """Clients may log in, and the zone does."""
    directory.mkdir(exist_ok=True)
    (directory / "password").write_text(f"{PASSWORD}\n")
    (directory / "credentials").write_text(file_of(user("app", PASSWORD)))
    chosen = settings(
        directory,
        zone=ZoneSettings(next_hop=next_hop, tls=TlsMode.VERIFY, credentials=("main",)),
        listener=options.ListenerSettings(
            address=f"{LOOPBACK}:0",
            auth=ListenerAuth.OPTIONAL,
            unsafe=(options.UnsafeListener.CLEARTEXT_AUTH,),
        ),
        retry=options.RetrySettings(jitter=0.0, suspend_min=600.0, suspend_max=600.0),
    )
    credential = options.CredentialSettings(name="main", user="relay", password=str(directory / "password"))
    return replace(chosen, credential=(credential,), auth=AuthSettings(credentials=directory / "credentials"))


async def test_a_tail_tells_what_its_filter_asks_for(tmp_path: Path, smarthost: Smarthost) -> None:
    async with relay_with(configured(tmp_path, f"{LOOPBACK}:{smarthost.port}")) as running:
        path = socket_of(running)
        events = running.worker.events
        to_net = Tail(domain="example.net", event="deliv*")
        async with (
            reading(path, Tail(sender="a@example.org"), lambda: len(events._followers) == 1) as by_sender,
            reading(path, to_net, lambda: len(events._followers) == 2) as to,
        ):
            await running.send("a@example.org", ["b@example.com"], MESSAGE)
            await running.send("c@example.org", ["d@example.net"], MESSAGE)
            await running.until_empty()
            await by_sender.until(lambda: len(by_sender.events()) >= 2)
            await to.until(lambda: bool(to.events()))
            # What became of the message has no sender in its line, and is told all the same.
            assert by_sender.events() == [("accepted", "b@example.com"), ("delivered", "b@example.com")]
            assert to.events() == [("delivered", "d@example.net")]
        assert events.emit == events._log or await _left(events)  # without a reader it costs nothing


async def _left(events: Events) -> bool:
    await until(lambda: not events._followers)
    return events.emit == events._log


class Gathered:
    """Takes frames when it is let."""

    caller = "test"

    def __init__(self) -> None:
        self.call = OperationCall(request=Tail())
        self.frames: list[Frame] = []
        self.may_take = asyncio.Event()

    async def send(self, frame: Frame) -> None:
        self.frames.append(frame)
        await self.may_take.wait()


async def test_a_slow_reader_is_told_what_it_misses_and_searches_by_pseudonym() -> None:
    redactor = Redactor(b"key", enabled=True)
    events = Events(MemoryLog(), Metrics(), redactor, SystemClock())
    streams, answer = LiveStreams(events, redactor), Gathered()
    with pytest.raises(ControlError, match="redact = false shows addresses"):
        await streams.tail(Tail(sender="a*@example.org"), answer)  # type: ignore[arg-type]
    reading = asyncio.create_task(streams.tail(Tail(address="app"), answer))  # type: ignore[arg-type]
    while not events._followers:
        await asyncio.sleep(0)
    events.login("ok", "192.0.2.1", user="app")
    while not answer.frames:
        await asyncio.sleep(0)  # the reader is at its first frame, and takes no more now
    for _ in range(EVENTS_ROOM + 7):
        events.login("ok", "192.0.2.1", user="other")
    events.login("ok", "192.0.2.1", user="app")
    answer.may_take.set()
    await until(lambda: len(answer.frames) >= 2)
    shown, missed = answer.frames
    assert isinstance(shown, MailEvent)
    assert shown.fields["user"] == "app"
    assert missed == StreamGap(count=8)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert events.emit == events._log


async def test_a_transcript_has_lines_without_secrets_or_text(tmp_path: Path, smarthost: Smarthost) -> None:
    def submit(address: tuple[str, int]) -> None:
        with smtplib.SMTP(*address, timeout=20) as client:
            client.login("app", PASSWORD)
            client.sendmail("a@example.org", ["b@example.com"], MESSAGE)
            client.docmd("AUTH LOGIN", base64.b64encode(b"app").decode())
            client.docmd(base64.b64encode(PASSWORD.encode()).decode())  # after 503 it is no answer
            client.docmd("XCLIENT", "LOGIN=secretive")

    async with relay_with(configured(tmp_path, f"{LOOPBACK}:{smarthost.port}")) as running:
        path = socket_of(running)
        domain = Transcript(domain="EXAMPLE.com")
        async with (
            reading(path, Transcript(client="127.0.0.0/8"), recorded(running)) as inbound,
            reading(path, domain, lambda: len(running.log.named("transcript-begun")) == 2) as outbound,
        ):
            await asyncio.to_thread(submit, running.address)
            await running.until_empty()
            await inbound.until(lambda: "the connection was closed" in inbound.text())
            await outbound.until(lambda: "message accepted" in outbound.text())
        [begun, _] = running.log.named("transcript-begun")
        assert begun["of"] == "127.0.0.0/8"
        assert begun["seconds"] == 300
        assert begun["by"]
        said, done = inbound.text(), outbound.text()
        assert "inbound < mail FROM:<a@example.org> size=" in said
        assert f"inbound * the message: {len(MESSAGE)} bytes, not shown" in said
        assert "inbound > 250 2.0.0 OK queued as" in said
        assert "inbound < AUTH LOGIN (" in said
        assert "inbound < XCLIENT LOGIN=(not shown)" in said
        assert "outbound < 220 smarthost ESMTP" in done
        assert "outbound > EHLO relay.test" in done
        assert "outbound > STARTTLS" in done
        assert "outbound * encrypted with TLSv1.3" in done
        assert "outbound > AUTH PLAIN (" in done
        assert "outbound < 235 (" in done
        assert "outbound > RCPT TO:<b@example.com>" in done
        assert "outbound * the message as sent:" in done
        assert "outbound < 250 2.0.0 message accepted" in done
        secrets = [f"{user}{PASSWORD}".encode() for user in ("", "\0app\0", "\0relay\0")]
        hidden = [BODY, PASSWORD, "secretive", *(base64.b64encode(each).decode() for each in secrets)]
        assert [each for each in hidden if each in said or each in done] == []
        await running.until(lambda: not running.worker.events.transcripts.on, what="the end of transcripts")


@pytest.mark.parametrize(
    ("hold", "phase"),
    [
        (Hold.GREETING, "a connection to"),
        (Hold.RCPT, "RCPT of"),
        (Hold.DATA, "DATA of"),
        (Hold.END, "the reply to the final dot of"),
    ],
)
async def test_a_host_that_hangs_is_shown_with_its_phase_also_by_a_transcript_that_begins_late(
    tmp_path: Path, hold: Hold, phase: str
) -> None:
    host = HoldingPeer([hold])
    await host.start()
    zone = ZoneSettings(next_hop=f"{LOOPBACK}:{host.port}")
    async with relay_with(settings(tmp_path, zone=zone)) as running:
        await running.send("a@example.org", ["b@example.com"], MESSAGE)
        await host.until_held()
        (row,) = await running.rows(QueueList(), DeliveryRow)
        assert row.state == "active"
        assert row.phase.startswith(phase)
        assert f"[{LOOPBACK}:{host.port}]" in row.phase
        assert (row.phase_seconds > 10) is (hold is not Hold.GREETING)
        if hold is not Hold.GREETING:
            wanted = Transcript(domain="example.com")
            async with reading(socket_of(running), wanted, recorded(running)) as late:
                await late.until(lambda: "outbound * waits " in late.text())
                assert f" for {phase.removesuffix(' of')}" in late.text()
                host.release()
                await late.until(lambda: "outbound < 250 2.0.0 message accepted" in late.text())
                assert BODY not in late.text()
        host.release()
        await running.until_empty()
    await host.close()


@pytest.mark.parametrize("tls", [ListenerTls.STARTTLS, ListenerTls.IMPLICIT])
async def test_a_transcript_goes_on_in_tls(tmp_path: Path, smarthost: Smarthost, tls: ListenerTls) -> None:
    now = time.time()
    certificate, key = make("relay.test", starts=now - DAY, ends=now + DAY).write(tmp_path, "relay")
    chosen = configured(tmp_path, f"{LOOPBACK}:{smarthost.port}")
    here = replace(chosen.listener[0], tls=tls, certificate=(certificate,), key=(key,), unsafe=())

    def submit(host: str, port: int) -> None:
        is_implicit = tls is ListenerTls.IMPLICIT
        opened = smtplib.SMTP_SSL(host, port, context=trusting()) if is_implicit else smtplib.SMTP(host, port)
        with opened as client:
            if not is_implicit:
                client.starttls(context=trusting())
            client.login("app", PASSWORD)
            client.sendmail("a@example.org", ["b@example.com"], MESSAGE)

    async with relay_with(replace(chosen, listener=(here,))) as running:
        begun = Transcript(client=LOOPBACK)
        async with reading(socket_of(running), begun, recorded(running)) as transcript:
            await asyncio.to_thread(submit, *running.address)
            await transcript.until(lambda: "the connection was closed" in transcript.text())
        said = transcript.text()
        assert said.count("> 220 relay.test ESMTP") == 1
        assert "* encrypted with TLSv1.3" in said
        assert "< AUTH PLAIN (" in said
        assert "> 235 2.7.0" in said
        assert said.count("queued as") == 1
        assert PASSWORD not in said


async def test_several_workers_are_one_stream(tmp_path: Path, smarthost: Smarthost) -> None:
    host = f"{LOOPBACK}:{smarthost.port}"
    async with (
        relay_with(configured(tmp_path / "0", host)) as one,
        relay_with(configured(tmp_path / "1", host)) as other,
    ):
        both = (one, other)
        places = {number: tmp_path / f"worker-{number}.sock" for number in range(2)}
        trouble = one.worker.events.error
        servers: list[CallSocket | ControlSocket] = [
            CallSocket(places[number], each.worker.handler, on_error=trouble)
            for number, each in enumerate(both)
        ]
        servers.append(control_socket(tmp_path / "both.sock", FanOut(Workers(places)), trouble))
        for server in servers:
            await server.start()
        path = tmp_path / "both.sock"
        watched = Transcript(client=LOOPBACK, seconds=3.0)
        async with (
            reading(path, Tail(event="accepted"), lambda: all(tailed(each)() for each in both)) as tail,
            reading(path, watched, lambda: all(recorded(each)() for each in both)) as transcript,
        ):
            for each in both:
                await each.send("a@example.org", ["b@example.com"], MESSAGE)
            await tail.until(lambda: len(tail.events()) == 2)
            assert {frame.worker for frame in tail.found if isinstance(frame, MailEvent)} == {0, 1}
            await transcript.until(lambda: isinstance(transcript.found[-1], EndFrame))
            lines = [frame for frame in transcript.found if isinstance(frame, TranscriptLine)]
            assert {line.worker for line in lines} == {0, 1}
            assert {each.why for each in transcript.found if isinstance(each, StreamGap)} == {
                "the time limit of the transcript was reached"
            }
        assert {each.log.named("transcript-begun")[0]["by"] for each in both} != {""}
        for server in reversed(servers):
            await server.close()
