"""What is asked of a server behind every batch, and what is enough of an answer."""

from __future__ import annotations

from typing import cast

import pytest

from zonerelay.config.settings import RedisSettings
from zonerelay.store.redis.connection import Argument, Confirmation, Reply, SharedConnection
from zonerelay.store.redis.engine import ServerFacts, confirmations, server_facts


def facts(version: tuple[int, ...], *, syncs_log: bool = True, max_memory: int = 0) -> ServerFacts:
    info = {"redis_version": ".".join(map(str, version)), "used_memory": "100", "maxmemory": str(max_memory)}
    return ServerFacts(info, syncs_log=syncs_log)


@pytest.mark.parametrize(
    ("version", "syncs_log", "asked"),
    [((7, 0, 15), True, False), ((7, 2, 0), True, True), ((8, 0, 0), True, True), ((7, 2, 4), False, False)],
)
def test_log_is_waited_for_where_the_server_can(
    version: tuple[int, ...], syncs_log: bool, asked: bool
) -> None:
    assert facts(version, syncs_log=syncs_log).can_wait_for_log is asked


@pytest.mark.parametrize(
    ("least", "reply", "enough"),
    [((1, 0), [1, 0], True), ((1, 0), [0, 2], False), ((2,), 2, True), ((2,), 1, False), ((1,), None, False)],
)
def test_confirmation_counts(least: tuple[int, ...], reply: Reply, enough: bool) -> None:
    assert Confirmation(("WAIT",), least, "").is_enough(reply) is enough


def test_free_memory_is_what_is_left_below_the_limit() -> None:
    assert facts((7, 0)).free_memory is None
    assert facts((7, 0), max_memory=150).free_memory == 50


@pytest.mark.parametrize(("appendfsync", "waits"), [(b"always", True), (b"everysec", False), (b"no", False)])
async def test_a_log_that_is_not_synced_with_every_write_is_not_waited_for(
    appendfsync: bytes, waits: bool
) -> None:
    """The operator has accepted that loss; a batch would wait up to a second for the next sync."""

    class Server:
        async def call(self, *command: Argument) -> Reply:
            if command[0] == "INFO":
                return b"redis_version:8.0.0\r\nrole:master\r\naof_enabled:1\r\n"
            return [b"appendonly", b"yes", b"appendfsync", appendfsync]

    facts = await server_facts(cast(SharedConnection, Server()))
    assert bool(confirmations(facts, RedisSettings())) is waits
