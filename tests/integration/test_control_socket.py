"""Server and client over a real Unix socket; the handler is a small fake, or the server answers badly."""

import asyncio
import contextlib
import json
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import pytest
import uvloop

from tests.support.control import control_socket, sent
from zonerelay.admin import peers
from zonerelay.admin.api import verbs
from zonerelay.control.client import ControlClient, written
from zonerelay.control.runner import ResponseStream, Runner
from zonerelay.operations import answers, errors, requests
from zonerelay.operations import answers as messages
from zonerelay.operations.answers import EndFrame, Frame, Pong
from zonerelay.operations.catalogue import OPERATIONS
from zonerelay.operations.errors import ControlError, NotFoundError, NotRunningError
from zonerelay.operations.requests import Ping, QueueList, QueueShow, QueueTrace, Request, Status, Tail


def row(number: int) -> answers.DeliveryRow:
    return answers.DeliveryRow(
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
            case requests.QueueCat():
                await answer.send(answers.MessageBody(message_id=request.message_id, sender="", size=100))
                await answer.send(answers.BodyPiece(octets=b"its beginning"))
                raise ControlError("the disk is broken")
            case Tail():
                await answer.send(answers.StreamGap(count=7))
                raise ControlError("worker 1 has ended")
            case Status():
                await self.go.wait()
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


async def test_an_unexpected_error_is_answered_blandly_and_reported(relay: Relay) -> None:
    with pytest.raises(ControlError, match="unexpected RuntimeError") as caught:
        await relay.ask(requests.Resolve(pseudonym="u-x"))
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
    with pytest.raises(errors.ForbiddenError, match="mallory"):
        await relay.ask(Ping())


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


async def test_requests_beyond_the_limit_must_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runner.__init__, "__kwdefaults__", {"most": 1})
    relay = Relay(tmp_path / "control.sock")
    await relay.server.start()
    _, writer = await asyncio.open_unix_connection(str(relay.path))
    writer.write(sent(QueueTrace(message_id="0" * 16)))
    await until(relay.handler.shown.wait)
    with pytest.raises(ControlError, match="try again"):
        await relay.ask(Ping())
    writer.close()
    await writer.wait_closed()
    await relay.server.close()


async def test_the_reason_for_the_end_of_an_event_stream_is_its_last_event(relay: Relay) -> None:
    answer = await raw(relay.path, b"GET /v1/tail HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.index(b'"count":7') < answer.index(b'"why":"worker 1 has ended"')
    assert answer.endswith(b"0\r\n\r\n")


async def test_a_body_that_ends_early_looks_broken(relay: Relay) -> None:
    path = f"/v1/queue/messages/{'0' * 16}/body"
    answer = await raw(
        relay.path, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    )
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.endswith(b"its beginning\r\n")


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


# ---- the client against servers that answer well, badly, or not at all ------------------------------


OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\nTransfer-Encoding: chunked\r\n\r\n"
COUNT = b'{"kind":"count","matched":3}\n'
END = b'{"kind":"end","count":1}\n'

Serve = Callable[..., list[bytes]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control.sock"


@pytest.fixture
def serve(path: Path) -> Iterator[Serve]:
    """Answers one request with some pieces, and then closes the connection, or says nothing more."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    done = threading.Event()
    threads: list[threading.Thread] = []

    def start(*pieces: bytes, hang: bool = False) -> list[bytes]:
        heard: list[bytes] = []

        def answer() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                heard.append(connection.recv(65536))
                for piece in pieces:
                    connection.sendall(piece)
                if hang:
                    done.wait(20)

        threads.append(threading.Thread(target=answer, daemon=True))
        threads[-1].start()
        return heard

    yield start
    done.set()
    for thread in threads:
        thread.join(5)
    listener.close()


def asked(path: Path, request: requests.Request | None = None) -> Sequence[Frame]:
    return list(ControlClient(path, timeout=0.5).stream(request or requests.QueueCount()))


def test_frames_come_however_they_are_cut(path: Path, serve: Serve) -> None:
    lines = b'{"kind":"progress","done":1,"total":2}\n' + COUNT + END
    heard = serve(OK, *(chunk(lines[at : at + 7]) for at in range(0, len(lines), 7)), b"0\r\n\r\n")
    assert asked(path) == [answers.Progress(done=1, total=2), answers.Count(matched=3), EndFrame(count=1)]
    head = heard[0].decode()
    assert head.startswith("GET /v1/queue/count HTTP/1.1\r\nHost: localhost\r\n")
    assert "\r\nAccept: application/x-ndjson\r\n" in head


def test_what_comes_behind_the_end_is_not_awaited(path: Path, serve: Serve) -> None:
    serve(OK, chunk(COUNT + END), hang=True)
    assert asked(path)[-1] == EndFrame(count=1)


@pytest.mark.parametrize(
    "pieces", [(), (OK,), (OK, chunk(COUNT)), (OK, chunk(COUNT), b"0\r\n\r\n"), (OK, b"50\r\n{")]
)
def test_an_answer_that_is_cut_is_an_error(path: Path, serve: Serve, pieces: tuple[bytes, ...]) -> None:
    serve(*pieces)
    with pytest.raises(ControlError, match="closed the connection before"):
        asked(path)


@pytest.mark.parametrize("pieces", [(), (OK, chunk(COUNT))])
def test_a_relay_that_is_silent_is_in_trouble(path: Path, serve: Serve, pieces: tuple[bytes, ...]) -> None:
    serve(*pieces, hang=True)
    with pytest.raises(ControlError, match="not responded"):
        asked(path)


def test_a_failure_in_the_middle_is_raised_behind_what_came_before(path: Path, serve: Serve) -> None:
    serve(OK, chunk(COUNT + b'{"kind":"problem","code":"invalid","detail":"no","pointer":"/by"}\n'))
    frames = ControlClient(path).stream(requests.QueueCount())
    assert next(frames) == answers.Count(matched=3)
    with pytest.raises(errors.InvalidError, match=r"^no$") as caught:
        next(frames)
    assert caught.value.pointer == "/by"


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (
            "404 Not Found",
            b'{"code":"not_found","detail":"no message","status":404}',
            NotFoundError,
            "no message",
        ),
        ("418 Teapot", b'{"code":"teapot","detail":"short and stout"}', ControlError, "short and stout"),
        ("502 Bad", b"<html>", ControlError, "HTTP status 502"),
    ],
)
def test_a_failure_has_its_type_and_its_words(
    path: Path, serve: Serve, status: str, body: bytes, error: type[ControlError], words: str
) -> None:
    serve(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    with pytest.raises(error, match=words):
        asked(path)


def test_another_protocol_is_not_taken_for_an_answer(path: Path, serve: Serve) -> None:
    serve(b'{"kind":"failure","text":"not a request"}\n')
    with pytest.raises(ControlError, match="speaks another protocol"):
        asked(path)
    serve(OK, chunk(b'{"kind":"news"}\n'))
    with pytest.raises(ControlError, match="response is not valid"):
        asked(path)


def test_no_relay_and_no_permission_are_told_apart(path: Path) -> None:
    with pytest.raises(NotRunningError, match="zonerelay serve"):
        asked(path)
    with socket.socket(socket.AF_UNIX) as crashed:
        crashed.bind(str(path))
    with pytest.raises(NotRunningError, match="zonerelay serve"):
        asked(path)
    path.chmod(0)
    look = (
        "import os, sys, pathlib; from zonerelay.control.client import ControlClient;"
        "from zonerelay.operations import requests; os.geteuid() or os.setuid(65534);"
        "list(ControlClient(pathlib.Path(sys.argv[1])).stream(requests.Ping()))"
    )
    ran = subprocess.run([sys.executable, "-c", look, str(path)], capture_output=True, text=True, check=False)
    assert "ControlError: no permission to use" in ran.stderr


def test_what_is_no_text_is_refused_in_words(path: Path) -> None:
    for wanted in (
        requests.QueueList(filter=requests.Filter(domain="\udcff")),
        requests.Explain(address="\udcff"),
    ):
        with pytest.raises(ControlError, match="not valid UTF-8"):
            asked(path, wanted)


def test_one_answer_is_what_was_promised(path: Path, serve: Serve) -> None:
    serve(OK, chunk(COUNT + END))
    with pytest.raises(ControlError, match="contains no Pong"):
        ControlClient(path).ask(requests.Ping(), Pong)


def test_a_request_is_written_by_its_description() -> None:
    wanted = requests.Filter(sender="", domain="a&b", min_age=60.0)
    assert written(requests.QueueSummary(filter=wanted, exact=True)) == (
        "GET", "/v1/queue/summary?sender=&domain=a%26b&min_age=60.0&exact=true", None,
    )  # fmt: skip
    method, target, body = written(requests.Hold(filter=wanted, reason="é"))
    assert (method, target) == ("POST", "/v1/queue/hold")
    assert json.loads(body or b"") == {
        "filter": {"sender": "", "domain": "a&b", "min_age": 60.0}, "reason": "é",
    }  # fmt: skip
    assert written(requests.Undo(undoes="a/b")) == ("POST", "/v1/acts/a%2Fb/undo", b"{}")


def test_every_command_asks_over_http() -> None:
    assert [each.name for each in OPERATIONS if each.command and not each.path] == []
