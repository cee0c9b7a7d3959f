"""Server and client over a real Unix socket; the handler is a small fake."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from tests.support.control import control_socket, sent
from zonerelay.admin import peers
from zonerelay.admin.api import verbs
from zonerelay.control.client import ControlClient
from zonerelay.control.runner import ResponseStream
from zonerelay.operations import answers as messages
from zonerelay.operations.answers import ChangeResult, Count, DeliveryRow, EndFrame, Frame, Pong
from zonerelay.operations.errors import ControlError, ForbiddenError, NotFoundError, NotRunningError
from zonerelay.operations.requests import (
    Hold,
    Ping,
    QueueChange,
    QueueList,
    QueueShow,
    QueueTrace,
    Request,
    Resolve,
    Resume,
    Selectors,
    Status,
    Suspend,
)


def row(number: int) -> DeliveryRow:
    return DeliveryRow(
        message_id=f"{number:016x}",
        zone="default",
        sender="a@example.org",
        recipient=f"user{number}@example.com",
        domain="example.com",
        state="ready",
        created=1.0,
        attempts=0,
        next_attempt=0.0,
    )


class Fake:
    """Answers like a relay; `slow` waits until `go` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.changed = asyncio.Event()
        self.shown = asyncio.Event()
        self.left = asyncio.Event()
        self.rows = 3

    async def handle(self, request: Request, answer: ResponseStream) -> EndFrame:
        match request:
            case Ping():
                await answer.send(Pong(software="test", pid=1))
            case QueueList():
                for number in range(self.rows):
                    await answer.send(row(number))
                    answer.done += 1
                return EndFrame(count=self.rows)
            case QueueTrace():
                await self._look_again(answer)
            case QueueShow():
                raise NotFoundError("no such message")
            case QueueChange() | Suspend() | Resume():
                await self.go.wait()
                self.changed.set()
                await answer.send(ChangeResult(action="hold", matched=1, changed=1, busy=0))
            case Status():
                try:
                    await self.go.wait()
                except asyncio.CancelledError:
                    self.cancelled.set()
                    raise
            case _:
                raise RuntimeError("a secret that stays in the log")
        return EndFrame()

    async def _look_again(self, answer: ResponseStream) -> None:
        """Something to read, until the client has left."""
        await answer.send(row(0))
        self.shown.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()


class Relay:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.handler = Fake()
        self.faults: list[BaseException] = []
        self.server = control_socket(path, self.handler, self._trouble)
        self.client = ControlClient(path, timeout=5)

    def _trouble(self, where: str, error: BaseException) -> None:
        assert where == "control"
        self.faults.append(error)

    async def ask(self, request: Request) -> list[Frame]:
        return await asyncio.to_thread(lambda: list(self.client.stream(request)))


@pytest.fixture
async def relay(tmp_path: Path) -> AsyncIterator[Relay]:
    relay = Relay(tmp_path / "control.sock")
    await relay.server.start()
    yield relay
    await relay.server.close()


async def raw(path: Path, data: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    await writer.wait_closed()
    return answer


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    await asyncio.wait_for(condition(), 5)


async def test_a_question_gets_its_frames_and_then_the_end(relay: Relay) -> None:
    assert await relay.ask(Ping()) == [Pong(software="test", pid=1), EndFrame()]


async def test_a_list_arrives_row_by_row(relay: Relay) -> None:
    frames = await relay.ask(QueueList())
    assert frames == [row(0), row(1), row(2), EndFrame(count=3)]


async def test_a_list_longer_than_every_buffer_arrives_whole(relay: Relay) -> None:
    relay.handler.rows = 5000
    frames = await relay.ask(QueueList())
    assert len(frames) == 5001
    assert frames[-1] == EndFrame(count=5000)


async def test_the_socket_is_for_its_owner_only(relay: Relay) -> None:
    assert stat.S_IMODE(relay.path.stat().st_mode) == 0o600


async def test_what_is_not_found_is_told_apart(relay: Relay) -> None:
    with pytest.raises(NotFoundError, match="no such message"):
        await relay.ask(QueueShow(message_id="0" * 16))


async def test_a_question_that_is_no_text_is_refused_in_words(relay: Relay) -> None:
    """A shell passes on octets that are not UTF-8."""
    with pytest.raises(ControlError, match="not valid UTF-8"):
        await relay.ask(QueueShow(message_id="\udcff"))


async def test_an_unexpected_error_is_answered_blandly_and_reported(relay: Relay) -> None:
    with pytest.raises(ControlError, match="unexpected RuntimeError") as caught:
        await relay.ask(Resolve(pseudonym="u-x"))
    assert "secret" not in str(caught.value)
    assert [str(error) for error in relay.faults] == ["a secret that stays in the log"]
    assert (await relay.ask(Ping()))[-1] == EndFrame()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"nonsense\r\n\r\n", "400"),
        (b"GET /v1/teleport HTTP/1.1\r\nHost: localhost\r\n\r\n", "not_found"),
        (b"GET /v1/status?more=1 HTTP/1.1\r\nHost: localhost\r\n\r\n", "invalid"),
        (b"POST /v1/queue/burn HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n", "not_found"),
        (b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n", "not_found"),
    ],
)
async def test_a_bad_request_is_refused_in_words(relay: Relay, line: bytes, words: str) -> None:
    reader, writer = await asyncio.open_unix_connection(str(relay.path))
    writer.write(line)
    answer = await asyncio.wait_for(reader.read(4096), 5)
    writer.close()
    assert words in answer.decode()


async def test_other_users_are_refused(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "caller", lambda connection: (4711, 4711, "mallory"))
    with pytest.raises(ForbiddenError, match="mallory"):
        await relay.ask(Ping())


async def ask_and_leave(relay: Relay, request: Request) -> None:
    _, writer = await asyncio.open_unix_connection(str(relay.path))
    writer.write(sent(request))
    await writer.drain()
    writer.close()
    await writer.wait_closed()


async def test_a_client_that_vanishes_ends_its_question(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "HEARTBEAT", 0.01)
    await ask_and_leave(relay, Status())
    await until(relay.handler.cancelled.wait)
    assert (await relay.ask(Ping()))[-1] == EndFrame()


@pytest.mark.parametrize(
    "request_", [Hold(everything=True), Suspend(about=Selectors(everything=True)), Resume(id="a1b2c3d4")]
)
async def test_a_client_that_vanishes_does_not_stop_its_change_half_way(
    relay: Relay, request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verbs, "HEARTBEAT", 0.01)
    await ask_and_leave(relay, request_)
    await asyncio.sleep(0.05)
    relay.handler.go.set()
    await until(relay.handler.changed.wait)


def test_a_client_that_has_read_enough_is_no_trouble(tmp_path: Path) -> None:
    """Who leaves octets unread resets the connection, and uvloop's transports are gone for good then."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_read_enough(tmp_path / "control.sock"))


async def _read_enough(path: Path) -> None:
    relay = Relay(path)
    strays: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: strays.append(context))
    await relay.server.start()
    client = socket.socket(socket.AF_UNIX)
    with client:
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, str(path))
        await asyncio.get_running_loop().sock_sendall(client, sent(QueueTrace(message_id="0" * 16)))
        await until(relay.handler.shown.wait)
    await until(relay.handler.left.wait)
    assert (await relay.ask(Ping()))[-1] == EndFrame()
    await relay.server.close()
    assert (relay.faults, strays) == ([], [])


async def test_long_work_shows_progress(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs, "HEARTBEAT", 0.01)
    loop, frames = asyncio.get_running_loop(), list[Frame]()

    def ask() -> None:
        for frame in relay.client.stream(Status()):
            frames.append(frame)
            loop.call_soon_threadsafe(relay.handler.go.set)

    await asyncio.to_thread(ask)
    assert frames[0] == messages.Progress(done=0)
    assert frames[-1] == EndFrame()


async def test_a_client_that_does_not_read_holds_up_nobody(relay: Relay) -> None:
    relay.handler.rows = 20_000
    idle = socket.socket(socket.AF_UNIX)
    with idle:
        idle.setblocking(False)
        await asyncio.get_running_loop().sock_connect(idle, str(relay.path))
        await asyncio.get_running_loop().sock_sendall(idle, sent(QueueList()))
        for _ in range(3):
            assert (await relay.ask(Ping()))[-1] == EndFrame()


async def test_more_clients_than_the_limit_are_told_to_wait(
    relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "MAX_CLIENTS", 1)
    _, writer = await asyncio.open_unix_connection(str(relay.path))
    writer.write(sent(Status()))
    await asyncio.sleep(0.05)
    with pytest.raises(ControlError, match="try again"):
        await relay.ask(Ping())
    writer.close()
    await writer.wait_closed()


async def test_a_silent_client_is_let_go(relay: Relay, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "REQUEST_TIMEOUT", 0.02)
    assert await raw(relay.path, b"") == b""


async def test_closing_removes_the_socket_and_drops_clients(tmp_path: Path) -> None:
    relay = Relay(tmp_path / "control.sock")
    await relay.server.start()
    asking = asyncio.create_task(relay.ask(Status()))
    await asyncio.sleep(0.05)
    await relay.server.close()
    with pytest.raises(ControlError, match="closed the connection before"):
        await asking
    assert not relay.path.exists()
    with pytest.raises(NotRunningError, match="zonerelay serve"):
        await relay.ask(Ping())


async def test_a_socket_left_by_a_crash_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as crashed:
        crashed.bind(str(path))
    with pytest.raises(NotRunningError):
        list(ControlClient(path).stream(Ping()))
    relay = Relay(path)
    await relay.server.start()
    assert (await relay.ask(Ping()))[-1] == EndFrame()
    await relay.server.close()


async def test_a_running_relays_socket_is_not_taken_away(relay: Relay) -> None:
    second = control_socket(relay.path, Fake(), lambda where, error: None)
    with pytest.raises(ControlError, match="another relay is listening"):
        await second.start()
    assert (await relay.ask(Ping()))[-1] == EndFrame()


async def test_a_file_in_the_way_is_not_deleted(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    path.write_text("precious")
    with pytest.raises(ControlError, match="not a socket"):
        await control_socket(path, Fake(), lambda where, error: None).start()
    assert path.read_text() == "precious"


async def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "control.sock"
    with pytest.raises(ControlError, match="directory"):
        await control_socket(path, Fake(), lambda where, error: None).start()


async def test_a_successors_socket_survives_the_close_of_its_predecessor(relay: Relay) -> None:
    relay.path.unlink()
    successor = Relay(relay.path)
    await successor.server.start()
    await relay.server.close()
    assert (await successor.ask(Ping()))[-1] == EndFrame()
    await successor.server.close()


async def test_ask_wants_the_frame_it_was_promised(relay: Relay) -> None:
    with pytest.raises(ControlError, match="contains no Count"):
        await asyncio.to_thread(relay.client.ask, Ping(), Count)
