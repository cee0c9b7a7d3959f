"""The pages `/metrics`, `/healthz` and `/readyz`. The only module that knows aiohttp's server.

They read and never write. A stranger can hold at most `MAX_CONNECTIONS` connections for `LIFETIME` seconds
each, one request per connection, with small heads; bodies are not read. The pages answer only to addresses,
localhost and the names in `hosts`, so that no web page reaches them through DNS rebinding; bound to another
address than loopback, as in a container, the pages in `OPEN` answer to every name, which monitoring makes up.
Errors are plain text without detail; the detail goes to `trouble`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable, Collection

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from zonerelay.telemetry.metrics.metrics import CONTENT_TYPE

MAX_CONNECTIONS = 64
LIFETIME = 30.0
MAX_LINE = 2048
MAX_FIELD = 4096
SHUTDOWN_TIMEOUT = 1.0
OPEN = frozenset(("/metrics", "/healthz", "/readyz"))

Trouble = Callable[[str, BaseException], None]


class HttpServer:
    """`metrics` gives the exposition; `before_metrics` is awaited first, to bring slow gauges up to date.

    `is_loopback`: only this machine reaches the address.
    """

    def __init__(
        self,
        *,
        is_loopback: bool,
        metrics: Callable[[], bytes],
        readiness: Callable[[], Awaitable[tuple[str, ...]]],
        trouble: Trouble,
        hosts: Collection[str],
        before_metrics: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._is_loopback = is_loopback
        self._hosts = frozenset(hosts)
        self._metrics = metrics
        self._before_metrics = before_metrics
        self._readiness = readiness
        self._trouble = trouble
        self._runner = web.AppRunner(
            self._application(),
            access_log=None,
            logger=_quiet_logger(),
            max_line_size=MAX_LINE,
            max_field_size=MAX_FIELD,
            lingering_time=0.0,
            shutdown_timeout=SHUTDOWN_TIMEOUT,
        )
        self._server: asyncio.Server | None = None

    async def start(self, listener: socket.socket, backlog: int) -> None:
        """Takes `listener` over."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._connection, sock=listener, backlog=backlog)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self._runner.cleanup()

    def _application(self) -> web.Application:
        application = web.Application(middlewares=[self._middleware()])
        application.router.add_get("/metrics", self._get_metrics)
        application.router.add_get("/healthz", self._get_health)
        application.router.add_get("/readyz", self._get_readiness)
        application.on_response_prepare.append(_without_server_name)
        return application

    def _connection(self) -> asyncio.Protocol:
        """One client's protocol: aiohttp has no limit on connections or on their age by itself."""
        server = self._runner.server
        assert server is not None
        if len(server.connections) >= MAX_CONNECTIONS:
            return _Refusal()
        handler = server()
        asyncio.get_running_loop().call_later(LIFETIME, _abort, handler)
        return handler

    # --- pages --------------------------------------------------------------------------------------

    async def _get_metrics(self, request: web.Request) -> web.Response:
        if self._before_metrics is not None:
            await self._before_metrics()
        return web.Response(body=self._metrics(), headers={"Content-Type": CONTENT_TYPE})

    async def _get_health(self, request: web.Request) -> web.Response:
        """Answering at all is the proof: the event loop turns."""
        return web.Response(text="ok\n")

    async def _get_readiness(self, request: web.Request) -> web.Response:
        reasons = await self._readiness()
        body = msgspec.json.encode({"ready": not reasons, "reasons": reasons}) + b"\n"
        return web.Response(body=body, status=503 if reasons else 200, content_type="application/json")

    def _middleware(self) -> Middleware:
        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            is_open = request.path in OPEN and not self._is_loopback
            if not (is_open or is_our_name(request.headers.get("Host", ""), self._hosts)):
                response: web.StreamResponse = _plain(421, "this relay does not go by that name")
            else:
                response = await self._guarded(request, handler)
            response.headers["Cache-Control"] = "no-store"
            response.headers["X-Content-Type-Options"] = "nosniff"
            response.force_close()
            return response

        return guard

    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            response = _plain(error.status, error.reason.lower())
            if "Allow" in error.headers:
                response.headers["Allow"] = error.headers["Allow"]
            return response
        except Exception as error:  # noqa: BLE001 - a page that fails is trouble, not the end
            self._trouble("admin-http", error)
            return _plain(500, "something went wrong; the relay's log has it as `trouble`")


def is_our_name(host: str, hosts: Collection[str]) -> bool:
    """May a request with this Host field be for us? A rebound name is never an address or `localhost`."""
    if not host:
        return True  # HTTP/1.0; browsers always send one
    name = host.removeprefix("[").partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = name.lower().rstrip(".")
    if name == "localhost" or any(name == each or _is_below(name, each) for each in hosts):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_below(name: str, pattern: str) -> bool:
    return pattern.startswith("*.") and name.endswith(pattern[1:])


class _Refusal(asyncio.Protocol):
    """The protocol of a connection beyond `MAX_CONNECTIONS`: it closes at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _abort(handler: web.RequestHandler) -> None:
    if handler.transport is not None:
        handler.transport.abort()


def _plain(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=f"{text}\n")


async def _without_server_name(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.popall("Server", None)


def _quiet_logger() -> logging.Logger:
    """Aiohttp logs every malformed request as an error with a traceback: noise that a stranger controls."""
    logger = logging.getLogger("zonerelay.admin.http")
    logger.setLevel(logging.CRITICAL)
    return logger
