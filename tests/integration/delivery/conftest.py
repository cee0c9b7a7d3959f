"""Every test here runs on asyncio's own loop and on uvloop: their transports differ where it hurts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Protocol

import pytest
import uvloop

from tests.support.mail import Bodies, Names, make_courier
from zonerelay.config.models import DeliverySettings
from zonerelay.delivery.courier import SmtpCourier
from zonerelay.delivery.session import TlsObserver
from zonerelay.model.clock import Clock
from zonerelay.sandbox.conversation import Manners, Script
from zonerelay.sandbox.sink import Sink


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class StartSink(Protocol):
    def __call__(
        self, manners: Manners | None = None, *, script: Script | None = None, keep_bodies: bool = True
    ) -> Awaitable[Sink]: ...


class StartCourier(Protocol):
    def __call__(
        self,
        bodies: Bodies | None = None,
        *,
        settings: DeliverySettings | None = None,
        names: Names | None = None,
        clock: Clock | None = None,
        observe_tls: TlsObserver | None = None,
    ) -> SmtpCourier: ...


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class StartPeer(Protocol):
    """Starts a server that does what a coroutine does on each connection; returns its port."""

    def __call__(self, handler: Handler) -> Awaitable[int]: ...


@pytest.fixture
async def start_sink() -> AsyncIterator[StartSink]:
    sinks: list[Sink] = []

    async def start(
        manners: Manners | None = None, *, script: Script | None = None, keep_bodies: bool = True
    ) -> Sink:
        sink = Sink(manners=manners, script=script, keep_bodies=keep_bodies)
        await sink.start()
        sinks.append(sink)
        return sink

    yield start
    for sink in sinks:
        await sink.close()


@pytest.fixture
async def start_courier() -> AsyncIterator[StartCourier]:
    couriers: list[SmtpCourier] = []

    def start(
        bodies: Bodies | None = None,
        *,
        settings: DeliverySettings | None = None,
        names: Names | None = None,
        clock: Clock | None = None,
        observe_tls: TlsObserver | None = None,
    ) -> SmtpCourier:
        courier = make_courier(bodies, settings=settings, names=names, clock=clock, observe_tls=observe_tls)
        couriers.append(courier)
        return couriers[-1]

    yield start
    for courier in couriers:
        await courier.close()
        assert courier.open_connections("default") == 0


@pytest.fixture
async def start_peer() -> AsyncIterator[StartPeer]:
    servers: list[asyncio.Server] = []
    tasks: set[asyncio.Task[None]] = set()

    async def start(handler: Handler) -> int:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            try:
                await handler(reader, writer)
            except (OSError, EOFError, asyncio.CancelledError):
                pass
            finally:
                tasks.discard(task)
                writer.transport.abort()

        servers.append(await asyncio.start_server(serve, "127.0.0.1", 0))
        port: int = servers[-1].sockets[0].getsockname()[1]
        return port

    yield start
    for server in servers:
        server.close()
    for task in list(tasks):
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
