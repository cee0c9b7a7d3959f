"""One HTTP [[listener]]. Its mail is submitted as mail of an SMTP listener with the same settings, so that
the same limits, rules and guarantees apply as for all other mail.

The HTTP server is loaded when the first client connects, because aiohttp needs a fifth of the memory of an
idle relay. If loading fails, the error is logged, the client is disconnected, and the next client causes
another attempt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from zonerelay.config.settings import ListenerSettings
from zonerelay.inbound.listen.http_connection import HttpConnection, HttpService, OpenHttp
from zonerelay.inbound.listen.listener import Listener
from zonerelay.inbound.session.admission import Admission
from zonerelay.inbound.state.context import SharedContext
from zonerelay.inbound.state.questions import AskedPolicy
from zonerelay.inbound.tls.ports import TlsContexts


class HttpListener(Listener):
    """Accepts connections for an HTTP [[listener]]."""

    def __init__(self, settings: ListenerSettings, *, open_http: OpenHttp, **parts: Any) -> None:
        """`parts` are those of a Listener."""
        super().__init__(settings, **parts)
        self._open_http = open_http
        self._connections: Admission[HttpConnection] = Admission(
            settings, memory=self._context.memory, metrics=self._context.events.metrics
        )
        self._service: HttpService | None = None
        self._opening: asyncio.Task[HttpService] | None = None

    @property
    def connections(self) -> int:
        return self._connections.count

    def _protocol(self) -> HttpConnection:
        return HttpConnection(self._context, self._connections, self._serving)

    def _serving(self) -> HttpService | Awaitable[HttpService]:
        if self._service is not None:
            return self._service
        if self._opening is None:
            self._opening = asyncio.get_running_loop().create_task(self._opened())
        return self._opening

    async def _opened(self) -> HttpService:
        try:
            self._service = await self._open_http(lambda: self.settings, self.submissions.submit)
        except Exception as error:
            self._context.events.error("http-listener", error)
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
        super().configure(settings, shared, certificates, policy)
        self._connections.configure(settings)

    async def drain(self, timeout: float) -> None:
        """Close idle connections now, the others after their current request. Abort them after `timeout`
        seconds.

        Return when no connection is left. A message that was received completely is committed first.
        """
        self._connections.draining = True
        if self._opening is not None:
            await asyncio.wait([self._opening])
        if self._service is not None:
            await self._service.close(timeout)
        for connection in tuple(self._connections.sessions):
            connection.abort()
        await self._connections.emptied(None)
        await super().drain(timeout)
