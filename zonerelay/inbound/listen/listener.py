"""A listening socket and the sessions it has made.

Owns the server socket and what its sessions share. `start` says in words why an address cannot be used.
Stopping has two steps: `stop_accepting`, then `drain`, which gives clients in a transaction the time to
finish it and never leaves a commit behind.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from zonerelay.config.endpoints import ListenAddress, join_port, parse_listen
from zonerelay.config.settings import ListenerSettings
from zonerelay.inbound.listen.binding import BACKLOG, bound, explained, refuse_live_socket
from zonerelay.inbound.listen.in_process import connect
from zonerelay.inbound.listen.sibling_sockets import SiblingSockets
from zonerelay.inbound.session.admission import Admission
from zonerelay.inbound.session.session import Session
from zonerelay.inbound.state.context import ListenerContext, NotifyQueue, SharedContext
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


class ListenError(Exception):
    """The address cannot be listened on; the text is for the operator."""


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
        self.settings = settings
        self._over_http = over_http
        self._inherited = inherited
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
        self._server: asyncio.Server | None = None
        self._siblings: SiblingSockets | None = None
        self._socket_path: Path | None = None

    @property
    def connections(self) -> int:
        return self._admission.count

    @property
    def addresses(self) -> list[str]:
        """The addresses that the socket is bound to, as in the configuration; empty before `start`."""
        if self._server is None:
            return []
        names = [each.getsockname() for each in self._server.sockets]
        return [f"unix:{name}" if isinstance(name, str) else join_port(name[0], name[1]) for name in names]

    async def start(self) -> None:
        """Raises ListenError."""
        text = self.settings.address
        try:
            self._server = await self._listen(parse_listen(text))
        except ValueError as error:
            raise ListenError(f"cannot listen on {text}: {error}") from error
        except OSError as error:
            raise ListenError(f"cannot listen on {text}: {explained(error)}") from error

    def connect(self, client: asyncio.Protocol) -> None:
        """Begin a session with a client in this process."""
        connect(client, self._session())

    async def start_at(self, bound_socket: socket.socket) -> None:
        self._socket_path = Path(bound_socket.getsockname())
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(self._session, sock=bound_socket, backlog=BACKLOG)

    def _session(self) -> Session:
        return Session(self._context, self._admission, asyncio.get_running_loop())

    async def _listen(self, address: ListenAddress) -> asyncio.Server:
        loop, session = asyncio.get_running_loop(), self._session
        handed = self._inherited.take(self.settings.address)
        if handed is not None:
            text = self.settings.address
            others, spare = self._inherited.take_others(text), self._inherited.take_spare(text)
            self._siblings = SiblingSockets(others, session, spare=spare) if others or spare else None
            return await _serve(loop, session, handed)
        if address.is_unix:
            path = Path(address.path)
            refuse_live_socket(path)
            server = await loop.create_unix_server(session, address.path, backlog=BACKLOG)
            self._socket_path = path
            return server
        return await loop.create_server(session, sock=bound(address), backlog=BACKLOG)

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
        if self._server is None:
            return
        self._server.close()
        self._server = None
        if self._siblings is not None:
            self._siblings.close()
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)

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


async def _serve(
    loop: asyncio.AbstractEventLoop, session: Callable[[], Session], handed: socket.socket
) -> asyncio.Server:
    """Listen on a socket that stays open elsewhere when we close ours."""
    if handed.family == socket.AF_UNIX:
        return await loop.create_unix_server(session, sock=handed, backlog=BACKLOG)
    return await loop.create_server(session, sock=handed, backlog=BACKLOG)
