"""One [[listener]] for SMTP and the sessions it has made.

Owns what its sessions share. `start` says in words why an address cannot be used.
Stopping has two steps: `stop_accepting`, then `drain`, which gives clients in a transaction the time to
finish it and never leaves a commit behind.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from dataclasses import replace

from zonerelay.config.settings import ListenerAuth, ListenerSettings, ListenerTls
from zonerelay.inbound.listen.in_process import connect
from zonerelay.inbound.listen.listening_socket import ListeningSocket
from zonerelay.inbound.session.admission import Admission
from zonerelay.inbound.session.session import Session
from zonerelay.inbound.state.context import HTTP_NOTE, ListenerContext, NotifyQueue, SharedContext
from zonerelay.inbound.state.questions import AskedPolicy, Consultants
from zonerelay.inbound.tls.ports import TlsContexts
from zonerelay.model.clock import Clock
from zonerelay.model.message_id import MessageIdSource
from zonerelay.process.sockets import NOTHING, Inherited
from zonerelay.routing.zones.zones import ChooseZone
from zonerelay.store.contract import QueueStore
from zonerelay.telemetry.events.events import Events

TALKING = 1.0
"""Seconds after which a client that is in no transaction counts as idle when the relay stops."""


class Listener:
    def __init__(
        self,
        settings: ListenerSettings,
        *,
        hostname: str,
        store: QueueStore,
        ids: MessageIdSource,
        choose_zone: ChooseZone,
        notify: NotifyQueue,
        events: Events,
        clock: Clock,
        shared: SharedContext,
        certificates: TlsContexts | None = None,
        policy: AskedPolicy | None = None,
        inherited: Inherited = NOTHING,
        over_http: bool = False,
    ) -> None:
        """`over_http`: no client reaches it. The relay's own HTTP server hands mail in, under these settings:
        by `connect`, or from another process through the socket of `start_at`.
        """
        settings = _for_http(settings) if over_http else settings
        self.settings = settings
        self._over_http = over_http
        self._events = events
        self._shared = shared
        self._context = ListenerContext(
            **shared.fields(),
            settings=settings,
            hostname=hostname,
            store=store,
            ids=ids,
            choose_zone=choose_zone,
            notify=notify,
            events=events,
            clock=clock,
            consultants=self._consultants(settings, shared, policy),
            certificates=certificates,
        )
        self._admission: Admission[Session] = Admission(
            settings, memory=shared.memory, metrics=events.metrics, over_http=over_http
        )
        self._socket = ListeningSocket(inherited, self._session)

    @property
    def connections(self) -> int:
        return self._admission.count

    @property
    def addresses(self) -> list[str]:
        """The addresses that the socket is bound to, as in the configuration; empty before `start`."""
        return self._socket.addresses

    async def start(self) -> None:
        """Raises ListenError."""
        await self._socket.start(self.settings.address)

    async def start_at(self, bound_socket: socket.socket) -> None:
        """Listen on a Unix socket instead."""
        await self._socket.start_at(bound_socket)

    def connect(self, client: asyncio.Protocol) -> None:
        """Begin a session with a client in this process."""
        connect(client, self._session())

    def _session(self) -> Session:
        return Session(self._context, self._admission, asyncio.get_running_loop())

    def _consultants(
        self, settings: ListenerSettings, shared: SharedContext, policy: AskedPolicy | None
    ) -> Consultants:
        return Consultants(
            events=self._events,
            users=shared.users,
            sender_domains=shared.sender_domains if settings.check_sender_domain else None,
            policy=policy,
        )

    def configure(
        self,
        settings: ListenerSettings,
        shared: SharedContext,
        certificates: TlsContexts | None = None,
        policy: AskedPolicy | None = None,
    ) -> None:
        """Apply these settings to new sessions; open sessions keep those they began with."""
        settings = _for_http(settings) if self._over_http else settings
        self.settings = settings
        self._shared = shared
        self._context = replace(
            self._context,
            **shared.fields(),
            settings=settings,
            consultants=self._consultants(settings, shared, policy),
            certificates=certificates,
        )
        self._admission.configure(settings)
        if self._over_http:
            for session in tuple(self._admission.sessions):
                session.drain()  # the HTTP server keeps sessions for later mail, which goes by these settings

    def asks(self, policy: AskedPolicy) -> bool:
        """A session that is open asks this policy, which may have been replaced since it began."""
        return any(session.context.consultants.policy is policy for session in self._admission.sessions)

    def stop_accepting(self) -> None:
        """Close the listening socket; connections stay."""
        self._socket.close()

    async def drain(self, timeout: float) -> None:
        """Send 421 to idle clients now, to the others after their transaction; after `timeout` close hard.

        A client that has just sent something gets a moment to begin its transaction.

        Returns when no session is left. A message whose end of data has arrived is committed first,
        however long the store takes.
        """
        self._admission.draining = True
        loop = asyncio.get_running_loop()
        for session in tuple(self._admission.sessions):
            moment = min(session.deadlines.heard + TALKING - loop.time(), timeout / 2)
            if moment > 0 and not self._over_http:
                loop.call_later(moment, session.drain)
            else:
                session.drain()
        if not await self._admission.emptied(timeout):
            for session in tuple(self._admission.sessions):
                session.abort()
            await self._admission.emptied(None)


def _for_http(settings: ListenerSettings) -> ListenerSettings:
    """A token has let the client in: it needs no log-in and no TLS. One request names all its recipients, so
    that many of them may be refused.
    """
    return replace(
        settings,
        tls=ListenerTls.NONE,
        require_tls=False,
        auth=ListenerAuth.OFF,
        drop_headers=(*settings.drop_headers, HTTP_NOTE),
        max_commands=sys.maxsize,
        max_errors=sys.maxsize,
    )
