"""Changes reach the store, whatever the store does meanwhile."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from tests.support.event_log import EventLog, events_into
from tests.support.queueing import FlakyStore, deliveries_of, make_message
from zonerelay.model.clock import ManualClock
from zonerelay.model.envelope import MessageIdSource
from zonerelay.model.reply import Attempt, Reply
from zonerelay.process.tasks import SLICE, Slices
from zonerelay.queue.settle import settler as journal
from zonerelay.queue.settle.settler import AtomicWrite, OutcomeLog
from zonerelay.store.contract import Finish, Postpone


class Bench:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.sink = EventLog()
        self.store = FlakyStore()
        self.ids = MessageIdSource(self.clock)
        self.journal = OutcomeLog(
            self.store, events_into(self.sink, self.clock), Slices(self.clock.monotonic), self.clock
        )
        self.done: list[str] = []

    def put(
        self, name: str, count: int = 1, *, lazy: bool = False, then: Callable[[], None] | None = None
    ) -> AtomicWrite:
        message = make_message(self.ids, [f"{name}{n}@example.com" for n in range(count)], created=0.0)
        deliveries = deliveries_of(message)
        self.store.add(message, [b""], deliveries)
        then = then or (lambda: self.done.append(name))
        entry = AtomicWrite([Finish(each) for each in deliveries], len(deliveries), then, lazy=lazy)
        self.journal.reserve(count)
        self.journal.put(entry)
        return entry

    def put_lazily(self, count: int) -> None:
        for number in range(count):
            self.put(f"r{number}", lazy=True)

    @property
    def written(self) -> list[int]:
        """How many changes each write had."""
        return [len(changes) for changes in self.store.settled]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(journal, "RETRY_FIRST", 0.0)
    monkeypatch.setattr(journal, "RETRY_LONGEST", 0.0)
    return Bench()


async def test_entries_of_one_turn_are_written_together(bench: Bench) -> None:
    bench.put("a")
    bench.put("b", 3)
    assert await bench.journal.drain(1.0)
    assert bench.written == [4]
    assert bench.done == ["a", "b"]


async def test_a_write_is_bounded_and_splits_no_entry(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "MAX_CHANGES", 5)
    for name, count in (("a", 3), ("b", 3), ("c", 9), ("d", 1)):
        bench.put(name, count)
    await bench.journal.drain(1.0)
    assert bench.written == [3, 3, 9, 1]


async def test_nobody_gets_room_while_the_store_refuses(bench: Bench) -> None:
    bench.store.refuses = True
    bench.put("a")
    while bench.journal._room.is_set():
        await asyncio.sleep(0)
    bench.put("b")
    for _ in range(50):
        await asyncio.sleep(0)
    assert not bench.journal._room.is_set()
    assert bench.done == []
    assert len(bench.journal.keys()) == 2
    bench.store.refuses = False
    assert await bench.journal.drain(1.0)
    assert sorted(bench.done) == ["a", "b"]
    assert bench.journal._room.is_set()
    assert not bench.journal.keys()


async def test_a_write_that_waits_for_the_store_goes_by_a_clock_that_was_set_back(bench: Bench) -> None:
    (finish,) = bench.put("a").changes
    assert isinstance(finish, Finish)
    assert await bench.journal.drain(1.0)
    bench.store.refuses = True
    ahead = bench.clock.now() + 3600.0
    deferred = finish.delivery.deferred(ahead + 60.0, Attempt(ahead, Reply(451, "4.4.1", "no answer")))
    bench.journal.reserve(1)
    bench.journal.put(AtomicWrite([Postpone(deferred)], 1))
    while bench.journal._room.is_set():
        await asyncio.sleep(0)
    bench.store.refuses = False
    assert await bench.journal.drain(1.0)
    (stored,) = bench.store.settled[-1]
    assert isinstance(stored, Postpone)
    assert stored.delivery.next_attempt == bench.clock.now() + 60.0


async def test_a_repaired_store_is_tried_at_once(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
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
        bench.put_lazily(3)
        while bench.journal._room.is_set() or len(bench.journal.keys()) < 3:
            await asyncio.sleep(0.01)
    bench.store.refuses = False
    assert await bench.journal.drain(1.0)
    assert bench.written == [6]
    assert bench.store.settled_lazily == [False]


async def test_nobody_gets_room_while_a_store_is_mute(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SILENT", 0.0)
    bench.store.silence = asyncio.Event()
    bench.put("a")
    while bench.journal._room.is_set():
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
    assert bench.journal._room.is_set()
    bench.store.sick.clear()
    assert await bench.journal.drain(1.0)
    assert sorted(bench.done) == ["a", "b", "c", "sick"]


async def test_room_ends_when_too_much_is_under_way(bench: Bench) -> None:
    bench.journal.reserve(journal.MAX_UNSETTLED - 1)
    assert bench.journal._room.is_set()
    bench.put("a")
    assert not bench.journal._room.is_set()
    await bench.journal.drain(1.0)
    assert bench.journal._room.is_set()


async def test_an_announcement_that_raises_stops_nobody(bench: Bench) -> None:
    bench.put("a")

    def broken() -> None:
        raise ZeroDivisionError

    bench.put("x", then=broken)
    bench.put("b")
    await bench.journal.drain(1.0)
    assert bench.done == ["a", "b"]
    assert len(bench.sink.named("trouble")) == 1


async def test_drain_gives_up_in_time(bench: Bench) -> None:
    bench.store.refuses = True
    bench.put("a")
    assert not await bench.journal.drain(0.02)
    await bench.journal.close()


@pytest.mark.parametrize(("urgent", "under_way", "lazy"), [(0, 0, True), (1, 0, False), (0, 1, False)])
async def test_a_write_may_wait_if_nobody_waits_for_any_of_it_and_little_is_under_way(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, urgent: int, under_way: int, lazy: bool
) -> None:
    monkeypatch.setattr(journal, "HURRY", 3)
    bench.put_lazily(2 - urgent)
    for _ in range(urgent):
        bench.put("a")
    bench.journal.reserve(under_way)
    assert await bench.journal.drain(1.0)
    assert (bench.written, bench.store.settled_lazily) == ([2], [lazy])


async def test_what_is_written_is_told_of_in_slices_and_to_the_end(bench: Bench) -> None:
    def told(name: str) -> None:
        bench.done.append(name)
        bench.clock.advance(SLICE)

    for name in "abcdef":
        bench.put(name, then=partial(told, name))
    while not bench.done:
        await asyncio.sleep(0)
    assert bench.done == ["a"]
    await asyncio.sleep(0)
    assert bench.done == ["a", "b"]
    await bench.journal.close()
    assert bench.done == list("abcdef")


@pytest.mark.parametrize("lazy", [False, True])
async def test_nothing_is_written_after_the_end(bench: Bench, *, lazy: bool) -> None:
    bench.put("a", lazy=lazy)
    await bench.journal.close()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not bench.store.asked["settle"]
