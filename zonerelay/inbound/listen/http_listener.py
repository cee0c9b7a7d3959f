"""One HTTP [[listener]]. Its mail is submitted to an SMTP listener without a socket and with the same
settings, so that the same limits, rules and guarantees apply as for all other mail.

The HTTP server is loaded when the first client connects, because aiohttp needs a fifth of the memory of an
idle relay. If loading fails, the error is logged, the client is disconnected, and the next client causes
another attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from zonerelay.config.settings import ListenerSettings
from zonerelay.inbound.cleanup.submit import Submissions
from zonerelay.inbound.listen.http_connection import HttpConnection, OpenHttp, ServesHttp
from zonerelay.inbound.listen.listener import Listener
from zonerelay.inbound.listen.listening_socket import ListeningSocket
from zonerelay.inbound.session.admission import Admission
from zonerelay.inbound.state.context import SharedContext
from zonerelay.inbound.state.questions import AskedPolicy
from zonerelay.inbound.tls.ports import TlsContexts
from zonerelay.process.sockets import NOTHING, Inherited
from zonerelay.telemetry.events.events import Events


class HttpListener:
    """Accepts connections for an HTTP [[listener]]."""

    def __init__(
        self,
        settings: ListenerSettings,
        behind: Listener,
        *,
        open_http: OpenHttp,
        events: Events,
        shared: SharedContext,
        certificates: TlsContexts | None = None,
        inherited: Inherited = NOTHING,
    ) -> None:
        self.settings = settings
        self._certificates = certificates
        self._memory = shared.memory
        self._events = events
        self._admission: Admission[HttpConnection] = Admission(
            settings, memory=shared.memory, metrics=events.metrics
        )
        self._behind = behind
        self._open_http = open_http
        self._service: ServesHttp | None = None
        self._opening: asyncio.Task[ServesHttp] | None = None
        self._socket = ListeningSocket(inherited, self._connection)

    @property
    def submissions(self) -> Submissions:
        return self._behind.submissions

    @property
    def connections(self) -> int:
        return self._admission.count

    @property
    def addresses(self) -> list[str]:
        """The addresses that the socket is bound to, as in the configuration. The list is empty before
        `start`.
        """
        return self._socket.addresses

    async def start(self) -> None:
        """Start to listen. Raise ListenError if the address cannot be used."""
        await self._socket.start(self.settings.address)

    def _connection(self) -> HttpConnection:
        return HttpConnection(
            self.settings,
            self._certificates,
            admission=self._admission,
            memory=self._memory,
            events=self._events,
            service=self._serving,
        )

    def _serving(self) -> ServesHttp | Awaitable[ServesHttp]:
        if self._service is not None:
            return self._service
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._opened())
        return self._opening

    async def _opened(self) -> ServesHttp:
        try:
            self._service = await self._open_http(lambda: self.settings, self.submissions.submit)
        except Exception as error:
            self._events.error("http-listener", error)
            raise
        finally:
            self._opening = None
        return self._service

    def configure(
        self,
        settings: ListenerSettings,
        shared: SharedContext,
        certificates: TlsContexts | None = None,
        policy: AskedPolicy | None = None,
    ) -> None:
        """Apply these settings to new connections, and to new requests of open ones."""
        self.settings, self._certificates = settings, certificates
        self._admission.configure(settings)
        self._behind.configure(settings, shared, policy=policy)

    def asks(self, policy: AskedPolicy) -> bool:
        """Return whether an open session uses this policy (see `Listener.asks`)."""
        return self._behind.asks(policy)

    def stop_accepting(self) -> None:
        """Close the listening socket. Connections stay open."""
        self._socket.close()

    async def drain(self, timeout: float) -> None:
        """Close idle connections now, the others after their current request. Abort them after `timeout`
        seconds.

        Return when no connection is left. A message that was received completely is committed first.
        """
        self._admission.draining = True
        if self._opening is not None:
            await asyncio.wait([self._opening])
        if self._service is not None:
            await self._service.close(timeout)
        for connection in tuple(self._admission.sessions):
            connection.abort()
        await self._admission.emptied(None)
        await self._behind.drain(timeout)
