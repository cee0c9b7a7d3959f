"""Priorities in a running relay: who gives them, what they change, and that a restart keeps them."""

from __future__ import annotations

import asyncio
import smtplib
from dataclasses import replace
from pathlib import Path

import pytest

from tests.integration.test_routes import listener, standing_still
from tests.support.credentials import file_of, user
from tests.support.relay import LOOPBACK, Running, relay_with, settings
from tests.support.sink import Sink
from zonerelay.config.settings import (
    AuthSettings,
    ListenerAuth,
    RetrySettings,
    RouteSettings,
    UnsafeListener,
    ZoneSettings,
)
from zonerelay.config.units import parse_rate
from zonerelay.model.queue_name import Priority
from zonerelay.operations.answers import ChangeResult, DeliveryRow
from zonerelay.operations.requests import Filter, Hold, QueueList

MESSAGE = b"From: app@example.org\r\nSubject: x\r\nX-Priority: 1\r\nMT-Priority: 9\r\n\r\nhello\r\n"


async def priorities(running: Running) -> dict[str, Priority]:
    return {each.recipient: each.priority async for each in running.worker.store.scan()}


async def listed(running: Running, **wanted: str) -> list[tuple[str, str, str]]:
    rows = await running.rows(QueueList(filter=Filter(**wanted)), DeliveryRow)  # type: ignore[arg-type]  # by name
    return [(row.recipient, row.zone, row.priority) for row in rows]


@pytest.mark.parametrize(
    ("login", "recipient", "expected"),
    [
        (False, "b@example.com", Priority.HIGH),
        (True, "b@example.com", Priority.BULK),
        (True, "b@example.net", Priority.NORMAL),
    ],
    ids=["the listener's", "the user's before the listener's", "the route's before all"],
)
async def test_who_gives_mail_its_priority(
    tmp_path: Path, login: bool, recipient: str, expected: Priority
) -> None:
    (tmp_path / "credentials").write_text(file_of(replace(user("app"), priority=Priority.BULK)))
    here = listener(
        priority=Priority.HIGH, auth=ListenerAuth.OPTIONAL, unsafe=(UnsafeListener.CLEARTEXT_AUTH,)
    )
    route = RouteSettings(recipient_domain=("example.net",), set_priority="normal")
    chosen = replace(
        standing_still(tmp_path, route, listener=here),
        auth=AuthSettings(credentials=tmp_path / "credentials"),
    )
    async with relay_with(chosen) as running:

        def submit() -> None:
            with smtplib.SMTP(*running.address, timeout=20) as client:
                if login:
                    client.login("app", "correct horse")
                client.sendmail("a@example.org", [recipient], MESSAGE)

        await asyncio.to_thread(submit)
        assert await priorities(running) == {recipient: expected}
        found = await running.explain(listener=f"{LOOPBACK}:0")
        assert found.priority == "high"


async def test_no_header_gives_mail_a_priority(tmp_path: Path) -> None:
    async with relay_with(standing_still(tmp_path)) as running:
        await running.send("a@example.org", ["b@example.com"], MESSAGE)
        assert await priorities(running) == {"b@example.com": Priority.NORMAL}


async def test_operators_see_one_zone_and_find_mail_by_priority_also_after_a_restart(
    tmp_path: Path,
) -> None:
    route = RouteSettings(recipient_domain=("news.example",), set_priority="bulk")
    chosen = standing_still(tmp_path, route)
    async with relay_with(chosen) as running:
        await running.send("a@example.org", ["b@example.com", "c@news.example"], MESSAGE)
        await running.until_logged("deferred", 2)
    async with relay_with(chosen) as running:
        assert await listed(running, zone="default") == [
            ("b@example.com", "default", "normal"),
            ("c@news.example", "default", "bulk"),
        ]
        assert await listed(running, priority="bulk") == [("c@news.example", "default", "bulk")]
        status = await running.status()
        assert {each.name: each.deferred for each in status.zones} == {"default": 2, "bulk": 0, "vip": 0}
        await running.ask(Hold(filter=Filter(priority=Priority.BULK)), ChangeResult)
        status = await running.status()
        assert [(each.deferred, each.held) for each in status.zones if each.name == "default"] == [(1, 1)]


async def test_deferred_mail_of_every_priority_comes_due(tmp_path: Path) -> None:
    seen: set[str] = set()

    def later(verb: str, argument: str) -> str | None:
        if verb != "RCPT" or argument in seen:
            return None
        seen.add(argument)
        return "450 4.2.0 later"

    async with Sink(script=later) as sink:
        routes = [
            RouteSettings(recipient=(f"{each}@example.com",), set_priority=each.value) for each in Priority
        ]
        chosen = settings(
            tmp_path,
            zone=ZoneSettings(next_hop=f"{LOOPBACK}:{sink.port}"),
            route=routes,
            retry=RetrySettings(schedule=(0.3,)),
        )
        async with relay_with(chosen) as running:
            await running.send("a@example.org", [f"{each}@example.com" for each in Priority], MESSAGE)
            await running.until_empty()
    assert len(seen) == 3
    delivered = sink.recipients()
    assert delivered == ["bulk@example.com", "high@example.com", "normal@example.com"]


async def test_urgent_mail_overtakes_a_long_queue_and_the_queue_moves_on(tmp_path: Path) -> None:
    """A hundred bulk messages wait for their turn: an urgent one is among the next few."""
    async with Sink() as sink:
        zone = ZoneSettings(next_hop=f"{LOOPBACK}:{sink.port}", max_rate=parse_rate("100/1s"))
        routes = [
            RouteSettings(sender=("news@example.org",), set_priority="bulk"),
            RouteSettings(sender=("reset@example.org",), set_priority="high"),
        ]
        chosen = settings(tmp_path, zone=zone, route=routes)
        async with relay_with(chosen) as running:

            def submit() -> int:
                with smtplib.SMTP(*running.address, timeout=20) as client:
                    for n in range(150):
                        client.sendmail("news@example.org", [f"u{n}@example.com"], MESSAGE)
                    client.sendmail("reset@example.org", ["me@example.com"], MESSAGE)
                return len(sink.messages)

            at = await asyncio.to_thread(submit)
            await running.until_empty(timeout=30)
        order = [message.recipients[0] for message in sink.messages]
        assert order.index("me@example.com") - at < 10
        assert len(order) == 151
