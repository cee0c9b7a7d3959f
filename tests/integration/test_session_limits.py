"""A host's own limits of messages in a session and of connections, in a running relay."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.integration.delivery.test_session_limits import Host
from tests.support.relay import LOOPBACK, relay_with, settings
from zonerelay.config.settings import ZoneSettings
from zonerelay.operations.answers import Explanation
from zonerelay.operations.requests import Explain

MESSAGE = b"From: app@example.org\r\nSubject: x\r\n\r\nhello\r\n"


@asynccontextmanager
async def serving(host: Host) -> AsyncIterator[str]:
    """Yields its address."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await host.serve(reader, writer)
        except OSError:  # the relay has closed the connection
            pass
        finally:
            tasks.discard(task)
            writer.transport.abort()

    server = await asyncio.start_server(serve, LOOPBACK, 0)
    try:
        yield f"[{LOOPBACK}]:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.gather(*tasks)


@pytest.mark.parametrize(("verb", "told"), [("DATA", "452 4.4.5 enough"), ("MAIL", "550 too many messages")])
async def test_mail_that_comes_one_by_one_passes_a_limit_of_messages(
    tmp_path: Path, verb: str, told: str
) -> None:
    host = Host(per_session=10, verb=verb, told=told)
    async with (
        serving(host) as hop,
        relay_with(settings(tmp_path, zone=ZoneSettings(next_hop=hop))) as running,
    ):
        for n in range(40):
            await running.send("app@example.org", [f"u{n}@example.com"], MESSAGE)
            await running.until_logged("delivered", n + 1)
        assert not running.log.named("deferred")
        assert not running.log.named("bounced")
        found = await running.ask(Explain(address="u@example.com"), Explanation)
        assert found.hosts[0].addresses[0].learned == (
            "a connection ends after 10 messages: the host refused more",
        )
    assert (host.connections, len(host.taken)) == (4, 40)


@pytest.mark.parametrize(
    "told", ["432 4.3.2 Concurrent connections limit exceeded", "550 too many connections"]
)
async def test_mail_that_comes_at_once_passes_a_limit_of_connections(tmp_path: Path, told: str) -> None:
    host = Host(per_session=20, at_once=2, too_many=told)
    async with (
        serving(host) as hop,
        relay_with(settings(tmp_path, zone=ZoneSettings(next_hop=hop))) as running,
    ):
        await asyncio.gather(
            *(running.send("app@example.org", [f"u{n}@example.com"], MESSAGE) for n in range(50))
        )
        await running.until_logged("delivered", 50)
        assert not running.log.named("deferred")
        assert not running.log.named("bounced")
    assert len(host.taken) == 50
