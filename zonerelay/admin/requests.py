"""Request processing that all HTTP servers of the relay share: the client, error responses, and the header
fields of every response.

Behind a trusted proxy, the client and the scheme are taken from the proxy's header fields. An error is plain
text without details, unless a part has its own format; the details go to `on_error`.
"""

import asyncio
import ipaddress
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from zonerelay.admin.problems import ApiError, too_large
from zonerelay.control.runner import OnError
from zonerelay.operations.answers import EndFrame, ErrorFrame, Frame, Progress, StreamGap, problem_of
from zonerelay.operations.errors import ControlError
from zonerelay.routing.addresses import Networks

_QUIET = logging.getLogger("zonerelay.admin.http")
_QUIET.setLevel(logging.CRITICAL)
"""Hides aiohttp's errors, because aiohttp logs each malformed request of any client with a traceback."""

OPTIONS: dict[str, Any] = {
    "handler_cancellation": True,
    "access_log": None,
    "logger": _QUIET,
    "max_line_size": 8190,
    "max_field_size": 4096,
    # Seconds in which a refused client may continue to send a body, so that it can read the refusal.
    "lingering_time": 2.0,
}
"""The options of aiohttp's servers."""


EVENT_STREAM = "text/event-stream"
BEAT = 0.25
"""Seconds after which a quiet event stream begins, so that a refusal until then has a status of its own."""
QUIET_BEATS = 60
"""The number of beats after which a quiet event stream sends a comment."""
STALL = 600.0
"""Seconds within which a client must read some of its stream. `zonerelay queue list | less` reads slowly."""

VISIT: "ContextVar[RequestIdentity]" = ContextVar("visit")
"""The visit of the request that the current task answers."""


class RequestIdentity(msgspec.Struct):
    """The client of one HTTP request, the security of its connection, and its authenticated name.

    `client` is the client's address, behind a proxy the one that the proxy names. `secure` means that TLS is
    used, here or at the proxy. `private` means that tokens and sessions do not cross a network unencrypted,
    because of TLS, a proxy, or a client on this machine. A part sets `who` to a token's name after
    authentication; the connection may then serve other requests. `answered` is set when the response has been
    written. `peer` is the user of this machine who is connected to the control socket.
    """

    client: str
    secure: bool
    private: bool
    who: str = ""
    answered: bool = False
    peer: str = ""


def plain(status: int, text: str, fields: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(status=status, text=f"{text}\n", headers=fields)


def media_type(request: web.BaseRequest) -> str:
    """Return the media type of the body in lower case, or "" if it has none. aiohttp's `content_type` is not
    used, because it decodes parameters with any codec that they name (RFC 2231).
    """
    return request.headers.get("Content-Type", "").partition(";")[0].strip().lower()


async def read_body(request: web.BaseRequest, most: int, seconds: float) -> bytes:
    """Read and return the body of a request. Raise ApiError if it is too large or does not arrive in time."""
    octets, size = bytearray(), request.content_length or 0
    try:
        async with asyncio.timeout(seconds):
            while size <= most and (piece := await request.content.readany()):
                octets += piece
                size = len(octets)
    except TimeoutError:
        text = f"timed out waiting for the request body ({seconds:.0f} seconds)"
        raise ApiError(408, "too_slow", text) from None
    if size > most:
        raise too_large(f"the body exceeds the limit of {most} bytes")
    return bytes(octets)


def visit_of(request: web.BaseRequest, proxies: Networks, *, secure: bool) -> RequestIdentity:
    """Return the client of a request, as the connection and trusted proxies report it. With `secure`, the
    connection uses TLS.
    """
    peername = request.transport.get_extra_info("peername") if request.transport is not None else None
    peer = client = _unmapped(str(peername[0])) if peername else ""
    if not proxies.match(peer):
        return RequestIdentity(client, secure, private=secure or _is_loopback(peer))
    names = _listed(request, "X-Forwarded-For")
    # The entries that trusted proxies added, from the right. A client may have forged those to their left.
    believed = 0
    for name in reversed(names):
        client = _unmapped(name)
        believed += 1
        if not proxies.match(client):
            break
    schemes = [each.lower() for each in _listed(request, "X-Forwarded-Proto")[-(believed or 1) :]]
    secure = bool(schemes) and all(each == "https" for each in schemes)
    return RequestIdentity(client, secure, private="http" not in schemes or _is_loopback(client))


def _listed(request: web.BaseRequest, name: str) -> list[str]:
    """Return the entries of all header fields with this name; each proxy may have added a field."""
    entries = (each.strip() for each in ",".join(request.headers.getall(name, ())).split(","))
    return [each for each in entries if each]


async def answered(request: web.Request, handler: Handler, on_error: OnError) -> web.StreamResponse:
    try:
        return await handler(request)
    except ApiError as error:
        return error.response()
    except web.RequestPayloadError:
        return ApiError(400, "malformed", "the body does not match its encoding header fields").response()
    except web.HTTPException as error:
        allowed = error.headers.get("Allow")
        return plain(error.status, error.reason.lower(), {"Allow": allowed} if allowed else {})
    except Exception as error:  # noqa: BLE001 - a page that fails is trouble, not the end
        on_error("admin-http", error)
        return plain(500, "an unexpected error occurred; see `trouble` in the relay's log")


async def stream(
    request: web.BaseRequest,
    batches: AsyncGenerator[list[Frame], None],
    written: Callable[[Frame], bytes],
    admitted: AbstractAsyncContextManager[None],
    fields: Mapping[str, str],
) -> web.StreamResponse:
    """Stream response frames until they end, the client disconnects or reads nothing for `STALL` seconds, or
    `admitted` ends its block. A ControlError is raised, or sent as the last frame if the stream has begun.
    """
    response = web.StreamResponse(headers={"X-Accel-Buffering": "no", **fields})
    frames: list[Frame] = []
    with suppress(ConnectionError, TimeoutError):
        try:
            async with admitted, aclosing(batches):
                async for frames in batches:
                    if not response.prepared:
                        await response.prepare(request)
                    if data := b"".join(map(written, frames)):
                        async with asyncio.timeout(STALL):
                            await response.write(data)
        except ControlError as error:
            if not response.prepared:
                raise
            await response.write(written(problem_of(error)))
    if not (frames and isinstance(frames[-1], EndFrame)):
        response.force_close()  # the client sees at once that no more comes
    return response


def events(event: Callable[[Frame], bytes]) -> Callable[[Frame], bytes]:
    """Return a function that formats response frames as server-sent events. The first Progress and every
    `QUIET_BEATS` th one after it become a comment, and a failure becomes a gap.
    """
    beats = itertools.cycle([b": zonerelay\n\n", *[b""] * (QUIET_BEATS - 1)])

    def written(frame: Frame) -> bytes:
        if isinstance(frame, Progress):
            return next(beats)
        return event(StreamGap(why=frame.detail) if isinstance(frame, ErrorFrame) else frame)

    return written


async def dress(_request: web.BaseRequest, response: web.StreamResponse) -> None:
    response.headers.popall("Server", None)
    response.headers.setdefault("Cache-Control", "no-store")
    response.headers.setdefault("X-Content-Type-Options", "nosniff")


@lru_cache(maxsize=1024)
def _unmapped(address: str) -> str:
    """Return the address in the format of `ipaddress`, with IPv4-mapped addresses as IPv4, or "" if it is not
    a valid address.
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    return str(getattr(found, "ipv4_mapped", None) or found)


@lru_cache(maxsize=1024)
def _is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address).is_loopback
