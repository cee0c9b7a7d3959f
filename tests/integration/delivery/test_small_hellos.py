"""A host that does not answer a large first message of TLS is asked with a small one, and remembered."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from dataclasses import replace

import pytest
import trustme

from tests.integration.delivery.conftest import Bed
from tests.support.mail import ZONE, Names, make_batch, make_message, route_to
from tests.support.sink_conversation import Manners
from zonerelay.config.settings import DeliverySettings, TlsMode
from zonerelay.delivery.tls.plan import SMALL_FOR
from zonerelay.model.clock import ManualClock
from zonerelay.model.outcome import Verdict

NAMES = Names({"mx.example.com": ("127.0.0.1",)})
QUICK = DeliverySettings(starttls_timeout=0.5)
_GROUPS = b"\x00\x0a"


def groups_in(hello: bytes) -> int:
    """The number of groups in a ClientHello (RFC 8446 4.1.2) that begins with its record."""
    at = 5 + 4 + 2 + 32
    at += 1 + hello[at]
    at += 2 + int.from_bytes(hello[at : at + 2])
    at += 1 + hello[at] + 2
    while at < len(hello):
        kind, size = hello[at : at + 2], int.from_bytes(hello[at + 2 : at + 4])
        if kind == _GROUPS:
            return (size - 2) // 2
        at += 4 + size
    return 0


class Firewall:
    """Stands in front of a host and drops, or cuts, connections whose ClientHello has several groups."""

    def __init__(self, port: int, *, cuts: bool, drops_all: bool = False) -> None:
        self._port, self._cuts, self._drops_all = port, cuts, drops_all
        self.hellos: list[int] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_host, to_host = await asyncio.open_connection("127.0.0.1", self._port)
        back = asyncio.ensure_future(self._forward(from_host, writer))
        is_hello = False
        try:
            while data := await reader.read(65536):
                if is_hello:
                    self.hellos.append(groups_in(data))
                    if self.hellos[-1] > 1 or self._drops_all:
                        if not self._cuts:
                            await reader.read()
                        return
                is_hello = data == b"STARTTLS\r\n"
                to_host.write(data)
        finally:
            back.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await back
            to_host.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()


def encrypting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    trustme.CA().issue_cert("mx.example.com").configure_cert(context)
    return context


@pytest.mark.parametrize("cuts", [True, False])
@pytest.mark.parametrize("mode", [TlsMode.OPPORTUNISTIC, TlsMode.REQUIRED])
async def test_a_host_that_takes_a_small_one_gets_mail_encrypted_and_is_remembered(
    bed: Bed, mode: TlsMode, cuts: bool
) -> None:
    sink = await bed.sink(Manners(tls=encrypting()))
    firewall = Firewall(sink.port, cuts=cuts)
    route = route_to(await bed.peer(firewall.serve), host="mx.example.com", literal=False)
    clock = ManualClock()
    courier = bed.courier(names=NAMES, settings=QUICK, clock=clock)
    zone = replace(ZONE, tls=mode, max_messages_per_connection=1)
    for _ in range(2):
        [outcome] = await courier.deliver(make_batch(make_message(), route, zone))
        assert (outcome.verdict, outcome.tls) == (Verdict.DELIVERED, "TLSv1.3"), outcome.reply
    assert [each > 1 for each in firewall.hellos] == [True, False, False]
    clock.advance(SMALL_FOR + 1)
    await courier.deliver(make_batch(make_message(), route, zone))
    assert [each > 1 for each in firewall.hellos[3:]] == [True, False]


async def test_a_host_that_answers_neither_is_no_host_for_small_ones(bed: Bed) -> None:
    sink = await bed.sink(Manners(tls=encrypting()))
    firewall = Firewall(sink.port, cuts=True, drops_all=True)
    route = route_to(await bed.peer(firewall.serve), host="mx.example.com", literal=False)
    courier = bed.courier(names=NAMES, settings=QUICK)
    zone = replace(ZONE, tls=TlsMode.REQUIRED)
    for _ in range(2):
        [outcome] = await courier.deliver(make_batch(make_message(), route, zone))
        assert outcome.verdict is Verdict.DEFERRED
    assert [each > 1 for each in firewall.hellos] == [True, False] * 2
