"""The courier against a real server on loopback: what is sent, and what becomes of each recipient."""

from __future__ import annotations

import pytest

from tests.integration.delivery.conftest import StartCourier, StartSink
from tests.support.mail import TEXT, Bodies, make_batch, make_message, route_to
from zonerelay.model.outcome import Outcome, Scope, Verdict
from zonerelay.sandbox.conversation import Manners


async def test_message_arrives_as_it_is_stored(start_sink: StartSink, start_courier: StartCourier) -> None:
    sink = await start_sink()
    courier = start_courier()
    message = make_message()
    outcomes = await courier.deliver(make_batch(message, route_to(sink.port)))
    assert outcomes[0].verdict is Verdict.DELIVERED
    assert outcomes[0].reply.code == 250
    assert outcomes[0].peer == f"127.0.0.1:{sink.port}"
    assert sink.messages[0].body == TEXT
    assert sink.messages[0].mail_from == "sender@example.org"
    assert sink.messages[0].recipients == ("anybody@example.com",)
