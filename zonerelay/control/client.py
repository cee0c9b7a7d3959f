"""A client of the control socket: HTTP over the relay's Unix socket, one request per connection.

It starts fast, because it imports only the standard library and the structs of `operations`. An answer
consists of lines of JSON. A relay that works on the answer sends a `Progress` every second; one that is
silent for `timeout` seconds is treated as failed. Every failure is a ControlError whose message says what to
do.
"""

import re
import socket
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, IncompleteRead
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urlencode

import msgspec

from zonerelay.operations.answers import MAX_FRAME, EndFrame, ErrorFrame, Frame, LineSplitter, decode_frame
from zonerelay.operations.catalogue import operation_of
from zonerelay.operations.errors import ControlError, ErrorKind, NotRunningError, error_of

TIMEOUT = 60.0
LINES = "application/x-ndjson"
_PIECE = 64 * 1024
_FIELD = re.compile(r"{(\w+)}")

F = TypeVar("F")


class _ErrorBody(msgspec.Struct):
    """The JSON body of an error response (RFC 9457)."""

    code: str = ErrorKind.UNEXPECTED
    detail: str = ""


class _ControlConnection(HTTPConnection):
    """An HTTP connection to the control socket."""

    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class ControlClient:
    """Sends requests to the relay whose control socket is at `path`."""

    def __init__(self, path: Path, *, timeout: float = TIMEOUT) -> None:
        self._path = path
        self._timeout = timeout

    def stream(self, request: msgspec.Struct) -> Iterator[Frame]:
        """Send a request, and yield every frame of the response as it arrives, `EndFrame` last. Raise
        ControlError if the request fails.
        """
        try:
            method, target, body = written(request)
        except UnicodeEncodeError as error:  # an argument from the shell is not valid text
            raise ControlError("the request is not valid UTF-8") from error
        connection = _ControlConnection(self._path, self._timeout)
        try:
            self._connect(connection)
            fields = {"Accept": LINES, "Connection": "close"}
            if body is not None:
                fields["Content-Type"] = "application/json"
            connection.request(method, target, body, fields)
            yield from self._frames(connection.getresponse())
        except TimeoutError as error:
            raise ControlError(
                f"the relay at {self._path} has not responded for {self._timeout:.0f} seconds; see its "
                "log, or restart it"
            ) from error
        except (ConnectionError, IncompleteRead) as error:
            raise ControlError(
                "the relay closed the connection before the end of its response; it may have stopped"
            ) from error
        except HTTPException as error:
            raise ControlError(
                f"the program at {self._path} speaks another protocol; if it is a relay of another "
                "version, restart it"
            ) from error
        except OSError as error:
            raise ControlError(f"the connection to the relay was lost: {error.strerror or error}") from error
        finally:
            connection.close()

    def all(
        self, request: msgspec.Struct, answer: type[F], saw: Callable[[Frame], None] = lambda _: None
    ) -> tuple[list[F], EndFrame]:
        """Send a request, and return its response frames of one type, which must fit in memory, and the final
        `EndFrame`. `saw` is called with every frame.
        """
        found: list[F] = []
        end = EndFrame()
        for frame in self.stream(request):
            saw(frame)
            if isinstance(frame, answer):
                found.append(frame)
            elif isinstance(frame, EndFrame):
                end = frame
        return found, end

    def ask(self, request: msgspec.Struct, answer: type[F]) -> F:
        """Send a request, and return its response, which is a single frame."""
        return self.answered(request, answer)[0]

    def answered(
        self, request: msgspec.Struct, answer: type[F], saw: Callable[[Frame], None] = lambda _: None
    ) -> tuple[F, EndFrame]:
        """Send a request, and return the frame of its response and the final `EndFrame`, which names workers
        that did not answer.
        """
        found, end = self.all(request, answer, saw)
        if not found:
            raise ControlError(
                f"the relay's response contains no {answer.__name__}; it may be another version"
            )
        return found[-1], end

    def _connect(self, connection: _ControlConnection) -> None:
        try:
            connection.connect()
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise NotRunningError(
                f"no relay is listening at {self._path}; check that `zonerelay serve` is running with this "
                "configuration"
            ) from error
        except OSError as error:
            text = f"cannot reach the relay at {self._path}: {error.strerror or error}"
            if isinstance(error, PermissionError):
                text = f"no permission to use {self._path}; run this command as root or as the relay's user"
            elif isinstance(error, TimeoutError):
                text = f"the relay at {self._path} does not accept connections; see its log"
            raise ControlError(text) from error

    def _frames(self, response: HTTPResponse) -> Iterator[Frame]:
        if response.status != 200:
            raise failure(response.status, response.read(MAX_FRAME))
        lines = LineSplitter()
        while piece := response.read1(_PIECE):
            for frame in map(decode_frame, lines.take(piece)):
                if isinstance(frame, ErrorFrame):
                    raise error_of(frame.code, frame.detail, frame.pointer)
                yield frame
                if isinstance(frame, EndFrame):
                    return
        raise ConnectionResetError


def written(request: msgspec.Struct) -> tuple[str, str, bytes | None]:
    """Return the HTTP method, the target and the body of a request. Raise UnicodeEncodeError if it is not
    valid text.
    """
    operation = operation_of(request)
    given = msgspec.to_builtins(request)
    del given["operation"]
    target = _FIELD.sub(lambda field: quote(given.pop(field[1]), safe=""), operation.path)
    if operation.method == "POST":
        return "POST", target, msgspec.json.encode(given)
    flat: dict[str, object] = {}
    for name, value in given.items():
        flat.update(value if isinstance(value, dict) else {name: value})
    query = urlencode(
        {name: str(value).lower() if isinstance(value, bool) else value for name, value in flat.items()}
    )
    return "GET", f"{target}?{query}" if query else target, None


def failure(status: int, body: bytes) -> ControlError:
    """Convert an HTTP error response to a ControlError."""
    try:
        found = msgspec.json.decode(body, type=_ErrorBody)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = _ErrorBody()
    return error_of(found.code, found.detail or f"the relay responded with HTTP status {status}")
