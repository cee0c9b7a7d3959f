"""Admits connections to one listener, within limits per address, client, network and memory.

It owns the set of open sessions. Each `welcome` needs one `farewell`. `forget` comes last, when no task of
the session is running. A refusal is the reply for the client, with its reason.
"""

import asyncio
from typing import Generic, TypeVar

from zonerelay.inbound.access.networks import Client
from zonerelay.inbound.limits.clients import ConnectionLimits
from zonerelay.inbound.limits.memory import MemoryHolder
from zonerelay.inbound.refusal import Reason
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.context import ListenerContext
from zonerelay.inbound.state.replies import ServerReply

S = TypeVar("S", bound=MemoryHolder)

_TOO_MANY = {
    Reason.CONNECTIONS: replies.TOO_MANY_CONNECTIONS,
    Reason.CLIENT_CONNECTIONS: replies.TOO_MANY_FROM_CLIENT,
    Reason.NETWORK_CONNECTIONS: replies.TOO_MANY_FROM_NETWORK,
}


class Admission(ConnectionLimits, Generic[S]):
    """Admits connections to one listener within its limits. `count` is the number of those that are open."""

    def __init__(self, context: ListenerContext) -> None:
        super().__init__(context.settings)
        self._memory = context.memory
        self._metrics = context.events.metrics
        self.configure(context)
        self._empty: asyncio.Future[None] | None = None
        self.sessions: set[S] = set()
        self.draining = False

    def configure(self, context: ListenerContext) -> None:
        """Apply new settings to new connections. Open connections stay."""
        self._access, self.settings = context.clients, context.settings

    def welcome(self, session: S, peer: object) -> tuple[Client, ServerReply | None]:
        """Identify the client of a new connection and count the connection, or return the refusal."""
        client = self._access.identify(peer)
        self.sessions.add(session)
        if not (client.address or client.may_relay):
            # The client disconnected before it was identified, as HAProxy's health checks do.
            return client, replies.NOBODY
        if self.draining:
            return client, replies.SHUTTING_DOWN
        memory = self._memory
        if memory.tight:
            return client, replies.TOO_MUCH_MEMORY
        # A load balancer counts in the total only, until its client is named.
        reason = self.enter("" if client.proxies else client.address)
        if reason is not None:
            return client, _TOO_MANY[reason]
        memory.holders.add(session)
        self._metrics.inbound.value += 1
        return client, None

    def readmit(self, client: Client, address: str, port: int) -> tuple[Client, ServerReply | None]:
        """Count the connection for the client that PROXY or XCLIENT names, or return the refusal."""
        named = self._access.named(address, port, by=client)
        reason = self.move("" if client.proxies else client.address, named.address)
        return (named, None) if reason is None else (client, _TOO_MANY[reason])

    def farewell(self, session: S, client: Client) -> None:
        """Remove a closed connection from the counts. Do nothing if it was not admitted."""
        holders = self._memory.holders
        if session in holders:
            holders.discard(session)
            self.leave("" if client.proxies else client.address)
            self._metrics.inbound.value -= 1

    def forget(self, session: S) -> None:
        """Remove a closed session of which no task is running any more."""
        self.sessions.discard(session)
        if not self.sessions and self._empty is not None and not self._empty.done():
            self._empty.set_result(None)

    async def emptied(self, timeout: float | None) -> bool:
        """Wait until the listener has no session. Return False if that takes longer than `timeout`
        seconds.
        """
        if not self.sessions:
            return True
        self._empty = asyncio.get_running_loop().create_future()
        done, _ = await asyncio.wait([self._empty], timeout=timeout)
        self._empty = None
        return bool(done)
