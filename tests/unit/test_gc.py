"""When reference cycles are looked for, and what the garbage collector need not look at."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterator

import pytest

from zonerelay.config.settings import RetrySettings
from zonerelay.process.gc import (
    GROWN,
    IDLE_AFTER,
    IDLE_GROWN,
    IDLE_STEP,
    SETTLE_AFTER,
    STEP,
    Collection,
    GcSchedule,
    GcTimer,
    collect,
)
from zonerelay.queue.destination.destinations import Destination, Site
from zonerelay.routing.destinations.route import DestinationLimits, MxHost, Route
from zonerelay.routing.dns.answers import DnsAnswer, DnsStatus, MxRecord, TlsaRecord

BLOCKS = 1_000_000
MADE = 60_000


@pytest.fixture
def _as_before() -> Iterator[None]:
    gc.collect()
    yield
    gc.freeze()


@pytest.fixture
async def rounds(_as_before: None) -> AsyncIterator[GcTimer]:
    rounds = GcTimer()
    rounds.start()
    yield rounds
    rounds.stop()


def after(seconds: float, *, busy: bool, blocks: int = BLOCKS) -> Collection:
    """What is looked at so long after a look at all, with as many allocated blocks."""
    rounds = GcSchedule(now=0.0, cpu=0.0, blocks=BLOCKS)
    return rounds.next(now=seconds, cpu=0.09 if busy else 0.0001, blocks=blocks)


def test_the_middle_generation_has_every_fifth_turn() -> None:
    rounds = GcSchedule(now=0.0, cpu=0.0, blocks=BLOCKS)
    found = [rounds.next(now=n / 10, cpu=n / 10, blocks=BLOCKS) for n in range(10)]
    assert (
        found
        == [Collection.YOUNG, Collection.YOUNG, Collection.YOUNG, Collection.YOUNG, Collection.OLDER] * 2
    )


@pytest.mark.parametrize("busy", [False, True])
def test_what_has_stayed_for_two_seconds_is_settled(busy: bool) -> None:
    assert after(SETTLE_AFTER - 1, busy=busy) is Collection.YOUNG
    assert after(SETTLE_AFTER, busy=busy) is Collection.SETTLE
    rounds = GcSchedule(now=0.0, cpu=0.0, blocks=BLOCKS)
    found = [rounds.next(now=float(n), cpu=float(n), blocks=BLOCKS) for n in range(1, 8)]
    assert [n for n, look in enumerate(found, 1) if look is Collection.SETTLE] == [2, 4, 6]


def test_a_memory_that_does_not_grow_is_never_looked_at_as_a_whole() -> None:
    for busy in (False, True):
        assert after(1e9, busy=busy) is Collection.SETTLE


def test_an_idle_loop_looks_at_a_memory_that_has_grown_a_little() -> None:
    grown = int(BLOCKS * 1.1) + IDLE_GROWN + 1
    assert after(IDLE_AFTER, busy=False, blocks=grown) is Collection.WHOLE
    assert after(IDLE_AFTER - 1, busy=False, blocks=grown) is Collection.SETTLE
    assert after(IDLE_AFTER, busy=False, blocks=grown - 1) is Collection.SETTLE
    assert after(IDLE_AFTER, busy=True, blocks=grown) is Collection.SETTLE


def test_a_loop_that_has_nothing_to_do_is_woken_seldom() -> None:
    rounds = GcSchedule(now=0.0, cpu=0.0, blocks=BLOCKS)
    found = []
    for n, cpu in enumerate([0.05, 0.0501, 0.0502, 0.09], 1):
        rounds.next(now=n / 10, cpu=cpu, blocks=BLOCKS)
        found.append(rounds.pause)
    assert found == [STEP, IDLE_STEP, IDLE_STEP, STEP]


def test_memory_that_grows_is_looked_at_at_once_and_then_not_before_it_has_grown_again() -> None:
    assert after(1, busy=True, blocks=int(BLOCKS * 1.5) + GROWN + 1) is Collection.WHOLE
    assert after(1, busy=True, blocks=int(BLOCKS * 1.5) + GROWN) is Collection.YOUNG
    rounds = GcSchedule(now=0.0, cpu=0.0, blocks=BLOCKS)
    rounds.looked_at_all(now=1.0, blocks=2 * BLOCKS)
    assert rounds.next(now=1.5, cpu=2.0, blocks=3 * BLOCKS) is Collection.YOUNG
    assert rounds.next(now=3.0, cpu=3.0, blocks=4 * BLOCKS) is Collection.WHOLE


class Node:
    """One end of a cycle."""

    other: Node | None = None


def cycle() -> tuple[Node, weakref.ref[Node]]:
    one, two = Node(), Node()
    one.other, two.other = two, one
    return one, weakref.ref(two)


@pytest.mark.usefixtures("_as_before")
def test_a_cycle_that_was_settled_is_found_by_a_look_at_all() -> None:
    used, settled = cycle()
    collect(Collection.SETTLE)
    unused = cycle()[1]
    del used
    collect(Collection.SETTLE)
    assert unused() is None
    assert settled() is not None
    collect(Collection.WHOLE)
    assert settled() is None


async def test_a_queue_that_frees_as_much_as_it_makes_does_not_pile_up_young_objects(rounds: GcTimer) -> None:
    """By its counts alone the interpreter never looked, and then at everything in one go."""
    waiting: deque[list[int]] = deque(([] for _ in range(MADE)), maxlen=MADE)
    rounds._step(asyncio.get_running_loop())
    waiting.extend([] for _ in range(MADE))
    assert len(gc.get_objects(generation=0)) > MADE // 2
    rounds._step(asyncio.get_running_loop())
    assert len(gc.get_objects(generation=0)) < 1000


async def test_what_a_reload_makes_is_settled_without_a_look(rounds: GcTimer) -> None:
    looks: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        looks.append(info["generation"])

    with rounds.waiting():
        gc.callbacks.append(note)
        made: list[list[int]] = [[] for _ in range(1000)]
        rounds._step(asyncio.get_running_loop())
        gc.callbacks.remove(note)
    assert not looks
    assert not any(each is made for each in gc.get_objects())
    rounds._step(asyncio.get_running_loop())


@pytest.mark.usefixtures("_as_before")
async def test_rounds_that_are_stopped_leave_the_interpreter_as_it_was() -> None:
    before = gc.get_threshold()
    rounds = GcTimer()
    rounds.stop()
    rounds.start()
    assert gc.get_threshold() != before
    rounds.stop()
    assert gc.get_threshold() == before


# What there are tens of thousands of is nothing to the garbage collector, which holds the loop meanwhile


def test_what_there_are_many_of_is_nothing_to_the_garbage_collector() -> None:
    mail = DnsAnswer(DnsStatus.OK, tuple(MxRecord(10, name) for name in ("a.example", "b.example")), 1.0)
    text = DnsAnswer(DnsStatus.OK, ("v=STSv1; id=1",), 1.0)
    pinned = DnsAnswer(DnsStatus.OK, (TlsaRecord(3, 1, 1, b"x"),), 1.0)
    cache = {("a", "MX"): mail, ("a", "TXT"): text, ("a", "TLSA"): pinned}
    hosts, limits = (MxHost("mx.example.com", 25),), DestinationLimits(10, 50, 100)
    route = Route("default", "example.com", hosts, 1.0)
    destination = Destination(route, Site(route.site), RetrySettings())
    destination.domains["example.com"] = None
    gc.collect()
    for thing in (
        *(mail, mail.records, mail.records[0], text, text.records, pinned, pinned.records, cache),
        *(hosts, hosts[0], limits, route, destination.suspension, destination.domains),
    ):
        assert not gc.is_tracked(thing)
