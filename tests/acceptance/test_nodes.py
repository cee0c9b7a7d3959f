"""Three relays in network namespaces of their own are one relay, on every store that they can share.

Clients send to all of them without a pause. Nothing that was acknowledged is lost, and what arrives twice was
in flight at a node when that node had a fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nodes.fleet import Fleet, fleet
from tests.support.nodes.judge import Verdict
from tests.support.nodes.network import Network
from tests.support.nodes.stores import LEASE, STORES, SharedStore
from tests.support.toml import Table

BEYOND = 1.5 * LEASE
MOST_CONNECTIONS = 9
MOST_IN_FLIGHT = 150
"""Of one fault: what a node sends in a second and a half, and it sends about 40 messages in one."""


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(3) as network, network.inside():
        yield network


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, network: Network) -> Iterator[SharedStore]:
    with STORES[request.param]() as store:
        yield store


async def test_three_nodes_lose_nothing_and_repeat_only_what_was_in_flight(
    network: Network, store: SharedStore, tmp_path: Path
) -> None:
    limits: Table = {"max_connections_per_destination": MOST_CONNECTIONS}
    async with fleet(network, store, tmp_path, {"zone": limits}) as running:
        running.load.start()
        await asyncio.sleep(1.0)
        await running.kill(0)
        await asyncio.gather(running.start(0), running.stop_and_go(1, BEYOND), running.cut(2, BEYOND))
        await running.cut(0, BEYOND, out=False)
        await running.crash_store(1.0)
        await running.taking_mail()
        check(running, await running.settled())


async def test_versions_are_mixed_while_nodes_are_upgraded_one_by_one(
    network: Network, store: SharedStore, tmp_path: Path
) -> None:
    async with fleet(network, store, tmp_path) as running:
        running.load.start()
        await asyncio.sleep(0.5)
        await running.upgrade(0)
        # An older one comes back to what the newer one has made of the store.
        await running.kill(1)
        await running.start(1)
        await running.taking_mail()
        await running.upgrade(1)
        await running.upgrade(2)
        verdict = await running.settled()
        assert verdict.acknowledged > 150
        assert not verdict.missing
        assert not verdict.unexplained
        assert verdict.repeated.keys() <= {"kill"}
        assert running.load.codes().keys() <= {"421"}
        assert not [relay.events("trouble") for relay in running.relays if relay.events("trouble")]


def check(running: Fleet, verdict: Verdict) -> None:
    print(verdict, running.load.codes())
    assert verdict.acknowledged > 300
    assert not verdict.missing
    assert not verdict.unexplained
    assert not verdict.at_once
    # The limit is that of all nodes together, whatever happens to them.
    assert 1 < running.sink.most_open <= MOST_CONNECTIONS
    assert all(count <= MOST_IN_FLIGHT for count in verdict.repeated.values())
    # What could not be stored was refused, and for now only.
    assert not running.answered_while_away()
    assert running.load.codes().keys() == {"451"}
