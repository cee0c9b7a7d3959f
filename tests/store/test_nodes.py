"""NodeStores that share a queue: each delivers what it has accepted, and one adopts what another has left."""

import asyncio
import gc
import threading
import warnings
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec import structs

from tests.store import builders
from tests.store.builders import NOW, body_of, message_id
from tests.store.keys.places import PLACES, Place
from tests.support.waiting import until
from zonerelay import durable
from zonerelay.model.clock import SystemClock
from zonerelay.model.delivery import DeliveryKey, QueueName, queue_of
from zonerelay.store import contract
from zonerelay.store.context import StoreContext
from zonerelay.store.contract import ClaimLostError, Finish, IdempotencyKey, Postpone, StoreError
from zonerelay.store.keys.partition import SeenFile
from zonerelay.store.keys.port import PAGE_ROWS, Apply, KeyReader, SharedEngine, clear
from zonerelay.store.nodes import NodeStore
from zonerelay.store.queue.reads import QueueReads
from zonerelay.store.queue.store import PartitionStore

QUEUE = queue_of("default")


@dataclass
class Machine:
    """One node's process, with what its scheduler is told."""

    place: Place
    directory: Path
    news: list[QueueName] = field(default_factory=list)
    lost: list[DeliveryKey] = field(default_factory=list)
    busy: set[DeliveryKey] = field(default_factory=set)

    async def start(self, number: int | None = None) -> NodeStore:
        engine = self.place.engine()
        assert isinstance(engine, SharedEngine)
        self.nodes = await NodeStore(
            engine,
            StoreContext(
                clock=SystemClock(),
                on_news=self.news.append,
                on_lost=self.lost.extend,
                withdraw=lambda keys: set(keys) - self.busy,
            ),
            directory=self.directory,
            preferred=number,
            every=0.1,
        ).opened()
        return self.nodes

    async def die(self) -> None:
        """As kill -9: nothing is left behind in order."""
        nodes = self.nodes
        await nodes._tasks.cancel()
        for held in [nodes._own, *nodes._adopted_partitions.values()]:
            await held.partition.abandon()
        for keeper in nodes._keepers.values():  # what the kernel does for a process
            await keeper.close()
        await nodes.engine.close()

    async def claim(self, wanted: int = 1) -> list[str]:
        """Recipients that are handed out, as soon as so many can be."""
        found: list[str] = []
        for _ in range(200):
            for delivery in await self.nodes.claim(QUEUE, 100, now=NOW + 1):
                found.append(delivery.recipient)
            if len(found) >= wanted:
                return found
            await asyncio.sleep(0.05)
        raise AssertionError(f"{found} are handed out, and not {wanted}")


@pytest.fixture(
    params=["memory", *(pytest.param(name, marks=pytest.mark.proof) for name in ("postgres", "redis", "s3"))]
)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    return PLACES[request.param](tmp_path)


@pytest.fixture
async def crew(place: Place, tmp_path: Path) -> AsyncIterator[list[Machine]]:
    """Three machines, of which the test starts those that it needs."""
    machines = [Machine(place, tmp_path / f"machine-{number}") for number in range(3)]
    yield machines
    for machine in machines:
        if hasattr(machine, "nodes"):
            await machine.nodes.close()
            del machine.nodes
    place.close()


@pytest.fixture
async def pair(crew: list[Machine]) -> list[Machine]:
    """Two that have started."""
    for machine in crew[:2]:
        await machine.start()
    return crew[:2]


def _collect() -> None:
    """Collect what machines that died have left: a kernel would close the connections of a killed process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture(autouse=True, scope="module")
def _nothing_left_for_other_tests() -> Iterator[None]:
    yield
    _collect()


@pytest.fixture(autouse=True)
def _nothing_left_by_the_test_before() -> None:
    _collect()


async def put(
    machine: Machine,
    number: int,
    *recipients: str,
    body: bytes = b"x\r\n",
    once: IdempotencyKey | None = None,
) -> None:
    await builders.store_message(machine.nodes, number, *recipients, body=body, once=once)


async def test_mail_of_a_node_that_is_gone_is_delivered_by_an_heir(pair: list[Machine]) -> None:
    one, two = pair
    await put(one, 1, "a@example.net", "b@example.net", body=b"of one\r\n")
    await put(two, 2, "c@example.net")
    assert len(await one.claim(2)) == 2
    await one.die()
    assert sorted(await two.claim(3)) == ["a@example.net", "b@example.net", "c@example.net"]
    await until(lambda: QUEUE in two.news)
    assert await body_of(two.nodes, message_id(1)) == b"of one\r\n"
    two.nodes.check_claim(message_id(1))
    for delivery in [await two.nodes.deliveries_of(message_id(number)) for number in (1, 2)]:
        await two.nodes.settle([Finish(each) for each in delivery])
    assert await two.nodes.queues() == set()
    await until(lambda: not two.nodes._adopted_partitions)


@pytest.mark.parametrize("held", [False, True])
async def test_a_report_of_an_heir_is_one_batch_with_what_it_reports(pair: list[Machine], held: bool) -> None:
    """An operator bounces held mail, which no attempt has claimed."""
    one, two = pair
    [delivery] = await builders.store_message(one.nodes, 1, "a@example.net", held=held)
    await one.nodes.close()
    await until(lambda: QUEUE in two.nodes.counts())
    if not held:
        await two.claim()
    assert await two.nodes.deliveries_of(message_id(1), own=True) == [delivery]
    message, dsn = builders.own_message(message_id(9), b"it failed\r\n", "from@example.org")
    await two.nodes.settle(
        [Finish(delivery), contract.OwnMessage(message, b"it failed\r\n", (dsn,), about=(delivery.key,))]
    )
    assert await two.nodes.deliveries_of(message_id(1)) == []
    assert await two.claim() == ["from@example.org"]
    assert await body_of(two.nodes, message_id(9)) == b"it failed\r\n"
    assert one.nodes.node in two.nodes._adopted_partitions, "the report lies where the message did"


async def test_mail_of_another_living_node_is_none_that_this_one_can_settle(pair: list[Machine]) -> None:
    """A bounce would be reported, and the mail delivered all the same."""
    one, two = pair
    await put(one, 1, "a@example.net")
    await until(lambda: one.nodes.node in two.nodes.others)
    assert len(await two.nodes.deliveries_of(message_id(1))) == 1
    assert await two.nodes.deliveries_of(message_id(1), own=True) == []


async def test_a_node_that_stood_still_loses_its_claims_and_goes_on(crew: list[Machine]) -> None:
    one, two = crew[:2]
    await one.start()
    await put(one, 1, "a@example.net", body=b"0123456789abcde\n" * 1024 * 1024)
    await one.claim()
    [delivery] = await one.nodes.deliveries_of(message_id(1))
    body = one.nodes.read_body(message_id(1))
    assert await anext(body)
    await one.nodes._own.partition._tasks.cancel()  # its lease is not renewed
    await two.start()
    assert await two.claim() == ["a@example.net"]
    with pytest.raises(ClaimLostError):
        one.nodes.check_claim(message_id(1))
    with pytest.raises(StoreError):
        await put(one, 2, "b@example.net")
    await until(lambda: one.lost == [delivery.key])
    with pytest.raises(ClaimLostError):
        await one.nodes.read_message(message_id(1))
    with pytest.raises(ClaimLostError):
        async for _ in body:
            pass
    await one.nodes.settle([Finish(delivery)])
    assert [each.recipient for each in await two.nodes.deliveries_of(message_id(1))] == ["a@example.net"]
    one.nodes.release([delivery.key])
    await put(one, 3, "c@example.net")
    assert await one.claim() == ["c@example.net"]


async def test_a_node_that_starts_again_is_itself_at_once(crew: list[Machine]) -> None:
    """It does not wait for the lease of its former process."""
    [one] = crew[:1]
    await one.start()
    node = one.nodes.node
    await put(one, 1, "a@example.net")
    await one.die()
    await one.start()
    assert one.nodes.node == node
    assert await one.claim() == ["a@example.net"]


async def test_a_cancelled_start_is_no_start(crew: list[Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    began, go, create = threading.Event(), threading.Event(), durable.create

    def held_up(path: Path, content: bytes) -> bool:
        began.set()
        go.wait()
        return create(path, content)

    monkeypatch.setattr(durable, "create", held_up)
    start = asyncio.create_task(crew[0].start(5))
    await until(began.is_set)
    start.cancel()
    await asyncio.sleep(0)
    go.set()
    await asyncio.wait({start})
    assert start.cancelled()
    assert (await crew[0].start(5)).node == 5


async def test_a_node_that_starts_again_is_the_heir_at_once_that_it_was(crew: list[Machine]) -> None:
    """Nobody waits for the lease of a process of this machine that has died."""
    one, two = crew[:2]
    await one.start()
    await put(one, 1, "a@example.net")
    node = one.nodes.node
    await one.nodes.close()
    await two.start(node + 5)
    assert two.nodes._adopted_partitions.keys() == {node}
    await two.die()
    await two.start(node + 5)
    assert two.nodes._adopted_partitions.keys() == {node}
    assert await two.claim() == ["a@example.net"]


async def test_operators_see_the_mail_of_all_nodes(pair: list[Machine]) -> None:
    one, two = pair
    await put(one, 1, "a@example.net")
    await put(two, 2, "b@example.net", body=b"of two\r\n")
    await put(one, 3, "c@example.net")
    await until(lambda: bool(one.nodes.others))
    found = [delivery.recipient async for delivery in one.nodes.scan()]
    assert found == ["a@example.net", "b@example.net", "c@example.net"]
    assert (await one.nodes.read_message(message_id(2))).envelope.recipients[0].address == "b@example.net"
    assert await body_of(one.nodes, message_id(2)) == b"of two\r\n"
    assert set(await one.nodes.read_messages([message_id(1), message_id(2)])) == {
        message_id(1),
        message_id(2),
    }
    assert [each.recipient for each in await one.nodes.deliveries_of(message_id(2))] == ["b@example.net"]


async def test_a_change_of_another_nodes_mail_reaches_it(pair: list[Machine]) -> None:
    one, two = pair
    await put(one, 1, "a@example.net")
    await put(two, 2, "b@example.net", "busy@example.net", "gone@example.net")
    await until(lambda: bool(one.nodes.others) and bool(two.nodes.others))
    keys = [delivery.key async for delivery in one.nodes.scan()]
    two.busy = {key for key in keys if key.recipient == "busy@example.net"}

    def change(delivery):  # type: ignore[no-untyped-def]
        return None if delivery.recipient == "gone@example.net" else structs.replace(delivery, held=True)

    done = await one.nodes.update(keys, change)
    assert {key.recipient for key in done} == {"a@example.net", "b@example.net", "gone@example.net"}
    assert not any(old.held for old in done.values())
    held = {each.recipient: each.held async for each in two.nodes.scan()}
    assert held == {"a@example.net": True, "b@example.net": True, "busy@example.net": False}
    await until(lambda: not _rows(two, b"answer "))


async def test_a_change_of_mail_that_another_node_has_adopted_reaches_it(crew: list[Machine]) -> None:
    one, two, three = crew
    await one.start()
    await put(one, 1, "a@example.net")
    (delivery,) = await one.nodes.deliveries_of(message_id(1))
    await one.nodes.settle([Postpone(structs.replace(delivery, held=True))])
    await one.nodes.close()
    await two.start(5)
    await until(lambda: bool(two.nodes._adopted_partitions))
    await three.start(6)
    keys = [each.key async for each in three.nodes.scan()]
    done = await asyncio.wait_for(three.nodes.update(keys, lambda old: structs.replace(old, held=False)), 20)
    assert done.keys() == {delivery.key}
    assert await two.claim() == ["a@example.net"]
    await until(lambda: not _rows(two, b"answer "))


def _rows(machine: Machine, prefix: bytes) -> list[bytes]:
    engine = machine.nodes.engine
    partitions = getattr(engine, "partitions", {})
    return [key for each in partitions.values() for key in each.rows if key.startswith(prefix)]


async def test_a_key_is_stored_once_over_all_nodes(crew: list[Machine]) -> None:
    one, two, three = crew
    await one.start()
    await two.start()
    once = IdempotencyKey("ab" * 16, "cd" * 16, SystemClock().now() + 3600)
    await put(one, 1, "a@example.net", once=once)
    with pytest.raises(contract.StoredBeforeError) as found:
        await put(two, 2, "a@example.net", once=once)
    assert found.value.message_id == message_id(1)
    await one.claim()
    await one.nodes.settle([Finish(each) for each in await one.nodes.deliveries_of(message_id(1))])
    await one.nodes.close()
    await three.start()
    with pytest.raises(contract.StoredBeforeError):
        await put(three, 3, "a@example.net", once=once)


@pytest.mark.parametrize("place", ["memory"], indirect=True)
async def test_a_key_that_a_node_has_reserved_after_its_return_stays_reserved(crew: list[Machine]) -> None:
    """What another node knows of it is some time old."""
    one, two = crew[:2]
    nodes = await one.start(1)
    await two.start(7)
    await two.nodes.close()
    looks = list[float]()

    async def look_once(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) > 1:
            await asyncio.Event().wait()

    nodes.wait = look_once
    await until(lambda: len(looks) > 1)
    await two.start(7)
    now = SystemClock().now()
    once = IdempotencyKey("6" * 32, "a" * 32, now + 3600)
    assert await two.nodes._register.reserve(once, message_id(1), now) is None
    found = await nodes._register.reserve(once, message_id(2), now)
    assert found is not None
    assert (found.worker, found.is_pending) == (7, True)


async def test_a_key_that_a_dead_node_has_reserved_is_free_again(pair: list[Machine]) -> None:
    one, two = pair
    once = IdempotencyKey("ef" * 16, "cd" * 16, SystemClock().now() + 3600)
    assert await one.nodes._register.reserve(once, message_id(1), SystemClock().now()) is None
    await one.die()
    await put(two, 2, "a@example.net", once=once)
    assert await two.claim() == ["a@example.net"]


async def test_deferred_and_held_mail_of_an_heir(crew: list[Machine]) -> None:
    one, two = crew[:2]
    await one.start()
    await put(one, 1, "a@example.net", "b@example.net")
    first, second = await one.nodes.deliveries_of(message_id(1))
    later, held = structs.replace(first, next_attempt=NOW + 60), structs.replace(second, held=True)
    await one.nodes.settle([Postpone(later), Postpone(held)])
    await one.nodes.close()
    await two.start()
    assert await two.nodes.next_due(QUEUE) == NOW + 60
    await until(two.nodes.is_counted)
    counts = two.nodes.counts()[QUEUE]
    assert (counts.deferred, counts.held) == (1, 1)
    assert await two.nodes.claim(QUEUE, 10, now=NOW) == []
    assert [each.recipient for each in await two.nodes.claim(QUEUE, 10, now=NOW + 61)] == ["a@example.net"]


async def test_a_list_goes_on_while_a_node_is_adopted(pair: list[Machine]) -> None:
    one, two = pair
    for number in range(1, 2 * PAGE_ROWS):
        await put(two, number, "a@example.net")
    await until(lambda: bool(one.nodes.others))
    walk = one.nodes.scan()
    found = [(await anext(walk)).key]
    await two.die()
    await until(lambda: bool(one.nodes._adopted_partitions), seconds=60.0)
    found += [delivery.key async for delivery in walk]
    assert [key.message_id for key in found] == [message_id(number) for number in range(1, 2 * PAGE_ROWS)]


async def test_a_failed_adoption_comes_later(pair: list[Machine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody keeps its lease meanwhile."""
    one, two = pair
    await put(one, 1, "a@example.net")
    failed: list[bytes] = []

    async def fail_once(reader: KeyReader, start: bytes, end: bytes, write: Apply) -> None:
        if not failed:
            failed.append(start)
            raise StoreError("the store does not answer")
        await clear(reader, start, end, write)

    monkeypatch.setattr("zonerelay.store.nodes.clear", fail_once)
    await one.die()
    assert await two.claim() == ["a@example.net"]
    assert failed


async def test_queues_of_an_adopted_partition_are_announced_after_a_failed_read(
    pair: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    await put(one, 1, "a@example.net")
    failed: list[PartitionStore] = []
    queues = PartitionStore.queues

    async def fail_once(store: PartitionStore) -> set[QueueName]:
        if store is not two.nodes.held()[0].queue and not failed:
            failed.append(store)
            raise StoreError("the store does not answer")
        return await queues(store)

    monkeypatch.setattr(PartitionStore, "queues", fail_once)
    await one.die()
    await until(lambda: QUEUE in two.news, seconds=60.0)
    assert failed


@pytest.mark.parametrize("place", ["memory"], indirect=True)
@pytest.mark.parametrize("verb", ["message", "messages", "deliveries_of"])
async def test_mail_is_found_while_its_node_is_adopted(
    pair: list[Machine], verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads from a node that dies goes on while another task adopts its partition."""
    one, two = pair
    await put(two, 1, "a@example.net")
    nodes = one.nodes
    await until(lambda: bool(nodes.others))
    (keeper,) = nodes._keepers.values()
    read = getattr(QueueReads, verb)

    async def slowly(reads: QueueReads, *what: object) -> object:
        if reads.keys is keeper:
            await two.die()
            await until(lambda: not nodes.others)
        return await read(reads, *what)

    monkeypatch.setattr(QueueReads, verb, slowly)
    if verb == "message":
        assert (await nodes.read_message(message_id(1))).id == message_id(1)
    elif verb == "messages":
        assert list(await nodes.read_messages([message_id(1)])) == [message_id(1)]
    else:
        assert [each.recipient for each in await nodes.deliveries_of(message_id(1))] == ["a@example.net"]
    assert not nodes.others


def test_a_seen_file_that_is_no_text_is_refused_and_not_left_locked(tmp_path: Path) -> None:
    path = tmp_path / "0.seen"
    path.write_bytes(b'["\xff"]')
    for _ in range(2):
        with pytest.raises(contract.StoreOpenError, match="the last known state of the queue"):
            SeenFile(path, "token")
