"""Changes reach the store, whatever the store does meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.queueing import FlakyStore, Sink, deliveries_of, make_events, make_message
from zonerelay.model.clock import ManualClock
from zonerelay.model.message_id import MessageIdSource
from zonerelay.model.outcome import Attempt
from zonerelay.model.reply import Reply
from zonerelay.queue.aio import SLICE, Slices
from zonerelay.queue.settle import outcome_log as journal
from zonerelay.queue.settle.outcome_log import AtomicWrite, OutcomeLog
from zonerelay.store.contract import Finish, Postpone


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.sink = Sink()
        self.store = FlakyStore()
        self.ids = MessageIdSource(self.clock)
        self.journal = OutcomeLog(
            self.store, make_events(self.sink, self.clock), Slices(self.clock.monotonic), self.clock
        )
        self.done: list[str] = []

    def put(self, name: str, count: int = 1) -> AtomicWrite:
        message = make_message(self.ids, [f"{name}{n}@example.com" for n in range(count)], created=0.0)
        deliveries = deliveries_of(message)
        self.store.add(message, [b""], deliveries)
        entry = AtomicWrite([Finish(delivery) for delivery in deliveries], lambda: self.done.append(name))
        self.journal.reserve(count)
        self.journal.put(entry)
        return entry


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(journal, "RETRY_FIRST", 0.0)
    monkeypatch.setattr(journal, "RETRY_LONGEST", 0.0)
    return Bench()


async def test_entries_of_one_turn_are_written_together(bench: Bench) -> None:
    bench.put("a")
    bench.put("b", 3)
    assert await bench.journal.drain(1.0)
    assert [len(changes) for changes in bench.store.settled] == [4]
    assert bench.done == ["a", "b"]


async def test_a_write_is_bounded_but_an_entry_is_never_split(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "MAX_CHANGES", 5)
    for name, count in (("a", 3), ("b", 3), ("c", 9), ("d", 1)):
        bench.put(name, count)
    await bench.journal.drain(1.0)
    assert [len(changes) for changes in bench.store.settled] == [3, 3, 9, 1]


async def test_nobody_gets_room_while_the_store_refuses(bench: Bench) -> None:
    bench.store.refuses = True
    bench.put("a")
    while bench.journal.has_room:
        await asyncio.sleep(0)
    bench.put("b")
    for _ in range(50):
        await asyncio.sleep(0)
    assert not bench.journal.has_room
    assert bench.done == []
    assert len(bench.journal.keys()) == 2
    bench.store.refuses = False
    assert await bench.journal.drain(1.0)
    assert sorted(bench.done) == ["a", "b"]
    assert bench.journal.has_room
    assert not bench.journal.keys()


async def test_a_write_that_waits_for_the_store_goes_by_a_clock_that_was_set_back(bench: Bench) -> None:
    (finish,) = bench.put("a").changes
    assert isinstance(finish, Finish)
    assert await bench.journal.drain(1.0)
    bench.store.refuses = True
    ahead = bench.clock.now() + 3600.0
    deferred = finish.delivery.deferred(ahead + 60.0, Attempt(ahead, Reply(451, "4.4.1", "no answer")))
    bench.journal.reserve(1)
    bench.journal.put(AtomicWrite([Postpone(deferred)]))
    while bench.journal.has_room:
        await asyncio.sleep(0)
    bench.store.refuses = False
    assert await bench.journal.drain(1.0)
    (stored,) = bench.store.settled[-1]
    assert isinstance(stored, Postpone)
    assert stored.delivery.next_attempt == bench.clock.now() + 60.0


async def test_a_store_that_is_repaired_is_tried_at_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "RETRY_FIRST", 3600.0)
    bench.store.refuses = True
    bench.store.repaired = asyncio.Event()
    bench.put("a")
    for _ in range(20):
        await asyncio.sleep(0)
    assert bench.store.asked["settle"] == 1
    bench.store.refuses = False
    bench.store.repaired.set()
    assert await bench.journal.drain(1.0)
    assert bench.done == ["a"]


async def test_what_a_repaired_store_is_given_waits_for_no_company(bench: Bench) -> None:
    """A spool on a full disk is good for milliseconds, until LevelDB fails to move its tables again."""
    bench.store.refuses = True
    for _ in range(2):
        put_lazily(bench, 3)
        while bench.journal.has_room or len(bench.journal.keys()) < 3:
            await asyncio.sleep(0.01)
    bench.store.refuses = False
    assert await bench.journal.drain(1.0)
    assert [len(changes) for changes in bench.store.settled] == [6]
    assert bench.store.settled_lazily == [False]


async def test_nobody_gets_room_while_the_store_does_not_answer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "SILENT", 0.0)
    bench.store.silence = asyncio.Event()
    bench.put("a")
    while bench.journal.has_room:
        await asyncio.sleep(0)
    assert bench.done == []
    bench.store.silence.set()
    await bench.journal.room()
    assert bench.done == ["a"]


async def test_a_sick_entry_holds_up_nobody(bench: Bench) -> None:
    sick = bench.put("sick")
    bench.store.sick = set(sick.delivery_keys())
    bench.put("a")
    while "a" not in bench.done:
        await asyncio.sleep(0)
    for name in "bc":
        bench.put(name)
    while len(bench.done) < 3:
        await asyncio.sleep(0)
    assert bench.journal.has_room
    bench.store.sick.clear()
    assert await bench.journal.drain(1.0)
    assert sorted(bench.done) == ["a", "b", "c", "sick"]


async def test_room_ends_when_too_much_is_under_way(bench: Bench) -> None:
    bench.journal.reserve(journal.MAX_UNSETTLED - 1)
    assert bench.journal.has_room
    bench.put("a")
    assert not bench.journal.has_room
    await bench.journal.drain(1.0)
    assert bench.journal.has_room


async def test_an_announcement_that_raises_stops_nobody(bench: Bench) -> None:
    bench.put("a")

    def broken() -> None:
        raise ZeroDivisionError

    message = make_message(bench.ids, ["x@example.com"], created=0.0)
    bench.store.add(message, [b""], deliveries_of(message))
    bench.journal.reserve(1)
    bench.journal.put(AtomicWrite([Finish(deliveries_of(message)[0])], broken))
    bench.put("b")
    await bench.journal.drain(1.0)
    assert bench.done == ["a", "b"]
    assert len(bench.sink.named("trouble")) == 1


async def test_drain_gives_up_in_time(bench: Bench) -> None:
    bench.store.refuses = True
    bench.put("a")
    assert not await bench.journal.drain(0.02)
    await bench.journal.close()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def put_lazily(bench: Bench, count: int) -> None:
    for number in range(count):
        message = make_message(bench.ids, [f"r{number}@example.com"], created=0.0)
        deliveries = deliveries_of(message)
        bench.store.add(message, [b""], deliveries)
        bench.journal.reserve(1)
        bench.journal.put(AtomicWrite([Finish(delivery) for delivery in deliveries], lazy=True))


async def test_lazy_entries_of_several_turns_are_written_together(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "GATHERING", 0.1)
    for _ in range(3):
        put_lazily(bench, 2)
        await turns()
    assert bench.store.settled == []
    while not bench.store.settled:
        await asyncio.sleep(0.01)
    assert [len(changes) for changes in bench.store.settled] == [6]


async def test_lazy_entries_go_at_once_with_one_that_is_not(bench: Bench) -> None:
    put_lazily(bench, 2)
    bench.put("a")
    await turns()
    assert [len(changes) for changes in bench.store.settled] == [3]


async def test_many_lazy_entries_wait_for_no_more(bench: Bench) -> None:
    put_lazily(bench, journal.COMPANY)
    await turns()
    assert [len(changes) for changes in bench.store.settled] == [journal.COMPANY]
    assert await bench.journal.drain(1.0)
    assert bench.journal.keys() == set()


async def test_draining_waits_for_no_company(bench: Bench) -> None:
    put_lazily(bench, 1)
    assert await bench.journal.drain(1.0)
    assert [len(changes) for changes in bench.store.settled] == [1]


async def test_what_is_written_is_told_of_in_slices_and_to_the_end(bench: Bench) -> None:
    for name in "abcdef":
        entry = bench.put(name)

        def told(name: str = name) -> None:
            bench.done.append(name)
            bench.clock.advance(SLICE)

        entry.then = told
    while not bench.done:
        await asyncio.sleep(0)
    assert bench.done == ["a"]
    await asyncio.sleep(0)
    assert bench.done == ["a", "b"]
    await bench.journal.close()
    assert bench.done == list("abcdef")
