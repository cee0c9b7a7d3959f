"""An SMTP [[listener]], its sessions, and the mail that is submitted to it without SMTP.

It owns the objects that they share, and the listening socket: opened here, or inherited from the process that
started this one. If an address cannot be used, the error of `start` explains why. Stopping
has two steps: `stop_accepting`, then `drain`, which gives clients time to finish their transactions and waits
for all commits.
"""

import asyncio
import socket
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Generic, TypeVar

from zonerelay.config.endpoints import parse_listen
from zonerelay.config.settings import ListenerSettings
from zonerelay.inbound.cleanup.submit import MessageSubmitter
from zonerelay.inbound.limits.memory import MemoryHolder
from zonerelay.inbound.listen.listening_socket import BACKLOG, ListenError, SiblingSockets, bound, explained
from zonerelay.inbound.session.admission import Admission
from zonerelay.inbound.session.session import Session
from zonerelay.inbound.state.context import AskedPolicy, ListenerContext
from zonerelay.process.sockets import NOTHING, InheritedSockets, bound_address, bound_path

S = TypeVar("S", bound=MemoryHolder)
TALKING = 1.0
"""Seconds without data after which a client outside a transaction counts as idle when the relay stops."""


class AnyListener(ABC, Generic[S]):
    """The base class of listeners, which accept connections for a [[listener]]."""

    def __init__(self, context: ListenerContext, inherited: InheritedSockets = NOTHING) -> None:
        self.context = context
        self.submissions = MessageSubmitter(context)
        self._admission = Admission[S](context)
        self._inherited = inherited
        self._server: asyncio.Server | None = None
        self._siblings: SiblingSockets | None = None
        self._path: Path | None = None

    @property
    def settings(self) -> ListenerSettings:
        return self.context.settings

    @property
    def connections(self) -> int:
        return self._admission.count

    @property
    def addresses(self) -> list[str]:
        """The addresses at which the listener accepts connections, in the notation of the configuration.
        Empty before `start`.
        """
        return [] if self._server is None else [bound_address(each) for each in self._server.sockets]

    async def start(self) -> None:
        """Start to listen on the configured address. Raise ListenError if the address cannot be used."""
        address = self.settings.address
        try:
            self._server = await self._listen(address)
        except ValueError as error:
            raise ListenError(f"cannot listen on {address}: {error}") from error
        except OSError as error:
            raise ListenError(f"cannot listen on {address}: {explained(error)}") from error

    async def _listen(self, text: str) -> asyncio.Server:
        """Listen on a socket that this process has inherited for the address, or else on a new one."""
        loop, address = asyncio.get_running_loop(), parse_listen(text)
        handed = self._inherited.take(text)
        if handed is not None:
            spare, others = self._inherited.take_more(text)
            self._siblings = SiblingSockets(others, self._protocol, spare=spare) if others or spare else None
            made = handed  # it stays open in the other process when this process closes it
        elif address.is_unix:
            self._path = Path(address.path)
            made = bound_path(self._path)
        else:
            made = bound(address)
        make = loop.create_unix_server if made.family == socket.AF_UNIX else loop.create_server
        return await make(self._protocol, sock=made, backlog=BACKLOG)

    @abstractmethod
    def _protocol(self) -> asyncio.Protocol:
        """Return the protocol for a new connection."""

    def configure(self, context: ListenerContext) -> None:
        """Apply this context, with its settings, to new connections and to new HTTP requests on open ones.
        Open sessions keep the one they began with.
        """
        self.context = context
        self.submissions.context = context
        self._admission.configure(context)

    def asks(self, policy: AskedPolicy) -> bool:
        """Return whether an open session still uses this policy, which may have been replaced."""
        return self.submissions.asks(policy)

    def stop_accepting(self) -> None:
        """Close the listening socket; open connections continue."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        if self._siblings is not None:
            self._siblings.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    @abstractmethod
    async def drain(self, timeout: float) -> None:
        """End all connections, and abort them after `timeout` seconds. Return when none is left. A message
        that has been received completely is committed first, however long the store takes.
        """


class Listener(AnyListener[Session]):
    """An SMTP [[listener]], which accepts connections."""

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
