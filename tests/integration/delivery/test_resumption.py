"""TLS sessions are resumed where the certificate was verified for the same purpose, and not too long ago."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from tests.integration.delivery.conftest import Bed
from tests.integration.delivery.test_tls import Certificates, certificates, server_context, trusted
from tests.support.mail import ZONE, Names, make_batch, make_message, route_to
from tests.support.sink_conversation import Manners
from zonerelay.config.settings import TlsMode
from zonerelay.delivery.batch.courier import SmtpCourier
from zonerelay.delivery.tls import plan
from zonerelay.model.clock import ManualClock
from zonerelay.model.outcome import Verdict

__all__ = ["certificates", "trusted"]

NAMES = Names({"mx.example.com": ("127.0.0.1",)})


async def deliver(courier: SmtpCourier, port: int, mode: TlsMode, count: int = 1) -> None:
    """Each message on a connection of its own."""
    zone = replace(ZONE, tls=mode, max_messages_per_connection=1)
    for _ in range(count):
        route = route_to(port, host="mx.example.com", literal=False)
        [outcome] = await courier.deliver(make_batch(make_message(), route, zone))
        assert outcome.verdict is Verdict.DELIVERED, outcome
        while courier.pool.open_connections("default"):
            await asyncio.sleep(0)


@pytest.mark.usefixtures("trusted")
@pytest.mark.parametrize("mode", [TlsMode.OPPORTUNISTIC, TlsMode.VERIFY])
async def test_later_connections_resume_until_the_certificate_must_be_shown_again(
    bed: Bed, certificates: Certificates, mode: TlsMode
) -> None:
    context = server_context(certificates.authority, "mx.example.com")
    sink, clock = await bed.sink(Manners(tls=context)), ManualClock()
    courier = bed.courier(names=NAMES, clock=clock)
    await deliver(courier, sink.port, mode, 4)
    assert (sink.connections, context.session_stats()["hits"]) == (4, 3)
    clock.advance(plan.LIFETIME + 1)
    await deliver(courier, sink.port, mode, 2)
    assert context.session_stats()["hits"] == 4


@pytest.mark.usefixtures("trusted")
async def test_what_was_not_verified_is_not_resumed_where_it_must_be(
    bed: Bed, certificates: Certificates
) -> None:
    context = server_context(certificates.authority, "mx.example.com")
    sink = await bed.sink(Manners(tls=context))
    courier = bed.courier(names=NAMES)
    await deliver(courier, sink.port, TlsMode.REQUIRED)
    await deliver(courier, sink.port, TlsMode.VERIFY)
    assert context.session_stats()["hits"] == 0
