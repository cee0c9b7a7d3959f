"""Answers of a real server after which it is not to be used any longer, as redis-py makes them exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager

import pytest

from tests.store.builders import store_message
from tests.store.fleet import Fleet, until_healthy
from tests.store.spools import until
from tests.support.ports import free_port, wait_until
from tests.support.redis_server import RedisServer
from zonerelay.config.settings import RedisSettings
from zonerelay.store.contract import StoreError
from zonerelay.store.redis.connection import Server, open_wire


@asynccontextmanager
async def given_up(server: RedisServer, *command: str) -> AsyncIterator[list[str]]:
    """The reasons for which a wire was given up that was asked this."""
    broken: list[str] = []
    wire = await open_wire(Server(RedisSettings(url=server.url)), broken.append)
    try:
        with pytest.raises(StoreError):
            await wire.call(*command)
        await asyncio.sleep(0)
        yield broken
    finally:
        await wire.close()


def cluster_node(**other: str) -> RedisServer:
    settings: Mapping[str, str] = {"cluster-enabled": "yes", "cluster-port": str(free_port()), **other}
    return RedisServer(settings, port=free_port())


@pytest.fixture
def node() -> Iterator[RedisServer]:
    with cluster_node() as server:
        yield server


async def test_node_of_a_cluster_without_slots_is_given_up(node: RedisServer) -> None:
    async with given_up(node, "SET", "a", "b") as reasons:
        assert reasons == ["CLUSTERDOWN Hash slot not served"]


async def test_node_of_a_cluster_that_points_elsewhere_is_given_up(node: RedisServer) -> None:
    with cluster_node() as other:
        bus = other._settings["cluster-port"]
        assert node.ask("CLUSTER", "MEET", "127.0.0.1", str(other.port), bus) == b"+OK\r\n"
        assert other.ask("CLUSTER", "ADDSLOTSRANGE", "0", "16383") == b"+OK\r\n"
        assert wait_until(lambda: b"cluster_state:ok" in node.query("CLUSTER", "INFO"), timeout=15)
        async with given_up(node, "SET", "a", "b") as reasons:
            assert reasons == [f"MOVED 15495 127.0.0.1:{other.port}"]


async def test_replica_that_has_lost_its_primary_is_given_up() -> None:
    with RedisServer({"replica-serve-stale-data": "no"}) as replica:
        assert replica.ask("REPLICAOF", "127.0.0.1", str(free_port())) == b"+OK\r\n"
        async with given_up(replica, "GET", "a") as reasons:
            assert [reason.partition(" ")[0] for reason in reasons] == ["MASTERDOWN"]


@pytest.mark.parametrize("command", [("SET", "a", "b"), ("EVAL", "return redis.call('SET', 'a', 'b')", "0")])
async def test_primary_that_misses_its_replicas_is_given_up(
    redis_server: RedisServer, command: tuple[str, ...]
) -> None:
    redis_server.configure("min-replicas-to-write", "1")
    async with given_up(redis_server, *command) as reasons:
        assert [reason.partition(" ")[0] for reason in reasons] == ["NOREPLICAS"]


async def test_rights_that_were_taken_away_are_noticed_at_once_and_waited_for(lonely: Fleet) -> None:
    spool = await lonely.relay(lease=300.0)
    await store_message(spool.store, 1)
    lonely.server.ask("ACL", "SETUSER", "default", "-evalsha")
    with pytest.raises(StoreError):
        await store_message(spool.store, 2)
    await until(lambda: spool.store.unhealthy() is not None)
    lonely.server.ask("ACL", "SETUSER", "default", "+evalsha")
    await until_healthy(spool)
    await store_message(spool.store, 2)


async def test_log_that_is_switched_off_at_run_time_stops_mail_within_one_beat(lonely: Fleet) -> None:
    spool = await lonely.relay(lease=3.0)
    await store_message(spool.store, 1)
    lonely.server.configure("appendonly", "no")
    await until(lambda: spool.store.unhealthy() is not None, seconds=2.0)
    with pytest.raises(StoreError):
        await store_message(spool.store, 2)
    lonely.server.configure("appendonly", "yes")
    await until_healthy(spool)
