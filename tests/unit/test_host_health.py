"""Hosts that were found dead: how long others are tried before them, and who tries them again."""

from __future__ import annotations

import random

import pytest

from zonerelay.delivery.connection.session_limits import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    MAX_REMEMBERED,
    PROBE_TIME,
    HostOrder,
)
from zonerelay.delivery.peer import HostFailure
from zonerelay.model.clock import ManualClock
from zonerelay.model.reply import Reply
from zonerelay.routing.destinations.route import MxHost, Route

HOST = MxHost("mx.example.com", 25)
IP = "192.0.2.1"
ROUTE = Route("default", "example.com", (HOST,), 1e12)
DOWN = HostFailure(Reply(451, "4.1", "no answer"), down=True)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def health(clock: ManualClock) -> HostOrder:
    return HostOrder(clock, random.Random(1))


def test_a_host_that_failed_is_down_for_a_while_and_then_one_may_try_it(
    clock: ManualClock, health: HostOrder
) -> None:
    assert not health.is_down(HOST, IP)
    health.failed(HOST, IP, DOWN)
    clock.advance(FIRST_PAUSE - 1)
    assert health.is_down(HOST, IP)
    clock.advance(1)
    assert [health.is_down(HOST, IP) for _ in range(3)] == [False, True, True]


def test_each_failed_probe_doubles_the_pause_up_to_the_longest(clock: ManualClock, health: HostOrder) -> None:
    pauses = []
    for _ in range(7):
        health.failed(HOST, IP, DOWN)
        pause = 0
        while health.is_down(HOST, IP):
            clock.advance(1)
            pause += 1
        pauses.append(pause)
    assert pauses == [30, 60, 120, 240, 480, 600, 600]
    assert LONGEST_PAUSE == 600


def test_many_that_fail_together_are_one_failure(clock: ManualClock, health: HostOrder) -> None:
    for _ in range(10):
        health.failed(HOST, IP, DOWN)
    clock.advance(FIRST_PAUSE)
    assert not health.is_down(HOST, IP)


def test_a_host_that_talks_is_forgotten_with_all_its_failures(clock: ManualClock, health: HostOrder) -> None:
    health.failed(HOST, IP, DOWN)
    clock.advance(FIRST_PAUSE)
    assert not health.is_down(HOST, IP)
    health.failed(HOST, IP, DOWN)
    health.talked(HOST, IP)
    assert not health.is_down(HOST, IP)
    assert not health._down
    health.failed(HOST, IP, DOWN)
    clock.advance(FIRST_PAUSE)
    assert not health.is_down(HOST, IP)


def test_a_probe_that_never_reports_back_makes_way_for_another(clock: ManualClock, health: HostOrder) -> None:
    health.failed(HOST, IP, DOWN)
    clock.advance(FIRST_PAUSE)
    assert not health.is_down(HOST, IP)
    clock.advance(PROBE_TIME)
    assert not health.is_down(HOST, IP)


def test_looking_makes_nobody_a_probe(clock: ManualClock, health: HostOrder) -> None:
    other = MxHost("mx2.example.com", 25)
    route = Route("default", "example.com", (HOST, other), 1e12)
    health.failed(HOST, IP, DOWN)
    assert {health.first_of(route) for _ in range(20)} == {"mx2.example.com:25"}
    assert health.first_of(ROUTE) == "mx.example.com:25"  # where all are down it is tried
    clock.advance(FIRST_PAUSE)
    assert {health.first_of(route) for _ in range(20)} == {"mx.example.com:25", "mx2.example.com:25"}
    assert not health.is_down(HOST, IP)


def test_memory_is_bounded(health: HostOrder) -> None:
    hosts = [MxHost("mx.example.com", port) for port in range(1, MAX_REMEMBERED + 10)]
    for host in hosts:
        health.failed(host, IP, DOWN)
    assert not health.is_down(hosts[0], IP)
    assert health.is_down(hosts[-1], IP)
