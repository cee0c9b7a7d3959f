"""The HTTP server of the admin address: its connections, limits and host names, and the monitoring
endpoints `/metrics`, `/healthz` and `/readyz`. `api/` and `page/` define the other routes.

A connection counts as a monitoring connection until it requests something else. Then it is an operator's
connection. There are at most `MAX_OPERATORS` of these, so API, page and event streams never use up the
`MAX_CONNECTIONS` for monitoring. An unauthenticated client holds a monitoring connection for at most
`LIFETIME` seconds, for one request with a small header. An operator's connection serves several requests
after one was authenticated. It is aborted if it is idle for `IDLE` seconds, or if the client reads nothing
for `STALL` seconds. If all of them are in use, the next one replaces the oldest unauthenticated one, or one
of a token that has many, so neither unauthenticated clients nor one token can lock operators out.

The server responds only to IP addresses, localhost and the names in `hosts`, so that no web page can reach it
by DNS rebinding. If it is bound to an address other than loopback, as in a container, the monitoring
endpoints respond to every name, because monitoring systems choose their own names. A request from a page of
another origin (by its Origin or Sec-Fetch-Site field) is refused, unless it only reads monitoring endpoints.
Behind a proxy in `proxy_networks`, the client and the scheme are taken from the proxy's header fields. Errors
are plain text without details, unless a part has its own format; the details go to `on_error`.
"""

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from zonerelay.admin.operators import Operators
from zonerelay.admin.requests import OPTIONS, VISIT, RequestIdentity, answered, dress, plain, visit_of
from zonerelay.config.endpoints import is_address
from zonerelay.process.tasks import cancel_all
from zonerelay.process.threads import OPERATORS
from zonerelay.routing.addresses import Networks
from zonerelay.telemetry.metrics.metrics import CONTENT_TYPE

MAX_CONNECTIONS = 64
MAX_OPERATORS = 64
MAX_OF_TOKEN = 16
"""The number of these that one token keeps if all are in use."""
LIFETIME = 30.0
IDLE = 15.0
STALL = 60.0
MAX_BODY = 1024 * 1024
SHUTDOWN_TIMEOUT = 1.0

HANDSHAKE = 10.0
PAUSE = 0.1
"""Seconds after which a connection is accepted again that could not be."""
PATHS = frozenset(("/metrics", "/healthz", "/livez", "/readyz"))
"""Of the monitoring endpoints, which change nothing."""
_SAFE = ("GET", "HEAD", "OPTIONS")

Connection = web.RequestHandler


class Monitored(Protocol):
    """The interface to the state of the relay that the monitoring endpoints publish."""

    async def refresh(self) -> None:
        """Update the gauges that are computed only when the metrics are scraped."""

    def exposition(self) -> bytes:
        """Return the metrics in the Prometheus text format."""

    async def readiness(self) -> tuple[str, ...]:
        """Return the reasons why the relay is not ready, or an empty tuple if it is."""


@dataclass(eq=False, repr=False, kw_only=True)
class HttpServer:
    """An HTTP server for operators, with limits on its connections. With `is_loopback`, only this machine can
    reach the address. `proxies` are the networks of trusted proxies.
    """

    is_loopback: bool
    monitored: Monitored
    operators: Operators
    hosts: Collection[str]
    proxies: Networks
    tls: ssl.SSLContext | None

    def __post_init__(self) -> None:
        application = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY)
        application.router.add_routes(
            [
                web.get("/metrics", self._get_metrics),
                web.get("/healthz", self._get_health),
                web.get("/livez", self._get_health),  # the name in Kubernetes and Mailpit
                web.get("/readyz", self._get_readiness),
                *_routes(self.operators),
            ]
        )
        application.on_response_prepare.append(dress)
        self._runner = web.AppRunner(
            application, **OPTIONS, keepalive_timeout=IDLE, shutdown_timeout=SHUTDOWN_TIMEOUT
        )
        self._operators: dict[Connection, RequestIdentity] = {}
        """The connections of operators, each with its current or last request."""
        self._coming: dict[asyncio.Task[None], None] = {}
        """The connections that aiohttp does not know yet, during their TLS handshakes; the oldest first."""
        self._listener: socket.socket | None = None
        self._pause: asyncio.TimerHandle | None = None

    async def start(self, listener: socket.socket, backlog: int) -> None:
        """Start accepting HTTP connections at `listener`. The server now owns the socket."""
        await self._runner.setup()
        listener.listen(backlog)
        listener.setblocking(False)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
        await cancel_all(*self._coming)
        await self._runner.cleanup()

    # --- connections --------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        """Accept a connection, within limits on the number and age of connections, which aiohttp does not
        have. At the limit, close the oldest unauthenticated connection, or else the oldest TLS handshake.
        """
        loop = asyncio.get_running_loop()
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the client has left
        except OSError:  # no descriptors: without a pause the loop would spin
            loop.remove_reader(listener)
            self._pause = loop.call_later(PAUSE, loop.add_reader, listener, self._accept, listener)
            return
        client.setblocking(False)
        strangers = [each for each in self._alive() if each not in self._operators]
        # Those that were told to end before, and have not yet, are the oldest strangers.
        excess = max(len(strangers) + len(self._coming) + 1 - MAX_CONNECTIONS, 0)
        for each in strangers[:excess]:
            _abort(each)
        for oldest in list(self._coming)[: max(excess - len(strangers), 0)]:
            del self._coming[oldest]
            oldest.cancel()
        coming = loop.create_task(self._connect(client))
        self._coming[coming] = None
        coming.add_done_callback(partial(self._came, client))

    def _came(self, client: socket.socket, coming: asyncio.Task[None]) -> None:
        self._coming.pop(coming, None)
        if coming.cancelled():
            client.close()

    async def _connect(self, client: socket.socket) -> None:
        assert self._runner.server is not None
        loop, handler = asyncio.get_running_loop(), self._runner.server()
        loop.call_later(LIFETIME, self._expire, handler)
        limit = None if self.tls is None else HANDSHAKE
        with suppress(OSError):  # the handshake has failed
            await loop.connect_accepted_socket(
                lambda: handler, client, ssl=self.tls, ssl_handshake_timeout=limit
            )

    def _expire(self, handler: Connection) -> None:
        if handler not in self._operators:
            _abort(handler)

    def _alive(self) -> list[Connection]:
        """Return the open connections, oldest first, and remove the closed ones from `_operators`."""
        assert self._runner.server is not None
        alive = self._runner.server.connections
        self._operators = {each: self._operators[each] for each in alive if each in self._operators}
        return alive

    def _becomes_operators(self, handler: Connection, visit: RequestIdentity) -> bool:
        """Count this connection as one of the operators' connections, whose number is limited. Return False
        if none is free.
        """
        is_known = handler in self._operators
        if not is_known:
            self._alive()
            if len(self._operators) >= MAX_OPERATORS:
                least = self._least()
                if least is None:
                    return False
                del self._operators[least]
                _abort(least)
            asyncio.get_running_loop().call_later(STALL, _watch, handler, 0)
        self._operators[handler] = visit
        return True

    def _least(self) -> Connection | None:
        """Return the connection to close for a new one: the oldest unauthenticated connection, or else one of
        a token with more than its share, preferably idle.
        """
        stranger = next((each for each, of in self._operators.items() if not of.who), None)
        if stranger is not None:
            return stranger
        who, most = Counter(of.who for of in self._operators.values()).most_common(1)[0]
        if most <= MAX_OF_TOKEN:
            return None
        theirs = [each for each, of in self._operators.items() if of.who == who]
        return next((each for each in theirs if self._operators[each].answered), theirs[0])

    # --- requests -----------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        visit = visit_of(request, self.proxies, secure=self.tls is not None)
        VISIT.set(visit)
        is_monitoring = request.path in PATHS
        host, *others = request.headers.getall("Host", [""])
        if others:
            response: web.StreamResponse = plain(400, "the request has more than one Host field")
        elif not (is_our_name(host, self.hosts) or (is_monitoring and not self.is_loopback)):
            response = plain(421, "the host name in the request is not one of this relay's names")
        elif not is_monitoring and not self._becomes_operators(request.protocol, visit):
            response = plain(503, "the limit on operators' connections is reached", {"Retry-After": "5"})
        elif request.method not in _SAFE and self._is_foreign(request, host):
            response = plain(403, "the request was sent by a page of another origin")
        else:
            response = await answered(request, handler, self.operators.events.error)
        visit.answered = True
        if is_monitoring or not visit.who or not request.content.at_eof():
            response.force_close()  # the rest of a body is not read to keep a connection open
        return response

    async def _get_metrics(self, request: web.Request) -> web.Response:
        await self.monitored.refresh()
        return web.Response(body=self.monitored.exposition(), headers={"Content-Type": CONTENT_TYPE})

    async def _get_health(self, request: web.Request) -> web.Response:
        """Respond to `/healthz` with `ok`. The response itself proves that the event loop is running."""
        return web.Response(text="ok\n")

    async def _get_readiness(self, request: web.Request) -> web.Response:
        reasons = await self.monitored.readiness()
        body = msgspec.json.encode({"ready": not reasons, "reasons": reasons}) + b"\n"
        return web.Response(body=body, status=503 if reasons else 200, content_type="application/json")

    def _is_foreign(self, request: web.Request, host: str) -> bool:
        """Return whether a browser sent this request from a page of another origin. Other clients send
        neither header field.
        """
        if request.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return True
        origin = request.headers.get("Origin")
        if origin is None:
            return False
        scheme, _, name = origin.partition("://")
        port = {"http": ":80", "https": ":443"}.get(scheme, "")
        return name.removesuffix(port) != host.removesuffix(port) and name not in self.hosts


def _routes(operators: Operators) -> Sequence[web.RouteDef]:
    """Return the routes of the API, of captured mail, and of the page if it is enabled."""
    api, mailpit = _lazy(partial(_api, operators)), _lazy(partial(_mailpit, operators))
    some = [
        *(web.route("*", path, api) for path in ("/v1/{path:.*}", "/send", "/send-raw")),
        web.route("*", "/api/v1/{path:.*}", mailpit),
        web.route("*", "/view/{path:.*}", mailpit),
    ]
    if not operators.settings().admin.page:
        return some
    from zonerelay.admin.page.page import PageRoutes  # noqa: PLC0415 - most relays have none

    return [*some, *PageRoutes(operators).routes()]


def _lazy(load: Callable[[], Handler]) -> Handler:
    """Return a request handler that is loaded at its first request, because monitoring does not need it."""
    loaded: list[Handler] = []

    async def serve(request: web.Request) -> web.StreamResponse:
        if not loaded:
            loaded.append(await OPERATORS.run(load))
        return await loaded[0](request)

    return serve


def _api(operators: Operators) -> Handler:
    from zonerelay.admin.api.routes import Api  # noqa: PLC0415
    from zonerelay.admin.api.verbs import VERBS  # noqa: PLC0415
    from zonerelay.admin.submission.verbs import SUBMISSION  # noqa: PLC0415

    return Api(operators, (*VERBS, *SUBMISSION)).serve


def _mailpit(operators: Operators) -> Handler:
    from zonerelay.admin.mailpit import Mailpit  # noqa: PLC0415

    return Mailpit(operators).serve


def is_our_name(host: str, hosts: Collection[str]) -> bool:
    """Return whether this relay accepts the name in the Host field, as a protection against DNS rebinding. A
    rebound name is never an IP address or a single label such as `localhost`, because an attacker cannot
    register these.
    """
    if not host:
        return True  # HTTP/1.0; browsers always send one
    name = host.removeprefix("[").partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    name = name.lower().rstrip(".")
    if host[0] != "[" and not set(name) & set(".:"):
        return True
    if any(name == each or (each.startswith("*.") and name.endswith(each[1:])) for each in hosts):
        return True
    return is_address(name)


def _abort(handler: Connection) -> None:
    if handler.transport is not None:
        handler.transport.abort()


def _watch(handler: Connection, before: int) -> None:
    """Abort the connection if the client has read none of the waiting output since the last check."""
    if handler.transport is None:
        return
    unread = handler.transport.get_write_buffer_size()
    if unread and unread == before:
        handler.transport.abort()
    else:
        asyncio.get_running_loop().call_later(STALL, _watch, handler, unread)
