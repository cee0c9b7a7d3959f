"""Whatever happens while deliveries are handed out: what was committed is found, without a restart.

Message ids are given out when a message begins, so they are committed in another order. Whoever claims is
told of each commit, asks until nothing more comes, and looks again when the store says that something is due:
if that is not enough for one delivery, it is missed until the next start.
"""

import asyncio
from collections import Counter
from collections.abc import Collection
from random import Random

import pytest

from tests.store.builders import NOW, attempt, delivery_for, envelope_for, message_id, store_message
from tests.store.spools import Spool
from tests.support.waiting import until
from zonerelay.model.delivery import Delivery, DeliveryKey, queue_of
from zonerelay.store.contract import Change, Finish, Postpone, Store, StoreError
from zonerelay.store.leveldb.engine import AtomicBatch
from zonerelay.store.leveldb.spool import LevelDb
from zonerelay.store.queue import claims as leveldb_claims
from zonerelay.store.queue import reads as queue_reads

DOMAINS = ("one.example", "two.example", "three.example")
HOUR = 3600.0


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every limit is reached by a handful of messages."""
    monkeypatch.setattr(queue_reads, "PAGE_ROWS", 3)
    monkeypatch.setattr(leveldb_claims, "_READ_AHEAD", 1)


class Claimer:
    """What the queue does: asks when it is told, passes over domains and fetches them by name, gives back."""

    def __init__(self, store: Store, chance: Random) -> None:
        self._store = store
        self._chance = chance
        self._told = asyncio.Event()
        self._passed: set[str] = set()
        self.now = NOW
        self.attempts: Counter[DeliveryKey] = Counter()
        self.finished: Counter[DeliveryKey] = Counter()

    def tell(self) -> None:
        self._told.set()

    async def run(self, expected: Collection[DeliveryKey]) -> None:
        """Until all of these are finished."""
        while len(self.finished) < len(expected):
            await asyncio.wait_for(self._told.wait(), 10.0)
            self._told.clear()
            await self._until_nothing_comes()

    async def _until_nothing_comes(self) -> None:
        chance = self._chance
        full = chance.random() < 0.3
        while not full:
            limit = chance.randint(1, 5)
            skip = {domain for domain in DOMAINS if chance.random() < 0.3}
            self._passed |= skip
            found = await self._store.claim(queue_of("default"), limit, now=self.now, skip_domains=skip)
            await self._attempt(found)
            if len(found) < limit:
                break
        for domain in list(self._passed):
            while found := await self._store.claim(queue_of("default"), 2, now=self.now, domain=domain):
                await self._attempt(found)
            self._passed.discard(domain)
            self.tell()  # it is passed over no longer: what was given back meanwhile may be there
        if full or self._passed:
            self.tell()
        due = await self._store.next_due(queue_of("default"))
        if due is not None:
            self.now = max(self.now, due)
            self.tell()

    async def _attempt(self, found: list[Delivery]) -> None:
        chance = self._chance
        changes: list[Change] = []
        for delivery in found:
            self.attempts[delivery.key] += 1
            what = chance.random() if self.attempts[delivery.key] < 4 else 1.0
            if what < 0.2:
                self._store.release([delivery.key])
                self.tell()
            elif what < 0.4:
                until = self.now + chance.choice((1.0, 20.0))
                changes.append(Postpone(delivery.deferred(until, attempt(self.now))))
            else:
                changes.append(Finish(delivery))
                self.finished[delivery.key] += 1
        if changes:
            lazy = chance.random() < 0.5
            await asyncio.gather(*(self._store.settle([change], lazy=lazy) for change in changes))
            self.tell()


def deliveries_to(number: int, chance: Random) -> list[Delivery]:
    addresses = [f"x@{domain}" for domain in chance.sample(DOMAINS, chance.randint(1, 3))]
    envelope = envelope_for(message_id(number), *addresses)
    # Some as those of a sender who sends very much: due when they were accepted.
    due = chance.choice((0.0, 0.0, NOW - 1.0))
    return [delivery_for(envelope, address, next_attempt=due) for address in addresses]


async def commit(store: Store, deliveries: list[Delivery], chance: Random, claimer: Claimer) -> None:
    """Begin now, commit later: others overtake it."""
    addresses = [delivery.recipient for delivery in deliveries]
    async with store.begin(envelope_for(deliveries[0].message_id, *addresses)) as writer:
        for _ in range(chance.randint(0, 30)):
            await asyncio.sleep(0.0005)
        await writer.write(b"x" * chance.choice((10, 10, 70_000)))
        await writer.commit(deliveries)
    claimer.tell()


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("seed", range(3))
async def test_commits_that_overtake_each_other_and_the_claims_are_all_found(store: Store, seed: int) -> None:
    chance = Random(seed)
    messages = [deliveries_to(number, chance) for number in range(1, 25)]
    keys = {delivery.key for deliveries in messages for delivery in deliveries}
    claimer = Claimer(store, chance)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(claimer.run(keys))
        for deliveries in messages:
            tasks.create_task(commit(store, deliveries, chance, claimer))
            await asyncio.sleep(0.0005)
    assert claimer.finished == dict.fromkeys(keys, 1)
    assert await store.queues() == set()


async def found_again(store: Store, now: float) -> list[DeliveryKey]:
    """What the queue would come to, were it not told anything."""
    due = await store.next_due(queue_of("default"))
    found = await store.claim(queue_of("default"), 10, now=now, domain="full.example")
    found += await store.claim(queue_of("default"), 10, now=now)
    if not found and due is not None:
        found += await store.claim(queue_of("default"), 10, now=due)
    return [delivery.key for delivery in found]


async def test_what_was_passed_over_is_found_after_the_clock_was_set_back(store: Store) -> None:
    (delivery,) = await store_message(store, 1, "a@full.example", next_attempt=NOW - 1)
    assert await store.claim(queue_of("default"), 10, now=NOW, skip_domains={"full.example"}) == []
    early = await store.claim(queue_of("default"), 10, now=NOW - HOUR, domain="full.example")
    early += await store.claim(queue_of("default"), 10, now=NOW - HOUR)
    found = [each.key for each in early] or await found_again(store, NOW - HOUR)
    assert found == [delivery.key]


async def test_what_was_being_passed_over_as_the_spool_failed_is_found_afterwards(spool: Spool) -> None:
    """LevelDB writes down what it passes over."""
    store = spool.store
    keys = {(await store_message(store, number, "a@full.example"))[0].key for number in (1, 2, 3)}
    committer = store._keeper.committer  # type: ignore[attr-defined]  # the store cannot be asked to fail
    committer.refuse(StoreError("the disk is away"))
    with pytest.raises(StoreError, match="away"):
        await store.claim(queue_of("default"), 10, now=NOW, skip_domains={"full.example"})
    committer.resume()
    found = await store.claim(queue_of("default"), 10, now=NOW, domain="full.example")
    found += await store.claim(queue_of("default"), 10, now=NOW)
    assert {delivery.key for delivery in found} == keys


async def test_refused_mail_that_is_on_disk_all_the_same_is_told_of_after_the_repair(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sync fails when everything has been written: the reopening finds the message complete. (The disk
    queue's repair removes it; the shared stores are asked again by themselves.)
    """
    commit = LevelDb.commit

    def written_and_refused(db: LevelDb, batch: AtomicBatch) -> None:
        commit(db, batch)
        raise StoreError("the sync failed")

    await store_message(spool.store, 1)
    with monkeypatch.context() as patches:
        patches.setattr(LevelDb, "commit", written_and_refused)
        with pytest.raises(StoreError):
            await store_message(spool.store, 2)
    await until(lambda: spool.store.unhealthy() is None)
    await until(lambda: spool.news == [queue_of("default")])
    claimed = await spool.store.claim(queue_of("default"), 10, now=NOW)
    assert [delivery.message_id for delivery in claimed] == [message_id(1), message_id(2)]
