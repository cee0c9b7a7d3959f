"""Every test here runs on asyncio's own loop and on uvloop: their transports differ where it hurts."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

import pytest
import trustme
import uvloop

from tests.support.mail import Bodies, Names, TlsResults, make_courier
from tests.support.ports import LOOPBACK
from tests.support.sink import Sink
from tests.support.sink_conversation import Manners, Script
from tests.support.smarthost import Smarthost
from zonerelay.config.settings import DeliverySettings
from zonerelay.delivery.batch.courier import SmtpCourier
from zonerelay.model.clock import Clock


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class StartSink(Protocol):
    def __call__(
        self,
        manners: Manners | None = None,
        *,
        script: Script | None = None,
        keep_bodies: bool = True,
        host: str = LOOPBACK,
        port: int = 0,
    ) -> Awaitable[Sink]: ...


class StartCourier(Protocol):
    def __call__(
        self,
        bodies: Bodies | None = None,
        *,
        settings: DeliverySettings | None = None,
        names: Names | None = None,
        clock: Clock | None = None,
        observe_tls: TlsResults | None = None,
    ) -> SmtpCourier: ...


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


TO_THE_BODY = (b"250 x\r\n", b"250 ok\r\n", b"250 ok\r\n", b"354 go\r\n")


async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *replies: bytes) -> None:
    """Greet, and answer so many lines: as a server does up to the body, unless told otherwise."""
    writer.write(b"220 x\r\n")
    for reply in replies or TO_THE_BODY:
        await reader.readline()
        writer.write(reply)


class StartPeer(Protocol):
    """Starts a server that does what a coroutine does on each connection; returns its port."""

    def __call__(self, handler: Handler) -> Awaitable[int]: ...


@pytest.fixture
async def start_sink() -> AsyncIterator[StartSink]:
    sinks: list[Sink] = []

    async def start(
        manners: Manners | None = None,
        *,
        script: Script | None = None,
        keep_bodies: bool = True,
        host: str = LOOPBACK,
        port: int = 0,
    ) -> Sink:
        sink = Sink(host=host, port=port, manners=manners, script=script, keep_bodies=keep_bodies)
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
        observe_tls: TlsResults | None = None,
    ) -> SmtpCourier:
        courier = make_courier(bodies, settings=settings, names=names, clock=clock, observe_tls=observe_tls)
        couriers.append(courier)
        return couriers[-1]

    yield start
    for courier in couriers:
        await courier.pool.close()
        assert courier.pool.open_connections("default") == 0


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


# Smarthosts.

SMARTHOST_NAME = "smtp.example.net"
StartSmarthost = Callable[[Smarthost], Awaitable[Smarthost]]


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
async def start_smarthost(
    authority: trustme.CA, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> AsyncIterator[StartSmarthost]:
    """With a certificate that this machine trusts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(SMARTHOST_NAME).configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    running: list[Smarthost] = []

    async def start(host: Smarthost) -> Smarthost:
        host.tls = host.tls or context
        await host.start()
        running.append(host)
        return host

    yield start
    for host in running:
        await host.close()
