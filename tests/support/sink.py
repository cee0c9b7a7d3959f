"""An SMTP server that accepts every message, or fails exactly as a recipient's address asks.

`zonerelay sandbox` and the tests deliver to it, so people and developers try the same failures. The local
part of the recipient chooses the failure (`behaviours.ADDRESSES`), `Manners` chooses the kind of server, and
a `script` may answer any command itself.

The sink keeps messages in memory and trusts its clients to be bounded, so it belongs on loopback. A client
that leaves, stalls or breaks TLS ends its own connection and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tests.support.sink_conversation import READ_SIZE, Conversation, Manners, Received, Script


class Sink:
    """Listens after `start`; `messages` grows, newest last."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        manners: Manners | None = None,
        script: Script | None = None,
        keep_bodies: bool = True,
        on_message: Callable[[Received], None] | None = None,
    ) -> None:
        self.host = host
        self.port = port
        self.manners = manners or Manners()
        self.keep_bodies = keep_bodies
        self.messages: list[Received] = []
        self.commands: list[str] = []
        self.connections = 0
        self.open_now = 0
        self.open_peak = 0
        self.script = script
        self.greylisted: dict[tuple[str, str], float] = {}
        self._on_message = on_message
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrived = asyncio.Condition()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, self.host, self.port, limit=READ_SIZE)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        await self.drop_connections()
        if self._server is not None:
            await self._server.wait_closed()

    async def drop_connections(self) -> None:
        """Close every connection without a word, as a restarted server does."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_for(self, count: int, timeout: float = 5.0) -> list[Received]:
        """Wait until `count` messages have been accepted in all."""
        async with asyncio.timeout(timeout), self._arrived:
            await self._arrived.wait_for(lambda: len(self.messages) >= count)
        return self.messages

    def recipients(self) -> list[str]:
        """Of all messages, sorted."""
        return sorted(recipient for message in self.messages for recipient in message.recipients)

    async def wait_for_recipients(self, count: int, timeout: float = 20.0) -> list[str]:
        async with asyncio.timeout(timeout), self._arrived:
            await self._arrived.wait_for(lambda: len(self.recipients()) >= count)
        return self.recipients()

    async def accept(self, message: Received) -> None:
        async with self._arrived:
            self.messages.append(message)
            self._arrived.notify_all()
        if self._on_message is not None:
            self._on_message(message)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # start_server runs this as a task
        self._tasks.add(task)
        self.connections += 1
        self.open_now += 1
        self.open_peak = max(self.open_peak, self.open_now)
        try:
            await Conversation(self, reader, writer).run()
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # the client left, or the sink is being closed: either way only this connection ends
        finally:
            self.open_now -= 1
            self._tasks.discard(task)
            writer.transport.abort() if task.cancelling() else writer.close()
