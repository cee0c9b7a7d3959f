"""Every test here runs on asyncio's own loop and on uvloop: their transports differ where it hurts."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
import uvloop

from tests.support import mail
from tests.support.mail import route_to
from tests.support.peer import Handler, Peer
from tests.support.ports import LOOPBACK
from tests.support.sink import Sink
from tests.support.sink_conversation import Manners, Script
from tests.support.smarthost import LoginBed, Smarthost, trusted
from zonerelay.config.settings import CredentialSettings, DeliverySettings, ZoneSettings
from zonerelay.delivery.batch.courier import SmtpCourier
from zonerelay.delivery.source import SourceSelection
from zonerelay.model.clock import Clock
from zonerelay.model.reply import Outcome
from zonerelay.routing.destinations.route import Route


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


TO_THE_BODY = (b"250 x\r\n", b"250 ok\r\n", b"250 ok\r\n", b"354 go\r\n")


async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *replies: bytes) -> None:
    """Greet, and answer so many lines: as a server does up to the body, unless told otherwise."""
    writer.write(b"220 x\r\n")
    for reply in replies or TO_THE_BODY:
        await reader.readline()
        writer.write(reply)


def says(**replies: str) -> Script:
    """Answer these commands so, and the others as usual."""
    return lambda verb, _: replies.get(verb)


class Server(Protocol):
    async def start(self) -> None: ...

    async def close(self) -> None: ...


S = TypeVar("S", bound=Server)


class Bed:
    """The servers and couriers of a test. They end with it, and a courier leaves no connection behind."""

    def __init__(self) -> None:
        self.couriers: list[SmtpCourier] = []
        self._servers: list[Server] = []

    def courier(
        self,
        bodies: mail.Bodies | None = None,
        *,
        settings: DeliverySettings | None = None,
        names: mail.Names | None = None,
        clock: Clock | None = None,
        sources: SourceSelection | None = None,
        observe_tls: mail.TlsResults | None = None,
    ) -> SmtpCourier:
        courier = mail.make_courier(
            bodies, settings=settings, names=names, clock=clock, sources=sources, observe_tls=observe_tls
        )
        self.couriers.append(courier)
        return courier

    async def sink(
        self,
        manners: Manners | None = None,
        *,
        script: Script | None = None,
        keep_bodies: bool = True,
        host: str = LOOPBACK,
        port: int = 0,
    ) -> Sink:
        sink = Sink(host=host, port=port, manners=manners, script=script, keep_bodies=keep_bodies)
        return await self.start(sink)

    async def peer(self, handler: Handler) -> int:
        """Start a server that does what a coroutine does on each connection; return its port."""
        return (await self.start(Peer(handler))).port

    async def send(
        self, *ports: int, courier: SmtpCourier | None = None, zone: ZoneSettings = mail.ZONE, **message: Any
    ) -> list[Outcome]:
        """Bring a message that has no options, or these, to the first of the ports that takes it."""
        batch = mail.make_batch(mail.make_message(**message), route_to(*ports), zone)
        return list(await (courier or self.courier()).deliver(batch))

    async def start(self, server: S) -> S:
        await server.start()
        self._servers.append(server)
        return server

    async def close(self) -> None:
        for server in reversed(self._servers):
            await server.close()
        for courier in self.couriers:
            await courier.pool.close()
            assert courier.pool.open_connections("default") == 0


async def send(
    courier: SmtpCourier,
    port: int,
    *locals_: str,
    body: bytes = mail.TEXT,
    zone: ZoneSettings = mail.ZONE,
    sender: str = "sender@example.org",
) -> list[Outcome]:
    """Bring a message to people at example.com, of whom only the local parts are given."""
    recipients = [f"{local}@example.com" for local in locals_ or ("anybody",)]
    message = mail.make_message(body, sender=sender, recipients=recipients)
    return list(await courier.deliver(mail.make_batch(message, route_to(port), zone)))


@pytest.fixture
async def bed() -> AsyncIterator[Bed]:
    bed = Bed()
    yield bed
    await bed.close()


# Smarthosts.

SMARTHOST_NAME = "smtp.example.net"


class Site(Bed):
    """A smarthost's site: its hosts have certificates that this machine trusts, and beds log in there."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.directory = directory
        self._tls = trusted(SMARTHOST_NAME, directory, monkeypatch)
        self._beds: list[LoginBed] = []

    async def host(self, **options: Any) -> Smarthost:
        return await self.start(Smarthost(tls=self._tls, **options))

    def login(
        self,
        *credentials: CredentialSettings,
        zone: ZoneSettings,
        environment: Mapping[str, str] | None = None,
    ) -> LoginBed:
        names = mail.Names({SMARTHOST_NAME: (LOOPBACK,)})
        bed = LoginBed(
            *credentials, zone=zone, names=names, directory=self.directory, environment=environment
        )
        self._beds.append(bed)
        return bed

    async def close(self) -> None:
        for bed in self._beds:
            await bed.close()
        await super().close()


def to(*hosts: Smarthost) -> Route:
    return route_to(*(host.port for host in hosts), host=SMARTHOST_NAME, literal=False)
