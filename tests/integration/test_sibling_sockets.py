"""Clients at the socket of a worker that does not come are taken by another, and by nobody else."""

import asyncio
import socket
import time

import pytest

from tests.support.descriptors import no_descriptors_left
from tests.support.ports import LOOPBACK
from zonerelay.config.endpoints import ListenAddress
from zonerelay.inbound.listen import listening_socket
from zonerelay.inbound.listen.listening_socket import PATIENCE, SiblingSockets, bound_group


class Greeter(asyncio.Protocol):
    def __init__(self, name: bytes) -> None:
        self._name = name

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._name)
        transport.close()


async def greeted(port: int) -> bytes:
    reader, writer = await asyncio.open_connection(LOOPBACK, port)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


def listening() -> tuple[list[socket.socket], int]:
    group = bound_group(ListenAddress(host=LOOPBACK), 2)
    for each in group:
        each.listen(100)
        each.setblocking(False)
    return group, group[0].getsockname()[1]


async def test_who_waits_at_a_socket_that_nobody_serves_is_taken_in_by_a_neighbour() -> None:
    (own, other), port = listening()
    server = await asyncio.get_running_loop().create_server(lambda: Greeter(b"own"), sock=own)
    neighbours = SiblingSockets([other], lambda: Greeter(b"neighbour"))
    before = time.monotonic()
    names = await asyncio.gather(*(greeted(port) for _ in range(60)))
    assert set(names) == {b"own", b"neighbour"}, "the kernel has dealt them out to both"
    assert time.monotonic() - before >= PATIENCE
    neighbours.close()
    server.close()
    await server.wait_closed()


async def test_a_worker_that_comes_for_its_clients_keeps_them() -> None:
    (one, two), port = listening()
    loop = asyncio.get_running_loop()
    servers = [
        await loop.create_server(lambda: Greeter(b"one"), sock=one.dup()),
        await loop.create_server(lambda: Greeter(b"two"), sock=two.dup()),
    ]
    neighbours = SiblingSockets([one, two], lambda: Greeter(b"neighbour"))
    for _ in range(3):
        names = await asyncio.gather(*(greeted(port) for _ in range(20)))
        assert b"neighbour" not in names
        await asyncio.sleep(PATIENCE / 2)
    neighbours.close()
    for server in servers:
        server.close()
        await server.wait_closed()


async def test_the_sockets_of_workers_that_are_gone_are_served_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening_socket, "PATIENCE", 30.0)
    (own, spare), port = listening()
    own.close()
    neighbours = SiblingSockets([], lambda: Greeter(b"heir"), spare=[spare])
    before = time.monotonic()
    assert await greeted(port) == b"heir"
    assert time.monotonic() - before < 10
    neighbours.close()


class Counted(SiblingSockets):
    looks = 0

    def _look(self, at: socket.socket) -> None:
        self.looks += 1
        super()._look(at)


async def test_without_a_free_descriptor_nobody_is_looked_for_all_the_time() -> None:
    (own, spare), port = listening()
    client = socket.create_connection((LOOPBACK, port))
    other = socket.create_connection((LOOPBACK, port))
    neighbours = Counted([], lambda: Greeter(b"in the end"), spare=[own, spare])
    with no_descriptors_left():
        await asyncio.sleep(3.5 * PATIENCE)
    assert 1 <= neighbours.looks <= 2 * 4
    for each in (client, other):
        each.setblocking(False)
        with each:
            assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(each, 99), 10) == b"in the end"
    neighbours.close()
