"""The command line's client of `/v1/` against servers that answer well, badly, or not at all."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from zonerelay.control.client import ControlClient, written
from zonerelay.operations import requests
from zonerelay.operations.answers import Count, EndFrame, Frame, Pong, Progress
from zonerelay.operations.catalogue import OPERATIONS
from zonerelay.operations.errors import ControlError, InvalidError, NotFoundError, NotRunningError

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
    assert asked(path) == [Progress(done=1, total=2), Count(matched=3), EndFrame(count=1)]
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
    assert next(frames) == Count(matched=3)
    with pytest.raises(InvalidError, match=r"^no$") as caught:
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
