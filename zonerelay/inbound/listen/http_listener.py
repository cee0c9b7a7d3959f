"""An HTTP [[listener]] and its connections. Its mail is submitted as mail of an SMTP listener with the same
settings, so that the same limits, rules and guarantees apply as for all other mail.

A connection is counted, its PROXY header and TLS are handled, and the decrypted data is passed to the HTTP
server. The connection is closed if a connection limit is reached, if a handshake fails or takes longer than
`HANDSHAKE` seconds, and when the HTTP server closes it.

The HTTP server is loaded when the first client connects, because aiohttp needs a fifth of the memory of an
idle relay. If loading fails, the error is logged, the client is disconnected, and the next client causes
another attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from zonerelay.config.settings import ListenerSettings, ListenerTls
from zonerelay.inbound.access.networks import Client
from zonerelay.inbound.cleanup.submit import Submit
from zonerelay.inbound.limits.memory import TLS_COST
from zonerelay.inbound.listen.listener import AnyListener
from zonerelay.inbound.session.admission import Admission
from zonerelay.inbound.session.transport import Transport
from zonerelay.inbound.state.context import HANDSHAKE, ListenerContext
from zonerelay.inbound.state.replies import ServerReply
from zonerelay.inbound.tls.channel import TlsInfo
from zonerelay.model.envelope import Origin
from zonerelay.process.sockets import NOTHING, InheritedSockets
from zonerelay.smtp.server.proxy_protocol import ProxyHeader

PRIVATE = "private"
"""The transport's extra info that tells the HTTP server whether the connection is encrypted."""
_BUSY = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 5\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
)


class HttpService(Protocol):
    """Interface: an HTTP server that gets its connections, already decrypted, from the listener."""

    def connection(self) -> asyncio.Protocol:
        """Return the protocol for a new connection."""

    async def close(self, timeout: float) -> None:
        """Close idle connections now, and the others after their current request or after
        `timeout` seconds.
        """


class HttpConnection(asyncio.Protocol, asyncio.Transport):
    """One connection of a client to an HTTP [[listener]]. `service` returns the HTTP server, which may still
    be loading.

    It is the protocol of the raw transport, and the transport of the HTTP server: its decrypted stream.
    """

    def __init__(
        self,
        context: ListenerContext,
        admission: Admission[HttpConnection],
        service: Callable[[], asyncio.Future[HttpService]],
    ) -> None:
        super().__init__()
        self._has_tls = context.settings.tls is not ListenerTls.NONE
        self._context = context
        self._admission = admission
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._transport: Transport
        self._raw: asyncio.Transport
        self._client: Client
        self._server: asyncio.Protocol | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closing = False
        self._waiting = bytearray()  # until the HTTP server is loaded
        self.held = 0

    # The event loop calls the following methods.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = transport  # type: ignore[assignment]  # uvloop's have the methods, but not the base class
        self._transport = Transport(self._raw, self._loop)
        self._client, refusal = self._admission.welcome(self, transport.get_extra_info("peername"))
        if refusal is not None:
            self.say_goodbye(refusal)
            return
        self._timer = self._loop.call_later(HANDSHAKE, self.abort)
        if self._client.proxies:
            self._transport.expect_proxy_header()
        else:
            self._open()

    def data_received(self, data: bytes) -> None:
        data = self._transport.unwrap(data, self)
        if self._closing or not data:
            return
        if isinstance(self._server, asyncio.Protocol):
            self._server.data_received(data)
        else:
            self._waiting += data

    def eof_received(self) -> bool | None:
        return self._server.eof_received() if self._server is not None else None

    def connection_lost(self, error: Exception | None) -> None:
        self._closing = True
        self._transport.lost()
        self._stop_timer()
        self._context.memory.used -= self.held
        self.held = 0
        if self._server is not None:
            self._server.connection_lost(error)
        self._admission.farewell(self, self._client)
        self._admission.forget(self)

    def pause_writing(self) -> None:
        if self._server is not None:
            self._server.pause_writing()

    def resume_writing(self) -> None:
        if self._server is not None:
            self._server.resume_writing()

    # `SessionMemory` calls the following methods.

    must_stay = True  # most memory is used by a session, which is ended instead

    def shed(self) -> None:
        self.abort()

    # `Transport` calls the following methods.

    def named(self, header: ProxyHeader) -> bool:
        self._client, refusal = self._admission.readmit(self._client, header.address, header.port)
        if refusal is not None:
            self.say_goodbye(refusal)
        else:
            self._open()
        return refusal is None

    def encrypted(self, info: TlsInfo) -> None:
        self._context.events.metrics.tls_sessions.add((info.version,))
        self._begin()

    def client_ended(self) -> None:
        self._loop.call_soon(self.close)

    def say_goodbye(self, answer: ServerReply, *, detail: str = "") -> None:
        """End the connection, and log and count its refusal."""
        if answer.reason is not None:
            origin = Origin(client_address=self._client.address, protocol="HTTP")
            self._context.events.refused(origin, "", answer.reply, answer.reason.value, detail=detail)
        if not self._has_tls and answer.wire:
            self._transport.write(_BUSY)
        self.close()

    # From the handshakes to the HTTP server.

    def _open(self) -> None:
        """Start TLS or the HTTP server, now that the client has been identified."""
        if not self._has_tls:
            self._begin()
            return
        assert self._context.certificates is not None
        self._transport.start_tls(self._context.certificates.channel())
        self.held = TLS_COST
        self._context.memory.used += TLS_COST

    def _begin(self) -> None:
        service = self._service()
        if service.done():
            self._serve(service)
        else:  # the first clients wait for it
            self._transport.pause_reading(True)
            service.add_done_callback(self._serve)

    def _serve(self, loaded: asyncio.Future[HttpService]) -> None:
        if self._closing:
            return
        if loaded.cancelled() or loaded.exception() is not None:
            self.abort()
            return
        self._transport.pause_reading(False)
        self._stop_timer()
        self._server = loaded.result().connection()
        self._server.connection_made(self)
        if self._waiting:
            data, self._waiting = bytes(self._waiting), bytearray()
            self._server.data_received(data)

    # The HTTP server calls the following methods.

    def get_extra_info(self, name: str, default: Any = None) -> Any:  # Any: as asyncio has it
        if name == "peername":
            return self._client.address, self._client.port
        if name == PRIVATE:
            return self._transport.secured is not None
        return self._raw.get_extra_info(name, default)

    def write(self, data: bytes | bytearray | memoryview[int]) -> None:
        self._transport.write(bytes(data))

    def pause_reading(self) -> None:
        self._transport.pause_reading(True)

    def resume_reading(self) -> None:
        self._transport.pause_reading(False)

    def is_closing(self) -> bool:
        return not self._transport.is_open

    def close(self) -> None:
        """Close the connection after all output has been sent."""
        if not self._closing:
            self._closing = True
            self._stop_timer()
            self._timer = self._transport.close()

    def abort(self) -> None:
        self._closing = True
        self._transport.abort()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


OpenHttp = Callable[[Callable[[], ListenerSettings], Submit], Awaitable[HttpService]]
"""Loads the HTTP server of a listener, given a function that returns its current settings and one that
submits its mail.
"""


class HttpListener(AnyListener[HttpConnection]):
    """An HTTP [[listener]], which accepts connections."""

    def __init__(
        self, context: ListenerContext, inherited: InheritedSockets = NOTHING, *, open_http: OpenHttp
    ) -> None:
        super().__init__(context, inherited)
        self._open_http = open_http
        self._service: asyncio.Task[HttpService] | None = None

    def _protocol(self) -> HttpConnection:
        return HttpConnection(self.context, self._admission, self._serving)

    def _serving(self) -> asyncio.Future[HttpService]:
        if self._service is None:
            self._service = asyncio.get_running_loop().create_task(self._opened())
        return self._service

    async def _opened(self) -> HttpService:
        try:
            return await self._open_http(lambda: self.settings, self.submissions.submit)
        except Exception as error:
            self._service = None
            self.context.events.error("http-listener", error)
            raise

    async def drain(self, timeout: float) -> None:
        """Close idle connections now, the others after their current request. Abort them after `timeout`
        seconds.

        Return when no connection is left. A message that was received completely is committed first.
        """
        self._admission.draining = True
        if self._service is not None:
            await asyncio.wait([self._service])
        if self._service is not None:
            await self._service.result().close(timeout)
        for connection in tuple(self._admission.sessions):
            connection.abort()
        await self._admission.emptied(None)
        await self.submissions.drain(timeout)
