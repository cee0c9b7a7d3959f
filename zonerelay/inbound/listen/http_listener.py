"""One HTTP [[listener]]. Its mail is submitted to an SMTP listener without a socket and with the same
settings, so that the same limits, rules and guarantees apply as for all other mail.

The HTTP server is loaded when the first client connects, because aiohttp needs a fifth of the memory of an
idle relay. If loading fails, the error is logged, the client is disconnected, and the next client causes
another attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import KW_ONLY, InitVar, dataclass

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


@dataclass(eq=False, repr=False)
class HttpListener:
    """Accepts connections for an HTTP [[listener]]."""

    settings: ListenerSettings
    behind: Listener
    _: KW_ONLY
    open_http: OpenHttp
    events: Events
    shared: InitVar[SharedContext]
    certificates: TlsContexts | None = None
    inherited: InitVar[Inherited] = NOTHING

    def __post_init__(self, shared: SharedContext, inherited: Inherited) -> None:
        self._memory = shared.memory
        self._admission: Admission[HttpConnection] = Admission(
            self.settings, memory=shared.memory, metrics=self.events.metrics
        )
        self._service: ServesHttp | None = None
        self._opening: asyncio.Task[ServesHttp] | None = None
        self._socket = ListeningSocket(inherited, self._connection)

    @property
    def submissions(self) -> Submissions:
        return self.behind.submissions

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
            self.certificates,
            admission=self._admission,
            memory=self._memory,
            events=self.events,
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
            self._service = await self.open_http(lambda: self.settings, self.submissions.submit)
        except Exception as error:
            self.events.error("http-listener", error)
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
        self.settings, self.certificates = settings, certificates
        self._admission.configure(settings)
        self.behind.configure(settings, shared, policy=policy)

    def asks(self, policy: AskedPolicy) -> bool:
        """Return whether an open session uses this policy (see `Listener.asks`)."""
        return self.behind.asks(policy)

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
        await self.behind.drain(timeout)
