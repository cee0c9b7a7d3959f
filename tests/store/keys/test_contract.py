"""What every engine of ordered keys promises, with the real servers."""

import asyncio
import random
import tracemalloc

import pytest

from tests.store.keys.conftest import Opened
from tests.store.keys.places import LEASE, Place
from tests.store.keys.unreliable import Unreliable, UnreliableKeeper
from zonerelay.model.clock import SystemClock
from zonerelay.store.contract import ClaimLostError, StoreError
from zonerelay.store.keys import port
from zonerelay.store.keys.partition import Partition, open_partition
from zonerelay.store.keys.port import FencedError, NodeTakenError, Position, Write, WriteBatch

EVERYTHING = (b"\x01", b"\xff" * 9)


def put(**values: str) -> Write:
    return Write({key.encode(): value.encode() for key, value in values.items()})


async def all_rows(reader: port.KeyReader, rows: int = 1000) -> list[port.Row]:
    """Every row but the format of a LevelDB spool."""
    found = [row async for page in port.pages(reader, *EVERYTHING, rows=rows) for row in page]
    return [row for row in found if row[0] != b"meta format"]


# --- an ordered map


async def test_what_was_written_is_read(opened: Opened) -> None:
    partition = await opened()
    await partition.write(put(a="1", b="2", empty=""))
    assert await partition.get([b"b", b"none", b"a", b"empty", b"b"]) == [b"2", None, b"1", b"", b"2"]
    await partition.write(Write({b"a": None, b"b": b"3", b"none": None}))
    assert await partition.get([b"a", b"b"]) == [None, b"3"]
    assert await partition.get([]) == []


async def test_a_page_has_a_cursor(opened: Opened) -> None:
    partition = await opened()
    await partition.write(Write({b"k%03d" % number: b"v" * 10 for number in range(25)}))
    first = await partition.page(b"k", b"l", rows=10)
    assert [key for key, _ in first.rows] == [b"k%03d" % number for number in range(10)]
    assert first.cursor is not None
    second = await partition.page(first.cursor, b"l", rows=10)
    assert second.rows[0][0] == b"k010"
    assert len(await all_rows(partition, rows=7)) == 25
    assert await partition.page(b"x", b"y") == port.KeyPage([], None)
    assert (await partition.page(b"k010", b"k012")).rows == [(b"k010", b"v" * 10), (b"k011", b"v" * 10)]


async def test_a_page_is_bounded_in_bytes_and_has_one_row_at_least(opened: Opened) -> None:
    partition = await opened()
    for number in range(9):
        await partition.write(
            Write({b"k%d" % number: bytes((1 if number else 4) * port.PAGE_OCTETS * 2 // 5)})
        )
    large = await partition.page(b"k", b"l")
    assert len(large.rows) == 1
    assert large.cursor is not None
    assert len((await partition.page(large.cursor, b"l")).rows) == 3
    without = await partition.page(b"k", b"l", values=False)
    assert without.rows == [(b"k%d" % number, b"") for number in range(9)]


async def test_the_last_key_of_a_range(opened: Opened) -> None:
    partition = await opened()
    assert await partition.last_key(b"a", b"d") is None
    await partition.write(put(a="", b="", c=""))
    assert await partition.last_key(b"a", b"c") == b"b"
    assert await partition.last_key(b"a", b"d") == b"c"
    assert await partition.last_key(b"d", b"e") is None


async def test_writes_that_wait_together_are_done_one_after_the_other(opened: Opened) -> None:
    """They go in one batch: the later one decides."""
    partition = await opened()
    await asyncio.gather(
        partition.write(put(a="1", k="1")),
        partition.write(Write({b"a": None})),
        partition.write(put(a="2")),
        partition.write(Write({b"k": None})),
        partition.write(put(a="3", z="")),
        partition.write(Write({b"z": None})),
    )
    assert await all_rows(partition) == [(b"a", b"3")]


async def test_a_model_of_it(place: Place, opened: Opened) -> None:
    """Random writes, against a dictionary; also after the partition was opened again."""
    odd = (
        b"a",
        b"a\0",
        b"a\0b",
        b"a ",
        b"a#",
        b"a*",
        b"aa",
        b"A",
        b"\x01",
        b"\xfe\xff",
        b"z\xff",
        b"\xc3\xa9",
    )
    names = [*odd, *(b"%d" % number for number in range(300))]
    choose = random.Random(7)
    model = {key: key[::-1] for key in odd}
    partition = await opened()
    await partition.write(Write(dict(model)))
    assert await all_rows(partition) == sorted(model.items())
    for _ in range(60):
        changes = {
            choose.choice(names): choose.choice([None, choose.randbytes(choose.randrange(2000))])
            for _ in range(choose.randrange(12))
        }
        if choose.random() < 0.2:  # many keys at once
            changes |= dict.fromkeys(choose.sample(sorted(model), len(model) // 2))
        await partition.write(Write(changes))
        for key, value in changes.items():
            if value is None:
                model.pop(key, None)
            else:
                model[key] = value
    assert await all_rows(partition, rows=17) == sorted(model.items())
    await partition.close()
    again = await opened()
    assert await all_rows(again) == sorted(model.items())


async def test_the_largest_keys_and_values(opened: Opened) -> None:
    partition = await opened()
    choose = random.Random(1)
    key, value = b"k" + choose.randbytes(port.MAX_KEY - 1), choose.randbytes(1_500_000)
    await partition.write(Write({key: value, key[:-1]: b"shorter"}))
    assert await partition.get([key, key[:-1]]) == [value, b"shorter"]
    with pytest.raises(ValueError, match="2049 bytes"):
        await partition.write(Write({bytes(port.MAX_KEY + 1): b""}))
    with pytest.raises(ValueError, match="begins with"):
        await partition.write(Write({b"\0key": b""}))
    await partition.write(Write({key: b"small now"}))
    assert await partition.get([key]) == [b"small now"]


async def test_large_ranges_take_little_memory(opened: Opened) -> None:
    partition = await opened()
    for first in range(0, 4000, 500):
        await partition.write(Write({b"big %06d" % n: bytes(4000) for n in range(first, first + 500)}))
    tracemalloc.start()
    try:
        count = 0
        async for rows in port.pages(partition, *EVERYTHING):
            count += sum(key.startswith(b"big ") for key, _ in rows)
        _, walked = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        await port.clear(partition, b"big ", b"big!", partition.write)
        _, cleared = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 4000
    assert await all_rows(partition) == []
    assert walked < 8_000_000  # of 16 MB; a snapshot of objects may be under way
    assert cleared < 6_000_000


async def test_nodes_do_not_see_each_other(opened: Opened) -> None:
    here, there = await opened(0), await opened(1, token="there")
    await here.write(put(a="here"))
    await there.write(put(a="there", b="there"))
    await there.write(Write({b"b": None}))
    assert await all_rows(here) == [(b"a", b"here")]
    assert await all_rows(there) == [(b"a", b"there")]


async def test_another_node_reads_a_partition_that_it_does_not_enter(opened: Opened) -> None:
    living = await opened(0)
    await living.write(put(a="1", b="x" * 50_000))
    keeper = opened.engine().keeper(0)
    assert await all_rows(keeper) == [(b"a", b"1"), (b"b", b"x" * 50_000)]
    await living.write(Write({b"a": b"2", b"b": None}))
    assert await all_rows(keeper) == [(b"a", b"2")]
    assert await keeper.last_key(b"a", b"z") == b"a"
    await keeper.close()
    await living.write(put(a="3"))  # nobody has taken it over


# --- batches


async def test_waiting_writers_share_a_batch(opened: Opened) -> None:
    partition = await opened()
    before = partition.seen.last.number

    async def session(number: int) -> None:
        for step in range(5):
            await partition.write(Write({b"%d %d" % (number, step): b"x" * 100}))

    await asyncio.gather(*(session(number) for number in range(64)))
    assert len(await all_rows(partition)) == 320
    assert partition.seen.last.number - before < 100


async def test_batches_are_numbered_over_epochs(opened: Opened) -> None:
    partition = await opened()
    await partition.write(put(a="1"))
    await partition.write(put(a="2"))
    assert partition.seen.last == Position(partition.seen.epoch, 2)
    await partition.close()
    again = await opened()
    epoch = partition.seen.epoch
    assert (again.seen.last, again.seen.epoch) == (Position(epoch, 2), epoch + 1)
    await again.write(put(a="3"))
    assert again.seen.last == Position(again.seen.epoch, 3)


async def test_a_callback_runs_in_the_order_of_writes(opened: Opened) -> None:
    partition = await opened()
    told: list[int] = []
    waiting = [
        asyncio.ensure_future(partition.write(put(a=str(n)), applied=lambda n=n: told.append(n)))  # type: ignore[misc]
        for n in range(9)
    ]
    await asyncio.sleep(0)
    waiting[4].cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert told == list(range(9))


# --- the fence


async def test_a_key_is_reserved_once_for_all_nodes(opened: Opened) -> None:
    await opened()
    one, two = opened.engine(), opened.engine()
    if not isinstance(one, port.SharedEngine) or not isinstance(two, port.SharedEngine):
        return  # the example is no engine of several nodes
    found = await asyncio.gather(*(each.reserve(b"key", b"%d" % n, 4e9) for n, each in enumerate((one, two))))
    assert sorted(found, key=repr) in ([None, b"0"], [None, b"1"])
    holder = b"0" if found[0] is None else b"1"
    await two.unreserve(b"key", b"another")
    assert await one.reserve(b"key", b"2", 4e9) == holder
    await one.unreserve(b"key", holder)
    assert await two.reserve(b"key", b"3", SystemClock().now() + 0.05) is None
    await asyncio.sleep(0.1)
    assert await two.reserve(b"key", b"4", 4e9) is None
    assert await one.reserve(b"key", b"5", 4e9) == b"4"


async def test_a_writer_of_an_earlier_epoch_is_refused(opened: Opened) -> None:
    heard: list[StoreError] = []
    old = await opened()
    old.on_failure = heard.append
    await old.write(put(a="old"))
    new = await opened()  # the same token: the successor of a process that died
    await new.write(put(a="new"))
    with pytest.raises(FencedError):
        await old.write(put(a="late"))
    with pytest.raises(FencedError):
        await old.write(put(b="and later"))
    assert [type(error) for error in heard] == [FencedError]
    assert await all_rows(new) == [(b"a", b"new")]
    with pytest.raises(ClaimLostError):
        old.check()


async def test_a_batch_that_lands_after_a_take_over_is_refused(opened: Opened) -> None:
    keeper = opened.engine().keeper(0)
    state = await keeper.enter("one", mark="mark")
    late = WriteBatch(Position(state.epoch, 1), put(a="late"))
    try:
        successor = opened.engine().keeper(0)
        entered = await successor.enter("one", mark="mark")
        assert entered.last == Position()
        with pytest.raises(FencedError):
            await keeper.apply(late)
        await successor.apply(WriteBatch(Position(entered.epoch, 1), put(b="mine")))
        with pytest.raises(FencedError):
            await keeper.apply(late)
        assert await all_rows(successor) == [(b"b", b"mine")]
    finally:
        await keeper.close()
        await successor.close()


# --- lost answers


@pytest.mark.parametrize("what", ["before", "after", "late"])
async def test_a_batch_without_an_answer_is_found_out(place: Place, opened: Opened, what: str) -> None:
    """Its callers learn of no trouble. It is there once, whatever became of it."""
    engine = Unreliable(opened.engine())
    partition = await opened(engine=engine)
    await partition.write(put(a="1"))
    losses = [what]
    engine.lose = lambda batch: losses.pop() if losses else ""
    await asyncio.gather(partition.write(put(a="2", n="1")), partition.write(put(b="2")))
    assert await all_rows(partition) == [(b"a", b"2"), (b"b", b"2"), (b"n", b"1")]
    assert partition.seen.last.number == 2
    await partition.write(Write({b"n": b"2", b"a": None}))
    keeper = partition.keeper
    assert isinstance(keeper, UnreliableKeeper)
    if what == "late":
        with pytest.raises(FencedError):
            await keeper.land()
    assert await all_rows(partition) == [(b"b", b"2"), (b"n", b"2")]


async def test_a_store_that_is_away_for_long_is_told_and_comes_back(opened: Opened) -> None:
    heard: list[str] = []
    engine = Unreliable(opened.engine())
    back = asyncio.Event()
    partition = await opened(engine=engine, patience=0.1)
    partition.on_failure, partition.on_back = lambda error: heard.append(str(error)), back.set
    await partition.write(put(a="1"))

    def lose(batch: WriteBatch) -> str:
        engine.is_away = True
        return "after"

    engine.lose = lose
    with pytest.raises(StoreError, match="unknown whether"):
        await partition.write(put(a="2"))
    with pytest.raises(StoreError):
        await partition.write(put(a="3"))
    assert len(heard) == 1
    engine.lose = lambda batch: ""
    engine.is_away = False
    async with asyncio.timeout(10):
        await back.wait()
    assert await partition.get([b"a"]) == [b"2"]  # it had happened
    assert partition.seen.last.number == 2
    await partition.write(put(a="4"))
    assert await partition.get([b"a"]) == [b"4"]


async def test_another_writer_in_the_meantime_makes_memory_void(opened: Opened) -> None:
    """Its batch has the number of ours that is in doubt: the epoch tells them apart."""
    engine = Unreliable(opened.engine())
    partition = await opened(engine=engine, patience=0.05)
    await partition.write(put(a="1"))

    def lose(batch: WriteBatch) -> str:
        engine.is_away = True
        return "before"

    engine.lose = lose
    with pytest.raises(StoreError):
        await partition.write(put(a="mine"))
    other = await opened()
    await other.write(put(a="theirs"))
    await other.close()
    engine.lose = lambda batch: ""
    engine.is_away = False
    for _ in range(200):
        with pytest.raises(StoreError) as raised:
            await partition.write(put(a="again"))
        if isinstance(raised.value, FencedError):
            break
        await asyncio.sleep(0.05)
    else:
        pytest.fail("it goes on")


# --- an older state, an empty store


async def test_an_older_state_is_refused(place: Place, opened: Opened) -> None:
    first = await opened(seen_file=opened.seen_file())
    await first.write(put(a="1"))
    await first.close()
    saved = place.save()
    second = await opened(seen_file=opened.seen_file())
    await second.write(put(a="2"))
    await second.close()
    place.restore(saved)
    with pytest.raises(
        port.OlderStateError, match=r"last batch is number 1 .*this machine has stored number 2"
    ):
        await opened(seen_file=opened.seen_file())
    unchanged = await opened(token="machine")
    assert unchanged.seen.epoch == 2  # that of `second`: the refusal has changed nothing
    assert await unchanged.get([b"a"]) == [b"1"]


async def test_an_empty_store_is_refused(place: Place, opened: Opened) -> None:
    first = await opened(seen_file=opened.seen_file())
    await first.write(put(a="1"))
    await first.close()
    place.restore(None)
    with pytest.raises(port.WrongStoreError, match="it has no mark, like an empty store"):
        await opened(seen_file=opened.seen_file())
    seen_file = opened.seen_file()
    seen_file.forget()
    accepted = await opened(seen_file=seen_file)
    assert await all_rows(accepted) == []


async def test_another_store_is_refused(place: Place, opened: Opened) -> None:
    first = await opened(seen_file=opened.seen_file())
    await first.write(put(a="1"))
    await first.close()
    place.restore(None)
    other = await opened(token="someone")
    await other.write(put(a="1"))
    await other.close()
    with pytest.raises(port.WrongStoreError, match="its mark is"):
        await opened(seen_file=opened.seen_file())


# --- leases


async def test_a_node_is_taken_while_its_lease_runs(opened: Opened) -> None:
    await opened(0)
    with pytest.raises(NodeTakenError):
        await opened(0, token="another machine")


async def test_a_partition_of_a_dead_node_is_adopted(opened: Opened) -> None:
    dead = await opened(0)
    await dead.write(put(a="1", b="2"))
    await dead.abandon()
    engine = opened.engine()
    heir = await opened(1, engine=engine, token="heir")
    peers = {peer.node: peer for peer in await engine.peers()}
    assert set(peers) == {0, 1}
    assert not peers[0].is_left
    assert not peers[0].is_over
    adopted = await opened(0, engine=engine, token="heir", wait=10 * LEASE)
    assert await all_rows(adopted) == [(b"a", b"1"), (b"b", b"2")]
    await adopted.write(Write({b"a": None}))
    assert adopted.seen.last.number == 2
    await heir.write(put(c="3"))
    with pytest.raises(NodeTakenError):
        await opened(0, token="here")  # the owner comes back
    await adopted.close()
    back = await opened(0, token="here")
    assert await all_rows(back) == [(b"b", b"2")]


async def test_a_partition_that_was_left_is_adopted_at_once(opened: Opened) -> None:
    left = await opened(0)
    await left.write(put(a="1"))
    await left.close()
    engine = opened.engine()
    (peer,) = await engine.peers()
    assert (peer.node, peer.is_left, peer.is_over) == (0, True, True)
    adopted = await opened(0, engine=engine, token="heir")
    assert await adopted.get([b"a"]) == [b"1"]


async def test_a_living_node_keeps_its_lease(opened: Opened) -> None:
    living = await opened(0)
    engine = opened.engine()
    for _ in range(7):
        await asyncio.sleep(LEASE / 5)
        assert [peer.is_over for peer in await engine.peers()] == [False]
        living.check()
    await living.write(put(a="1"))


async def test_the_successor_of_a_dead_process_does_not_wait(opened: Opened) -> None:
    first = await opened(seen_file=opened.seen_file())
    await first.write(put(a="1"))
    await first.abandon()
    second = await opened(seen_file=opened.seen_file())
    assert await second.get([b"a"]) == [b"1"]
    with pytest.raises(NodeTakenError, match="another process of this machine"):
        opened.seen_file()


async def test_a_partition_that_cannot_be_opened_leaves_nothing_open(opened: Opened) -> None:
    engine = Unreliable(opened.engine())
    engine.is_away = True
    with pytest.raises(StoreError, match="away"):
        await open_partition(engine, 0, token="x", clock=SystemClock(), seen_file=opened.seen_file())
    opened.seen_file().close()


async def test_a_closed_partition_refuses(opened: Opened) -> None:
    partition: Partition = await opened()
    await partition.close()
    with pytest.raises(StoreError):
        await partition.write(put(a="1"))
    with pytest.raises(StoreError):
        await partition.get([b"a"])
