"""The command line's end of the control socket: synchronous, one request per connection.

Raises ControlError, whose text can be printed as it is. While the relay works on an answer it sends a
progress frame every few moments, so a relay that is silent for `timeout` seconds is in trouble.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from zonerelay.operations import answers as messages
from zonerelay.operations.answers import MAX_FRAME, End, Frame, Problem
from zonerelay.operations.catalogue import Call
from zonerelay.operations.errors import ControlError, NotRunningError, error_of
from zonerelay.operations.requests import Request

TIMEOUT = 60.0

F = TypeVar("F")


class ControlClient:
    def __init__(self, path: Path, *, timeout: float = TIMEOUT) -> None:
        self._path = path
        self._timeout = timeout

    def stream(self, request: Request) -> Iterator[Frame]:
        """Every frame of the answer as it comes, `End` last."""
        try:
            octets = messages.encode(Call(request=request))
        except UnicodeEncodeError as error:  # what the shell passed on is no text
            raise ControlError("what you ask about is not UTF-8") from error
        with self._connect() as connection:
            try:
                connection.sendall(octets)
                yield from self._frames(connection)
            except TimeoutError as error:
                raise ControlError(
                    f"the relay at {self._path} has been silent for {self._timeout:.0f} seconds: "
                    "see its log, or restart it"
                ) from error
            except OSError as error:
                raise ControlError(f"the connection to the relay broke: {error.strerror or error}") from error

    def all(
        self, request: Request, answer: type[F], saw: Callable[[Frame], None] = lambda _: None
    ) -> tuple[list[F], End]:
        """The frames of one kind, few enough to be in memory, and the end. `saw` is told of every frame."""
        found: list[F] = []
        end = End()
        for frame in self.stream(request):
            saw(frame)
            if isinstance(frame, answer):
                found.append(frame)
            elif isinstance(frame, End):
                end = frame
        return found, end

    def ask(self, request: Request, answer: type[F]) -> F:
        """The one frame that answers a simple question."""
        return self.answered(request, answer)[0]

    def answered(
        self, request: Request, answer: type[F], saw: Callable[[Frame], None] = lambda _: None
    ) -> tuple[F, End]:
        """The one frame that answers a question, and the end, which names the workers that did not."""
        found, end = self.all(request, answer, saw)
        if not found:
            raise ControlError(f"the relay's answer holds no {answer.__name__}: is it another version?")
        return found[-1], end

    def _frames(self, connection: socket.socket) -> Iterator[Frame]:
        with connection.makefile("rb") as lines:
            while line := lines.readline(MAX_FRAME):
                frame = messages.decode_frame(line)
                if isinstance(frame, Problem):
                    raise error_of(frame.code, frame.detail, frame.pointer)
                yield frame
                if isinstance(frame, End):
                    return
        raise ControlError("the relay ended the connection before its answer was complete: did it stop?")

    def _connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(self._timeout)
        try:
            connection.connect(str(self._path))
        except OSError as error:
            connection.close()
            raise self._explained(error) from error
        return connection

    def _explained(self, error: OSError) -> ControlError:
        match error:
            case FileNotFoundError() | ConnectionRefusedError():
                return NotRunningError(
                    f"no relay answers at {self._path}: is `zonerelay serve` running with this config?"
                )
            case PermissionError():
                return ControlError(
                    f"no permission to use {self._path}: run this as root or as the relay's own user"
                )
            case TimeoutError():
                return ControlError(f"the relay at {self._path} does not take connections: see its log")
        return ControlError(f"cannot reach the relay at {self._path}: {error.strerror or error}")
