"""kill -9, SIGTERM and restarts of a real relay: nothing acknowledged is lost, duplicates are counted."""

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

import pytest

from tests.support.holding_peer import Hold, HoldingPeer
from tests.support.process import RelayFailed, RelayProcess
from tests.support.sink import Sink
from tests.support.smtp_client import connected
from tests.support.submit import Account, Submitter, tokens

ROUNDS = int(os.environ.get("ROUNDS", "2"))
"""`make test ROUNDS=20 ARGS=tests/acceptance/test_crash.py` is the longer proof."""
SIZES = (500, 5000, 200_000)
SESSIONS = 20
IN_FLIGHT = 10
"""Connections out: at most so many deliveries, and what finished in the last 50 ms, may repeat."""


@pytest.mark.parametrize("backend", ["leveldb", pytest.param("disk", marks=pytest.mark.proof)])
async def test_kill_9_under_load_loses_nothing(tmp_path: Path, sink: Sink, backend: str) -> None:
    chance = random.Random(7)
    account = Account()
    relay = RelayProcess(
        tmp_path,
        next_hop=f"127.0.0.1:{sink.port}",
        spool={"backend": backend},
        zone={"max_connections": IN_FLIGHT, "max_connections_per_destination": IN_FLIGHT},
        tables={"retry": {"schedule": ["1s"], "suspend_min": "1s"}},
    )
    with relay:
        for number in range(ROUNDS):
            client = Submitter(relay.smtp_port, prefix=f"round{number}", size=SIZES[number % len(SIZES)])
            load = asyncio.create_task(client.run(SESSIONS, 100_000))
            await asyncio.sleep(chance.uniform(0.05, 0.5))
            await asyncio.to_thread(relay.kill)
            await load
            account.add(client)
            await asyncio.to_thread(relay.restart)
        await asyncio.to_thread(relay.wait_until_empty)
    arrived = tokens(sink.messages)
    assert len(account.ids) > ROUNDS * SESSIONS
    missing = account.missing(arrived, relay)
    assert not missing, "\n".join(missing)
    repeated = sum(count - 1 for count in arrived.values())
    print(f"{len(account.ids)} acknowledged, {sum(arrived.values())} arrived, {repeated} twice")
    # Everything else would mean that outcomes were not recorded as promised.
    assert repeated < ROUNDS * 500


@pytest.mark.parametrize("backend", ["leveldb", pytest.param("memory", marks=pytest.mark.proof)])
async def test_sigterm_ends_what_is_in_flight_and_exits_0(tmp_path: Path, sink: Sink, backend: str) -> None:
    shelf = {"shelve": str(tmp_path / "queue.shelf")} if backend == "memory" else {}
    relay = RelayProcess(tmp_path, next_hop=f"127.0.0.1:{sink.port}", spool={"backend": backend, **shelf})
    with relay:
        client = Submitter(relay.smtp_port, prefix="drain")
        load = asyncio.create_task(client.run(SESSIONS, 100_000))
        idle_reader, idle_writer = await asyncio.open_connection("127.0.0.1", relay.smtp_port)
        assert (await idle_reader.readline()).startswith(b"220")
        await asyncio.sleep(0.5)
        code = await asyncio.to_thread(relay.terminate)
        await load
        assert code == 0
        assert (await idle_reader.readline()).startswith(b"421 4.3.2")
        idle_writer.close()
        await idle_writer.wait_closed()
        before = tokens(sink.messages)
        # A clean stop repeats nothing: what had arrived is not sent again by the next start.
        await asyncio.to_thread(relay.start)
        # The figures of a spool that is still being counted may say that nothing is queued.
        with contextlib.suppress(RelayFailed):
            await asyncio.to_thread(
                relay.wait_for,
                lambda: not Account(client).missing(tokens(sink.messages), relay),
                what="all that was acknowledged",
            )
        await asyncio.to_thread(relay.wait_until_empty)
    arrived = tokens(sink.messages)
    missing = Account(client).missing(arrived, relay)
    assert not missing, "\n".join(missing)
    assert max(arrived.values()) == 1
    assert len(before) > 0


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.proof)])
async def test_a_second_signal_cuts_draining_short_and_loses_nothing(tmp_path: Path, workers: int) -> None:
    peer = HoldingPeer([Hold.DATA])
    await peer.start()
    relay = RelayProcess(
        tmp_path, next_hop=f"127.0.0.1:{peer.port}", top={"workers": workers, "shutdown_timeout": "60s"}
    )
    try:
        with relay:
            await asyncio.to_thread(relay.send, "to@example.com", message=b"Subject: waits\r\n\r\nbody\r\n")
            async with asyncio.timeout(30):
                await peer.until_held()
            relay.signal(signal.SIGTERM)
            await asyncio.to_thread(relay.wait_for, lambda: bool(relay.events("stopping")), what="stopping")
            relay.signal(signal.SIGTERM)
            assert await asyncio.to_thread(relay.wait, timeout=15) == 1
            assert relay.events("killed")
            peer.release()
            await asyncio.to_thread(relay.start)
            async with asyncio.timeout(30):
                await peer.until_arrived({"waits"})
            await asyncio.to_thread(relay.wait_until_empty)
    finally:
        await peer.close()
        async with asyncio.timeout(30):
            while asyncio.all_tasks() - {asyncio.current_task()}:  # its connections
                await asyncio.sleep(0.01)


async def test_deferred_mail_survives_a_kill_with_its_attempts(tmp_path: Path, sink: Sink) -> None:
    relay = RelayProcess(
        tmp_path, next_hop=f"127.0.0.1:{sink.port}", tables={"retry": {"schedule": ["2s"], "jitter": 0}}
    )
    with relay:
        async with connected(relay.smtp_port, b"EHLO c") as client:
            await client.say(b"MAIL FROM:<>", b"RCPT TO:<greylist@example.com>", b"DATA")
            assert (await client.say(b"Subject: later\r\n\r\n.")).startswith(b"250")
        await asyncio.to_thread(relay.wait_for, lambda: len(relay.events("deferred")) == 1, what="deferred")
        await asyncio.to_thread(relay.restart)
        await sink.wait_for(1, timeout=20)
        await asyncio.to_thread(relay.wait_for, lambda: len(relay.events("delivered")) == 1, what="delivered")
    (delivered,) = relay.events("delivered")
    assert delivered["attempt"] == 2
    assert delivered["age"] > 1.9


def test_sighup_with_a_wrong_configuration_changes_nothing(tmp_path: Path, sink: Sink) -> None:
    relay = RelayProcess(tmp_path, next_hop=f"127.0.0.1:{sink.port}")
    with relay:
        good = relay.config.read_text()
        relay.config.write_text(good + "\n[spol]\n")
        relay.signal(signal.SIGHUP)
        relay.wait_for(lambda: bool(relay.events("reload-refused")), what="reload refused")
        client = Submitter(relay.smtp_port, prefix="after")
        client.send(1, 1)
        assert client.acknowledged == {"after-1"}


def test_sighup_with_a_new_next_hop_moves_waiting_mail(tmp_path: Path, sink: Sink) -> None:
    relay = RelayProcess(
        tmp_path, next_hop="127.0.0.1:1", tables={"retry": {"schedule": ["1s"], "suspend_min": "1s"}}
    )
    with relay:
        client = Submitter(relay.smtp_port, prefix="moved")
        client.send(2, 10)
        assert len(client.acknowledged) == 10
        relay.wait_for(lambda: bool(relay.events("suspended")), what="suspended")
        relay.config.write_text(relay.config.read_text().replace('127.0.0.1:1"', f'127.0.0.1:{sink.port}"'))
        relay.signal(signal.SIGHUP)
        sink.until(10, timeout=20)
        relay.wait_until_empty()
        assert relay.events("reloaded")
    assert tokens(sink.messages).keys() == client.acknowledged
