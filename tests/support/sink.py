"""An SMTP server that accepts every message, or fails exactly as a recipient's address asks.

`zonerelay sandbox` and the tests deliver to it, so people and developers try the same failures. The local
part of the recipient chooses the failure (`behaviours.ADDRESSES`), `Manners` chooses the kind of server, and
a `script` may answer any command itself.

The sink keeps messages in memory and trusts its clients to be bounded, so it belongs on loopback. A client
that leaves, stalls or breaks TLS ends its own connection and nothing else.

It answers on the event loop of its test, or, in a `with`, on a loop and a thread of its own: a test of real
processes can be a plain function.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Self

from tests.support.ports import wait_until
from tests.support.sink_conversation import READ_SIZE, Conversation, Manners, Received, Script
from tests.support.waiting import until


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

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self.start(), self._loop).result()
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._leave(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _leave(self) -> None:
        """Begin every connection that was accepted: asyncio loses one whose server is closed before."""
        assert self._server is not None  # __enter__ has started it
        for listening in self._server.sockets:
            self._loop.remove_reader(listening.fileno())
        while asyncio.all_tasks() - self._tasks - {asyncio.current_task()}:
            await asyncio.sleep(0)
        await self.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def reader(self) -> asyncio.StreamReader:
        """Of a new connection."""
        return asyncio.StreamReader(READ_SIZE)

    async def start(self) -> None:
        self._server = await asyncio.get_running_loop().create_server(
            lambda: asyncio.StreamReaderProtocol(self.reader(), self._serve),
            self.host,
            self.port,
            backlog=1024,
        )
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
        await until(lambda: len(self.messages) >= count, seconds=timeout)
        return self.messages

    def until(self, count: int, timeout: float = 20.0) -> list[Received]:
        """Do the same for a test that is not on a loop."""
        assert wait_until(lambda: len(self.messages) >= count, timeout=timeout), f"{len(self.messages)} came"
        return self.messages

    def recipients(self) -> list[str]:
        """Of all messages, sorted."""
        return sorted(recipient for message in self.messages for recipient in message.recipients)

    def until_recipients(self, count: int, timeout: float = 20.0) -> list[str]:
        assert wait_until(lambda: len(self.recipients()) >= count, timeout=timeout), (
            f"{len(self.messages)} came"
        )
        return self.recipients()

    async def accept(self, message: Received) -> None:
        self.messages.append(message)
        if self._on_message is not None:
            self._on_message(message)

    def conversation(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Conversation:
        return Conversation(self, reader, writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None  # start_server runs this as a task
        self._tasks.add(task)
        self.connections += 1
        self.open_now += 1
        self.open_peak = max(self.open_peak, self.open_now)
        try:
            await self.conversation(reader, writer).run()
        except (OSError, EOFError, asyncio.CancelledError):
            pass  # the client left, or the sink is being closed: either way only this connection ends
        finally:
            self.open_now -= 1
            self._tasks.discard(task)
            writer.transport.abort() if task.cancelling() else writer.close()
