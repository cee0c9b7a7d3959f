"""A listening socket and the sessions it has made.

Owns the server socket, the connection limits and the set of live sessions. `start` says in words why an
address cannot be used. Stopping has two steps: `stop_accepting`, then `drain`, which gives clients in a
transaction the time to finish it and never leaves a commit behind.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from zonerelay.config.options.endpoints import ListenAddress, join_port, parse_listen
from zonerelay.config.settings import ListenerSettings
from zonerelay.inbound.access.networks import AccessPolicy, Client
from zonerelay.inbound.limits.connections import ConnectionLimits
from zonerelay.inbound.listen.binding import BACKLOG, bound, explained, refuse_live_socket
from zonerelay.inbound.listen.sibling_sockets import SiblingSockets
from zonerelay.inbound.listen.unix_sockets import Shared
from zonerelay.inbound.refusal import Reason
from zonerelay.inbound.session.session import Session
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.context import ChooseZone, ListenerContext, Notify
from zonerelay.inbound.state.questions import AskedPolicy, Consultants
from zonerelay.inbound.state.replies import ServerReply
from zonerelay.inbound.tls.ports import TlsContexts
from zonerelay.model.clock import Clock
from zonerelay.model.message_id import MessageIdSource
from zonerelay.process.sockets import NOTHING, Inherited
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
        notify: Notify,
        events: Events,
        clock: Clock,
        shared: Shared,
        certificates: TlsContexts | None = None,
        policy: AskedPolicy | None = None,
        inherited: Inherited = NOTHING,
    ) -> None:
        self.settings = settings
        self._inherited = inherited
        self._events = events
        self._shared = shared
        self._context = ListenerContext(
            settings=settings,
            hostname=hostname,
            store=store,
            ids=ids,
            choose_zone=choose_zone,
            notify=notify,
            events=events,
            clock=clock,
            consultants=self._consultants(settings, shared, policy),
            memory=shared.memory,
            error_delays=shared.error_delays,
            access=shared.access,
            bursts=shared.bursts,
            rewriting=shared.rewriting,
            srs=shared.srs,
            strangers=shared.strangers,
            hash_bodies=shared.hash_bodies,
            zone_sizes=shared.zone_sizes,
            certificates=certificates,
        )
        self._metrics = events.metrics
        self._access = AccessPolicy(settings)
        self._limits = ConnectionLimits(
            total=settings.max_connections,
            per_client=settings.max_connections_per_client,
            per_network=settings.max_connections_per_network,
        )
        self._sessions: set[Session] = set()
        self._server: asyncio.Server | None = None
        self._siblings: SiblingSockets | None = None
        self._socket_path: Path | None = None
        self._draining = False
        self._empty: asyncio.Future[None] | None = None

    @property
    def connections(self) -> int:
        return self._limits.count

    @property
    def addresses(self) -> list[str]:
        """Where this listener really listens, in the form of the configuration; empty when it does not."""
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

    async def _listen(self, address: ListenAddress) -> asyncio.Server:
        loop = asyncio.get_running_loop()

        def session() -> Session:
            return Session(self._context, self, loop)

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
        self, settings: ListenerSettings, shared: Shared, policy: AskedPolicy | None
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
        shared: Shared,
        certificates: TlsContexts | None = None,
        policy: AskedPolicy | None = None,
    ) -> None:
        """Greet by these settings from now on; sessions that are open end by those they began with."""
        self.settings = settings
        self._shared = shared
        self._context = replace(
            self._context,
            settings=settings,
            consultants=self._consultants(settings, shared, policy),
            access=shared.access,
            rewriting=shared.rewriting,
            srs=shared.srs,
            hash_bodies=shared.hash_bodies,
            zone_sizes=shared.zone_sizes,
            certificates=certificates,
        )
        self._access = AccessPolicy(settings)
        self._limits.change(
            total=settings.max_connections,
            per_client=settings.max_connections_per_client,
            per_network=settings.max_connections_per_network,
        )

    def asks(self, policy: AskedPolicy) -> bool:
        """A session that is open asks this policy, which may have been replaced since it began."""
        return any(session.context.consultants.policy is policy for session in self._sessions)

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
        """421 to idle clients now, to the others after their transaction; after `timeout` close hard. Who
        spoke just now has a moment for what he came for: connecting before the drain must not end in a
        refusal.

        Returns when no session is left. A message whose end of data has arrived is committed first,
        however long the store takes.
        """
        self._draining = True
        loop = asyncio.get_running_loop()
        for session in tuple(self._sessions):
            moment = min(session.deadlines.heard + TALKING - loop.time(), timeout / 2)
            if moment > 0:
                loop.call_later(moment, session.drain)
            else:
                session.drain()
        if not await self._emptied(timeout):
            for session in tuple(self._sessions):
                session.abort()
            await self._emptied(None)

    async def _emptied(self, timeout: float | None) -> bool:
        if not self._sessions:
            return True
        self._empty = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait([self._empty], timeout=timeout)
        self._empty = None
        return bool(done)

    # What sessions ask of their house.

    def welcome(self, session: Session, peer: object) -> tuple[Client, ServerReply | None]:
        client = self._access.identify(peer)
        self._sessions.add(session)
        if not client.address and not self.settings.address.startswith("unix:"):
            # Gone before we looked: HAProxy's checks do that.
            return client, replies.NOBODY
        if self._draining:
            return client, replies.SHUTTING_DOWN
        memory = self._shared.memory
        if memory.tight:
            return client, replies.TOO_MUCH_MEMORY
        reason = self._limits.enter(_counted_as(client))
        if reason is not None:
            return client, _TOO_MANY[reason]
        memory.holders.add(session)
        self._metrics.inbound_opened()
        return client, None

    def readmit(self, client: Client, address: str, port: int) -> tuple[Client, ServerReply | None]:
        named = self._access.named(address, port, by=client)
        reason = self._limits.move(_counted_as(client), _counted_as(named))
        return (named, None) if reason is None else (client, _TOO_MANY[reason])

    def farewell(self, session: Session, client: Client) -> None:
        self._limits.leave(_counted_as(client))
        self._shared.memory.holders.discard(session)
        self._metrics.inbound_closed()

    def forget(self, session: Session) -> None:
        self._sessions.discard(session)
        if not self._sessions and self._empty is not None and not self._empty.done():
            self._empty.set_result(None)


async def _serve(
    loop: asyncio.AbstractEventLoop, session: Callable[[], Session], handed: socket.socket
) -> asyncio.Server:
    """Listen on a socket that stays open elsewhere when we close ours."""
    if handed.family == socket.AF_UNIX:
        return await loop.create_unix_server(session, sock=handed, backlog=BACKLOG)
    return await loop.create_server(session, sock=handed, backlog=BACKLOG)


_TOO_MANY = {
    Reason.CONNECTIONS: replies.TOO_MANY_CONNECTIONS,
    Reason.CLIENT_CONNECTIONS: replies.TOO_MANY_FROM_CLIENT,
    Reason.NETWORK_CONNECTIONS: replies.TOO_MANY_FROM_NETWORK,
}


def _counted_as(client: Client) -> str:
    """A load balancer is not a client: who comes through it is counted once that is known."""
    return "" if client.proxies else client.address
