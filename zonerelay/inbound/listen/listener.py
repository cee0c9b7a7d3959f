"""One SMTP [[listener]], its sessions, and the mail that is submitted to it without SMTP.

It owns the objects that they share. If an address cannot be used, the error of `start` explains why. Stopping
has two steps: `stop_accepting`, then `drain`, which gives clients time to finish their transactions and waits
for all commits.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Generic, TypeVar

from zonerelay.config.settings import ListenerSettings
from zonerelay.inbound.cleanup.submit import Submissions
from zonerelay.inbound.limits.memory import MemoryHolder
from zonerelay.inbound.listen.listening_socket import ListeningSocket
from zonerelay.inbound.session.admission import Admission
from zonerelay.inbound.session.session import Session
from zonerelay.inbound.state.context import AskedPolicy, Consultants, ListenerContext, SharedContext
from zonerelay.inbound.tls.ports import TlsContexts
from zonerelay.model.clock import Clock
from zonerelay.model.message_id import MessageIdSource
from zonerelay.process.sockets import NOTHING, InheritedSockets
from zonerelay.routing.zones.zones import ChooseZone
from zonerelay.store.contract import QueueStore
from zonerelay.telemetry.events.events import Events

S = TypeVar("S", bound=MemoryHolder)
TALKING = 1.0
"""Seconds without data after which a client outside a transaction counts as idle when the relay stops."""


class AnyListener(ABC, Generic[S]):
    """Accepts connections for a [[listener]]."""

    def __init__(
        self,
        settings: ListenerSettings,
        *,
        hostname: str,
        store: QueueStore,
        ids: MessageIdSource,
        choose_zone: ChooseZone,
        events: Events,
        clock: Clock,
        shared: SharedContext,
        certificates: TlsContexts | None = None,
        policy: AskedPolicy | None = None,
        inherited: InheritedSockets = NOTHING,
    ) -> None:
        self.settings = settings
        self._context = ListenerContext(
            **shared.fields(),
            settings=settings,
            hostname=hostname,
            store=store,
            ids=ids,
            choose_zone=choose_zone,
            events=events,
            clock=clock,
            consultants=_consultants(settings, shared, events, policy),
            certificates=certificates,
        )
        self.submissions = Submissions(self._context)
        self._admission: Admission[S] = Admission(settings, memory=shared.memory, metrics=events.metrics)
        self._socket = ListeningSocket(inherited, self._protocol)

    @property
    def connections(self) -> int:
        return self._admission.count

    @property
    def addresses(self) -> list[str]:
        """The addresses that the socket is bound to, as in the configuration. Empty before `start`."""
        return self._socket.addresses

    async def start(self) -> None:
        """Start to listen. Raise ListenError if the address cannot be used."""
        await self._socket.start(self.settings.address)

    @abstractmethod
    def _protocol(self) -> asyncio.Protocol:
        """Return the protocol of a new connection."""

    def configure(
        self,
        settings: ListenerSettings,
        shared: SharedContext,
        certificates: TlsContexts | None = None,
        policy: AskedPolicy | None = None,
    ) -> None:
        """Apply these settings to new connections, and to new HTTP requests of open ones. Open sessions keep
        the settings they began with.
        """
        self.settings = settings
        self._context = replace(
            self._context,
            **shared.fields(),
            settings=settings,
            consultants=_consultants(settings, shared, self._context.events, policy),
            certificates=certificates,
        )
        self.submissions.configure(self._context)
        self._admission.configure(settings)

    def asks(self, policy: AskedPolicy) -> bool:
        """Return whether an open session uses this policy, which may have been replaced since."""
        return self.submissions.asks(policy)

    def stop_accepting(self) -> None:
        """Close the listening socket. Connections stay open."""
        self._socket.close()

    @abstractmethod
    async def drain(self, timeout: float) -> None:
        """End all connections, and abort them after `timeout` seconds. Return when none is left. A message
        that has been received completely is committed first, however long the store takes.
        """


class Listener(AnyListener[Session]):
    """Accepts connections for an SMTP [[listener]]."""

    def _protocol(self) -> asyncio.Protocol:
        return Session(self._context, self._admission, asyncio.get_running_loop())

    def asks(self, policy: AskedPolicy) -> bool:
        return super().asks(policy) or any(
            session.context.consultants.policy is policy for session in self._admission.sessions
        )

    async def drain(self, timeout: float) -> None:
        """Send 421 to idle clients now and to the others after their transaction. Abort them after `timeout`
        seconds.

        A client that has just sent something gets a moment to begin its transaction.

        Return when no session is left. A message whose end of data has arrived is committed first, however
        long the store takes.
        """
        self._admission.draining = True
        loop = asyncio.get_running_loop()
        for session in tuple(self._admission.sessions):
            moment = min(session.deadlines.heard + TALKING - loop.time(), timeout / 2)
            if moment > 0:
                loop.call_later(moment, session.drain)
            else:
                session.drain()
        submissions = loop.create_task(self.submissions.drain(timeout))
        if not await self._admission.emptied(timeout):
            for session in tuple(self._admission.sessions):
                session.abort()
            await self._admission.emptied(None)
        await submissions


def _consultants(
    settings: ListenerSettings, shared: SharedContext, events: Events, policy: AskedPolicy | None
) -> Consultants:
    return Consultants(
        events=events,
        users=shared.users,
        sender_domains=shared.sender_domains if settings.check_sender_domain else None,
        policy=policy,
    )
