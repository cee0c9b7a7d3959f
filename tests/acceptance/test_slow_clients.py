"""Clients that take up connections, time and memory for nothing: others do not notice, and it has an end."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import pytest

from tests.support.ports import LOOPBACK
from tests.support.process import RelayProcess
from tests.support.sink import Sink
from tests.support.smtp_client import TO_DATA, SmtpClient, connected
from tests.support.submit import Submitter

MB = 1024 * 1024
SLOTS = 100
MESSAGES = 120
ROUNDS = 5


async def dribble(client: SmtpClient) -> None:
    """An octet a second, until the relay hangs up."""
    with contextlib.suppress(OSError):
        while not client.reader.at_eof():
            client.write(b"x")
            await client.writer.drain()
            await asyncio.sleep(1.0)


@asynccontextmanager
async def slow_clients(relay: RelayProcess, count: int) -> AsyncIterator[Sequence[SmtpClient]]:
    """Half of them inside a command, half inside DATA, an octet a second each."""
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for number in range(count):
            commands = TO_DATA if number % 2 else TO_DATA[:1]
            clients.append(await stack.enter_async_context(connected(relay.smtp_port, *commands)))
        tasks = []
        for each in clients:
            tasks.append(asyncio.create_task(dribble(each)))
            await asyncio.sleep(1.0 / count)  # not all in the same moment
        yield clients
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def seconds_per_message(relay: RelayProcess, sink: Sink, prefix: str) -> float:
    """Over one connection, and until the sink has them; the median of some rounds."""
    times = []
    for number in range(ROUNDS):
        submitter = Submitter(relay.smtp_port, prefix=f"{prefix}-{number}")
        wanted = len(sink.messages) + MESSAGES
        began = time.perf_counter()
        await submitter.run(1, MESSAGES)
        await sink.wait_for(wanted, timeout=60)
        times.append((time.perf_counter() - began) / MESSAGES)
        assert len(submitter.acknowledged) == MESSAGES
    return median(times)


@pytest.mark.alone  # its figures are milliseconds
async def test_slow_clients_on_all_slots_but_one_do_not_slow_the_one(tmp_path: Path, sink: Sink) -> None:
    room = {f"max_connections{which}": SLOTS for which in ("", "_per_client", "_per_network")}
    with RelayProcess(tmp_path, next_hop=f"{LOOPBACK}:{sink.port}", listener=room) as relay:
        await seconds_per_message(relay, sink, "warm")
        alone = await seconds_per_message(relay, sink, "alone")
        async with slow_clients(relay, SLOTS - 1) as slow:
            beside = await seconds_per_message(relay, sink, "beside")
            async with connected(relay.smtp_port), connected(relay.smtp_port, greeted=False) as refused:
                assert (await refused.reply()).startswith(b"421"), "all slots are taken"
            assert not any(each.reader.at_eof() for each in slow), "they are within their rights so far"
        print(f"{alone * 1e3:.2f} ms a message alone, {beside * 1e3:.2f} ms beside {SLOTS - 1} slow clients")
        assert beside < 2 * alone + 0.002


async def test_a_command_without_an_end_leaves_memory_flat(tmp_path: Path) -> None:
    with RelayProcess(tmp_path, next_hop=f"{LOOPBACK}:1") as relay:
        async with connected(relay.smtp_port, b"EHLO c") as talk:
            before = relay.peak_rss()
            for _ in range(60):
                talk.write(b"x" * MB)
                await talk.writer.drain()
            assert await talk.say(b"") == b"500 5.5.2 Line too long"
            growth = relay.peak_rss() - before
            print(f"peak memory grew by {growth / MB:.1f} MB")
            assert growth < 4 * MB
            assert (await talk.say(b"NOOP")).startswith(b"250 ")


async def test_headers_without_an_end_fill_no_more_memory_than_they_may(tmp_path: Path) -> None:
    """200 clients with a header of 200 KB each would take 40 MB of the 16 they may."""
    room = {f"max_connections{which}": 1000 for which in ("", "_per_client", "_per_network")}
    with RelayProcess(
        tmp_path, next_hop=f"{LOOPBACK}:1", listener=room, top={"max_session_memory": "16 MB"}
    ) as relay:
        before = relay.peak_rss()
        turned_away = 0
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(200):
                talk = await stack.enter_async_context(connected(relay.smtp_port, greeted=False))
                if (await talk.reply()).startswith(b"421 4.3.2"):
                    turned_away += 1
                elif (await talk.say(*TO_DATA)).startswith(b"354"):
                    talk.write(b"".join(b"X-%04d: %s\r\n" % (n, b"y" * 90) for n in range(2000)))
                    await talk.writer.drain()
            growth = relay.peak_rss() - before
            held = relay.metric("zonerelay_inbound_memory_bytes")
            print(f"{turned_away} turned away, {held / MB:.1f} MB held; peak memory + {growth / MB:.1f} MB")
            assert turned_away > 50
            assert 12 * MB < held < 16 * MB
            assert growth < 32 * MB, "the allocator takes some more"
        relay.wait_for(
            lambda: relay.metric("zonerelay_inbound_memory_bytes") < 1 * MB, what="memory is free again"
        )
        async with connected(relay.smtp_port) as talk:
            assert (await talk.say(b"NOOP")).startswith(b"250 ")
        assert relay.metric("zonerelay_inbound_refused_total", reason="memory") >= turned_away
