"""Three relays in network namespaces of their own are one relay, on every store that they can share.

Clients send to all of them without a pause. Nothing that was acknowledged is lost, and what arrives twice was
in flight at a node when that node had a fault.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support.nodes.fleet import Fleet, fleet
from tests.support.nodes.judge import Verdict, above_rate, most_within
from tests.support.nodes.network import Network
from tests.support.nodes.stores import LEASE, STORES, SharedStore, prepare
from tests.support.toml import Table

BEYOND = 1.5 * LEASE
MOST_CONNECTIONS = 9
LIMITED = "limited.test"
LIMITED_LOAD = 8.0
"""Messages a second for the domain with a rate; after each fault there are more."""
MOST_A_SECOND = 9
MOST_IN_FLIGHT = 150
"""Of one fault: what a node sends in a second and a half, and it sends about 40 messages in one."""


@pytest.fixture
def network() -> Iterator[Network]:
    for name in STORES:
        prepare(name)
    with Network(3) as network, network.inside():
        yield network


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest, network: Network) -> Iterator[SharedStore]:
    with STORES[request.param]() as store:
        yield store


async def test_three_nodes_lose_nothing_and_repeat_only_what_was_in_flight(
    network: Network, store: SharedStore, tmp_path: Path
) -> None:
    async with fleet(network, store, tmp_path, limits(store)) as running:
        running.load.domains = ["example.com"] * round(store.rate / LIMITED_LOAD - 1) + [LIMITED]
        running.load.start()
        await asyncio.sleep(1.0)
        await running.kill(0)
        await asyncio.gather(running.start(0), running.stop_and_go(1, BEYOND), running.cut(2, BEYOND))
        if store.cut_one_way:
            await running.cut(0, BEYOND, out=False)
        await running.crash_store(1.0)
        await running.taking_mail()
        check(running, await running.settled())


@pytest.mark.parametrize("store", ["redis", "postgres"], indirect=True)
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
        assert not [event["error"] for relay in running.relays for event in relay.events("trouble")]


def limits(store: SharedStore) -> Mapping[str, Table | Sequence[Table]]:
    """What is counted over all nodes; where the store cannot carry that, each gets its third."""
    part = 1 if store.shares_limits else 3
    return {
        "zone": {"max_connections": MOST_CONNECTIONS // part},
        "destination": [{"mx": [f"mx.{LIMITED}"], "max_rate": f"{MOST_A_SECOND // part}/1s"}],
    }


def check(running: Fleet, verdict: Verdict) -> None:
    limited = [begun for begun in running.sink.begun if begun.domain == LIMITED]
    print(verdict, running.load.codes(), f"{most_within(limited, 1.0)} of {len(limited)} in a second")
    assert verdict.acknowledged > 2 * running.store.rate
    assert not verdict.missing
    assert not verdict.unexplained
    assert not verdict.at_once
    # The limit is that of all nodes together, whatever happens to them.
    assert 1 < running.sink.open_peak <= MOST_CONNECTIONS
    assert all(count <= MOST_IN_FLIGHT for count in verdict.repeated.values())
    assert not above_rate(limited, MOST_A_SECOND, 1.0)
    assert most_within(limited, 1.0) > MOST_A_SECOND / 2, "the rate was never asked for"
    # What could not be stored was refused, and for now only.
    assert not running.answered_while_away()
    assert running.load.codes().keys() <= {"451"}
