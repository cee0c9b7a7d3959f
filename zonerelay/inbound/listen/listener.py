"""One SMTP [[listener]], its sessions, and the mail that is submitted to it without SMTP.

It owns the objects that they share. If an address cannot be used, the error of `start` explains why. Stopping
has two steps: `stop_accepting`, then `drain`, which gives clients time to finish their transactions and waits
for all commits.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from zonerelay.config.settings import ListenerSettings
from zonerelay.inbound.cleanup.submit import Submissions
from zonerelay.inbound.limits.memory import MemoryHolder
from zonerelay.inbound.listen.listening_socket import ListeningSocket
from zonerelay.inbound.session.admission import Admission
from zonerelay.inbound.session.session import Session
from zonerelay.inbound.state.context import AskedPolicy, ListenerContext
from zonerelay.process.sockets import NOTHING, InheritedSockets

S = TypeVar("S", bound=MemoryHolder)
TALKING = 1.0
"""Seconds without data after which a client outside a transaction counts as idle when the relay stops."""


class AnyListener(ABC, Generic[S]):
    """Accepts connections for a [[listener]]."""

    def __init__(self, context: ListenerContext, inherited: InheritedSockets = NOTHING) -> None:
        self.context = context
        self.submissions = Submissions(context)
        self._admission: Admission[S] = Admission(
            context.settings, memory=context.memory, metrics=context.events.metrics
        )
        self._socket = ListeningSocket(inherited, self._protocol)

    @property
    def settings(self) -> ListenerSettings:
        return self.context.settings

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

    def configure(self, context: ListenerContext) -> None:
        """Use this context for new connections, and for new HTTP requests of open ones. Open sessions keep
        the one they began with.
        """
        self.context = context
        self.submissions.configure(context)
        self._admission.configure(context.settings)

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
        return Session(self.context, self._admission, asyncio.get_running_loop())

    def asks(self, policy: AskedPolicy) -> bool:
        return super().asks(policy) or any(
            session.context.policy is policy for session in self._admission.sessions
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
