"""The submission socket: over it, the HTTP server of one process submits mail to a worker in another process.

One connection carries one call, in frames: a length of four bytes, then that many bytes. The worker first
sends an empty frame to show that it is ready. The client sends the call as one frame of MessagePack. If the
envelope is accepted, the worker requests the message with another empty frame. The client sends the message
as a sequence of frames that ends with an empty frame. The answer is the last frame from the worker; it may
arrive before the message has been sent completely.

Promise: if the connection is lost before the worker has requested the message, the call is repeated with
another worker. If it is lost later, the message is refused temporarily, with a text that the worker may have
accepted it. A connection that ends before the end of the message stores nothing.
"""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec

from zonerelay.inbound.cleanup.submit import Acceptance, Pieces, Rejection, Submit, SubmitCall
from zonerelay.inbound.refusal import Reason
from zonerelay.model.reply import Reply
from zonerelay.process.tasks import Tasks

PATIENCE = 600.0
"""Seconds to wait for an answer; RFC 5321 4.5.3.2.6 gives the same time for the end of data."""
GREETING, FAREWELL = 20.0, 1.0
_LENGTH = 4
_AGAIN = frozenset({Reason.SHUTDOWN, Reason.MEMORY})
"""If a worker refuses for one of these reasons, another worker may accept the message."""
_NO_WORKER = Rejection(Reason.SHUTDOWN, Reply(421, "3.2", "No worker accepts mail now"))
_LOST = Rejection(
    Reason.LOCAL_ERROR,
    Reply(
        451,
        "3.0",
        "The connection to the worker was lost before its reply: the message may have been accepted",
    ),
    retry_after=5.0,
)


_encode = msgspec.msgpack.Encoder().encode
_decode_call = msgspec.msgpack.Decoder(SubmitCall).decode
_answers: msgspec.msgpack.Decoder[Acceptance | Rejection] = msgspec.msgpack.Decoder(Acceptance | Rejection)
_decode_answer = _answers.decode


async def _read(reader: asyncio.StreamReader) -> bytes:
    """Read one frame, which is a length followed by that number of bytes. Raise IncompleteReadError (an
    EOFError) or OSError on failure.
    """
    return await reader.readexactly(int.from_bytes(await reader.readexactly(_LENGTH)))


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH) + data


class SubmitSocket:
    """The server side of the submission socket, in a worker."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._server: asyncio.Server | None = None
        self._path = Path()
        self._serving = Tasks()

    async def start(self, bound: socket.socket) -> None:
        """Start to accept submissions on a bound Unix socket."""
        self._path = Path(bound.getsockname())
        self._server = await asyncio.start_unix_server(
            lambda reader, writer: self._serving.start(self._serve(reader, writer)), sock=bound
        )

    def close(self) -> None:
        """Stop accepting submissions. Running ones continue."""
        if self._server is not None:
            self._server.close()
            self._path.unlink(missing_ok=True)

    async def drain(self) -> None:
        """Wait until the results of completed submissions have been sent."""
        await self._serving.wait(FAREWELL)
        await self._serving.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            writer.write(_framed(b""))
            while piece := await _read(reader):
                yield piece

        invalid = (UnicodeDecodeError, msgspec.MsgspecError)
        with contextlib.closing(writer), contextlib.suppress(EOFError, OSError, *invalid):
            writer.write(_framed(b""))
            call = _decode_call(await _read(reader))
            result = await self._submit(call, pieces())
            await _send(writer, _encode(result))
            while await reader.read(65536):  # read the rest of a refused message, or the answer would be lost
                pass


class SubmitClient:
    """The client side of the submission socket. `places` returns the sockets of the workers that accept mail
    now.
    """

    def __init__(self, places: Callable[[], Sequence[Path]]) -> None:
        self._places = places

    async def submit(self, call: SubmitCall, pieces: Pieces) -> Acceptance | Rejection:
        """Submit a message to one of the workers (see `Submit`)."""
        places = list(self._places())
        at = secrets.randbelow(len(places)) if len(places) > 1 else 0
        frame = _framed(_encode(call))
        result: Acceptance | Rejection = _NO_WORKER
        for place in (*places[at:], *places[:at]):
            asked = await _ask(place, frame)
            if asked is None:
                continue
            reader, writer, data = asked
            with contextlib.closing(writer):
                if not data:
                    return await _content(reader, writer, pieces)
            result = _decode_answer(data)
            if isinstance(result, Acceptance) or result.reason not in _AGAIN:
                return result
        return result


async def _ask(place: Path, call: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes] | None:
    """Send a submission without the content, and return the first frame of the response, or None if the
    worker is lost.
    """
    writer = None
    try:
        async with asyncio.timeout(GREETING):
            reader, writer = await asyncio.open_unix_connection(place)
            await _read(reader)
        writer.write(call)
        async with asyncio.timeout(PATIENCE):
            return reader, writer, await _read(reader)
    except BaseException as error:
        if writer is not None:
            writer.close()
        if isinstance(error, EOFError | OSError):  # this includes TimeoutError
            return None
        raise


async def _content(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pieces: Pieces
) -> Acceptance | Rejection:
    """Send the content of a message until the worker responds, and return the response. Raise the errors of
    `pieces`.
    """
    answer = asyncio.ensure_future(_read(reader))
    try:
        if isinstance(pieces, AsyncIterator):
            async for piece in pieces:
                if answer.done():
                    break
                if piece:  # an empty frame marks the end
                    await _send(writer, piece)
        else:
            await _send(writer, b"".join(pieces))
        await _send(writer, b"")
        try:
            async with asyncio.timeout(PATIENCE):
                return _decode_answer(await answer)
        except (EOFError, OSError):
            return _LOST
    finally:
        answer.cancel()


async def _send(writer: asyncio.StreamWriter, frame: bytes) -> None:
    """Send one frame. Ignore a lost connection here, because reading the response reports it."""
    writer.write(_framed(frame))
    with contextlib.suppress(OSError):
        await writer.drain()
