"""Questions over UDP: who is asked, how long, and whose answer is taken."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import dns.message
import dns.rrset
import pytest

from tests.support.dns import GARBAGE, REFUSED, SERVFAIL, SILENCE, TRUNCATED, Edns, FakeDns, OnError, Zones
from tests.support.ports import free_port
from zonerelay.config.endpoints import NameServer, parse_name_server
from zonerelay.routing.dns import resolver
from zonerelay.routing.dns.answers import A, DnsStatus, ParsedAnswer
from zonerelay.routing.dns.resolver import NameServers

FILES = Path("/proc/self/fd")
ZONES: Zones = {"mx.example.com": {"A": ["192.0.2.1"], "TTL": 60}}
FOUND = ParsedAnswer(DnsStatus.OK, ("192.0.2.1",), 60.0)
LOST = ParsedAnswer[str](DnsStatus.TIMEOUT, (), 0.0)
BAD = ParsedAnswer[str](DnsStatus.BAD, (), 0.0)
LIFETIME = 20.0


@pytest.fixture(autouse=True)
def _short_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolver, "TRY_TIMEOUT", 0.1)


def open_sockets() -> set[str]:
    """Return the names of this process's open sockets, such as "socket:[1234]"."""
    names = set()
    for file in FILES.iterdir():
        with suppress(OSError):
            names.add(str(file.readlink()))
    return {name for name in names if name.startswith("socket:")}


@asynccontextmanager
async def asking(*addresses: str, dnssec: bool = False) -> AsyncIterator[NameServers]:
    servers = [parse_name_server(address) for address in addresses]
    made = NameServers(servers, random.Random(1), wants_dnssec=dnssec)
    before = open_sockets()
    yield made
    # Sockets of earlier tests may be collected meanwhile: only new ones are a leak.
    assert open_sockets() <= before


async def ask(servers: NameServers, lifetime: float = LIFETIME) -> ParsedAnswer[str]:
    return await servers.ask("mx.example.com", A, lifetime=lifetime)


async def test_a_silent_server_is_passed_over_for_the_next() -> None:
    async with FakeDns(ZONES, {"mx.example.com": SILENCE}) as silent, FakeDns(ZONES) as other:
        async with asking(silent.address, other.address) as servers:
            assert await ask(servers) == FOUND
        assert len(silent.queries) == len(other.queries) == 1


async def test_silence_is_asked_again_until_the_time_is_up() -> None:
    async with FakeDns(ZONES, {"mx.example.com": SILENCE}) as silent, asking(silent.address) as servers:
        assert await ask(servers, lifetime=0.35) == LOST
        assert len(silent.queries) > 1


@pytest.mark.parametrize("trouble", [SERVFAIL, REFUSED])
async def test_a_server_that_failed_is_asked_once_and_then_the_others(trouble: OnError) -> None:
    async with FakeDns(ZONES, {"mx.example.com": trouble}) as failing, FakeDns(ZONES) as other:
        async with asking(failing.address, other.address) as servers:
            assert await ask(servers) == FOUND
        async with asking(failing.address, failing.address) as servers:
            assert await ask(servers) == ParsedAnswer(DnsStatus.SERVFAIL, (), 0.0)
        assert (len(failing.queries), len(other.queries)) == (3, 1)


async def test_one_that_failed_and_one_that_says_nothing_are_silence() -> None:
    async with (
        FakeDns(ZONES, {"mx.example.com": SERVFAIL}) as failing,
        FakeDns(ZONES, {"mx.example.com": SILENCE}) as silent,
        asking(failing.address, silent.address) as servers,
    ):
        assert await ask(servers, lifetime=0.3) == LOST
        assert len(failing.queries) == 1


async def test_where_tcp_fails_the_next_server_is_asked() -> None:
    cut = FakeDns(ZONES, {"mx.example.com": TRUNCATED}, tcp=False)
    async with cut as first, FakeDns(ZONES) as second, asking(first.address, second.address) as servers:
        assert await ask(servers) == FOUND


async def test_an_invalid_answer_is_a_failure_of_one_server() -> None:
    async with FakeDns(ZONES, {"mx.example.com": GARBAGE}) as broken, FakeDns(ZONES) as other:
        async with asking(broken.address) as servers:
            assert await ask(servers) == BAD
        async with asking(broken.address, other.address) as servers:
            assert await ask(servers) == FOUND


REFUSALS = [how for how in Edns if how not in (Edns.TAKEN, Edns.IGNORED)]


@pytest.mark.parametrize("how", Edns, ids=lambda how: how.name.lower())
async def test_edns_is_used_only_where_dnssec_is_wanted(how: Edns) -> None:
    async with FakeDns(ZONES, edns=how) as server, asking(server.address) as servers:
        assert await ask(servers) == FOUND
        assert server.options == [False]


@pytest.mark.parametrize("how", REFUSALS, ids=lambda how: how.name.lower())
async def test_edns_is_never_given_up_where_dnssec_is_wanted(how: Edns) -> None:
    """An answer without OPT is never vouched for: who can change packets could take DANE away."""
    async with FakeDns(ZONES, edns=how) as server, asking(server.address, dnssec=True) as servers:
        assert not (await ask(servers, lifetime=0.25)).status.is_definite
        assert server.options
        assert all(server.options)


async def test_a_server_that_changes_the_case_of_a_name_is_understood() -> None:
    def answer(asked: bytes, send: Callable[[bytes], None], _: tuple[str, int]) -> None:
        made = packet(asked, "192.0.2.1")
        send(made.replace(b"example", b"eXAMPLE"))

    async with scripted(answer) as (_, address), asking(address) as servers:
        assert await ask(servers) == FOUND


async def test_nobody_there_is_told_at_once() -> None:
    for address in (f"127.0.0.1:{free_port()}", "255.255.255.255:53"):  # the kernel refuses the second one
        async with asking(address) as servers:
            assert await ask(servers) == LOST


async def test_of_two_one_is_not_there() -> None:
    async with FakeDns(ZONES) as there, asking(f"127.0.0.1:{free_port()}", there.address) as servers:
        assert await ask(servers) == FOUND


@dataclass
class Scripted(asyncio.DatagramProtocol):
    """Hands each question to `answer`, with the way back to who asked."""

    answer: Callable[[bytes, Callable[[bytes], None], tuple[str, int]], None]
    ports: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        self.ports.append(address[1])
        self.ids.append(int.from_bytes(data[:2]))
        transport = self._transport
        self.answer(data, lambda packet: transport.sendto(packet, address), address)


@asynccontextmanager
async def scripted(
    answer: Callable[[bytes, Callable[[bytes], None], tuple[str, int]], None],
) -> AsyncIterator[tuple[Scripted, str]]:
    transport, protocol = await asyncio.get_running_loop().create_datagram_endpoint(
        lambda: Scripted(answer), local_addr=("127.0.0.1", 0)
    )
    try:
        yield protocol, "{}:{}".format(*transport.get_extra_info("sockname"))
    finally:
        transport.close()


def packet(asked: bytes, address: str) -> bytes:
    made = dns.message.make_response(dns.message.from_wire(asked))
    made.answer.append(dns.rrset.from_text("mx.example.com.", 60, "IN", "A", address))
    return made.to_wire()


async def test_only_the_server_itself_is_heard_and_only_with_the_id() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as forger:

        def answer(asked: bytes, send: Callable[[bytes], None], who: tuple[str, int]) -> None:
            forger.sendto(packet(asked, "203.0.113.1"), who)
            forged = packet(asked, "203.0.113.2")
            send(bytes([forged[0] ^ 1]) + forged[1:])
            send(packet(asked, "192.0.2.1"))

        async with scripted(answer) as (_, address), asking(address) as servers:
            assert await ask(servers) == FOUND


async def test_late_answers_are_nobodys_and_a_socket_that_heard_nothing_is_left() -> None:
    kept: list[bytes] = []

    def answer(asked: bytes, send: Callable[[bytes], None], _: tuple[str, int]) -> None:
        if kept:
            send(packet(kept[0], "203.0.113.1"))
            send(packet(asked, "192.0.2.1"))
        kept.append(asked)

    async with scripted(answer) as (server, address), asking(address) as servers:
        assert await ask(servers) == FOUND
        assert len(set(server.ports)) == len(set(server.ids)) == 2


async def test_each_question_has_its_own_port_and_many_are_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # No question is asked again, however long the machine takes for a hundred.
    monkeypatch.setattr(resolver, "TRY_TIMEOUT", LIFETIME)
    asked: list[Callable[[], None]] = []

    def answer(question: bytes, send: Callable[[bytes], None], _: tuple[str, int]) -> None:
        asked.append(lambda: send(packet(question, "192.0.2.1")))
        if len(asked) % 100 == 0:
            for each in reversed(asked[-100:]):
                each()

    async with scripted(answer) as (server, address), asking(address) as servers:
        for _ in range(2):
            assert set(await asyncio.gather(*(ask(servers) for _ in range(100)))) == {FOUND}
        assert len(set(server.ports[:100])) == 100
        assert len(set(server.ids)) > 150


async def test_who_gives_up_leaves_nothing_behind() -> None:
    async with FakeDns(ZONES, {"mx.example.com": SILENCE}) as silent, asking(silent.address) as servers:
        task = asyncio.create_task(ask(servers))
        while not silent.queries:
            await asyncio.sleep(0.001)
        task.cancel()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)


def test_addresses_of_both_families_are_taken() -> None:
    assert [parse_name_server(each) for each in ("192.0.2.53", "[::1]:5353")] == [
        NameServer("192.0.2.53", 53),
        NameServer("::1", 5353),
    ]
