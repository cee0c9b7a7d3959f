"""Implements the store of a node that shares a queue with other nodes: its own partition, and adopted ones.

A **node** is one process with one partition of the engine. Mail that it accepts is in its partition, and only
this node delivers it. When a node has left, or its lease has ended, another node adopts the partition: it
becomes the writer and delivers from it in place until it is empty. So a delivery belongs to the node that
accepted it or to the node that has adopted its partition, and a claim is a mark in memory.

Each change is one batch of the partition that has the message; a call that concerns several partitions is
split. Operators see the mail of all nodes: lists read the partitions of the others, and a change of their
mail is a request to its owner (`Requests`).

On failure: if another writer has the own partition, this node may have been stopped for longer than its
lease. Its claims there are reported to `on_lost`, reads of those messages raise ClaimLostError, outcomes
change nothing, and the node continues with another partition. A lost adopted partition is dropped in the same
way. While the engine is unreachable, `Partition` refuses writes, as in a store of one node.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Self, Unpack
from uuid import uuid4

import msgspec
from msgspec import structs

from zonerelay.model.bounded import BoundedDict
from zonerelay.model.delivery import Delivery, DeliveryKey, QueueName
from zonerelay.model.envelope import MAX_WORKERS, Envelope, Message, MessageId
from zonerelay.process.tasks import Tasks, completed, gathered
from zonerelay.process.threads import STORE
from zonerelay.store import contract, records
from zonerelay.store.context import StoreContext
from zonerelay.store.contract import ChangeOne, MessageNotFoundError, QueueCounts, StoreError, Wanted
from zonerelay.store.keys.partition import Partition, SeenFile, open_partition
from zonerelay.store.keys.port import FencedError, Keeper, NodeTakenError, SharedEngine, Write, clear
from zonerelay.store.queue.body import BodyWriter
from zonerelay.store.queue.in_flight import in_batches
from zonerelay.store.queue.partition_keeper import open_queue
from zonerelay.store.queue.reads import DeliveryPage, PartitionsView, QueueReads, scanned
from zonerelay.store.queue.store import PartitionStore

MOST_ADOPTED = 100_000
"""The number of messages of adopted partitions that are remembered after a claim, many more than zones claim
at a time.
"""
PAUSE = 1.0
REQUESTS, ANSWERS = records.REQUEST_PREFIX, records.ANSWER_PREFIX
PATIENCE = 30.0
LOOK_AGAIN = 0.25

Found = dict[DeliveryKey, Delivery]

Wait = Callable[[float], Awaitable[object]]

_log = logging.getLogger("zonerelay.store")


class OwnedPartition(msgspec.Struct, eq=False):
    """A partition that this process writes, with its queue."""

    node: int
    partition: Partition
    queue: PartitionStore


@dataclass(eq=False, repr=False)
class NodeStore:
    """The store of one node of a shared queue. It belongs to the event loop that opened it. `directory` is
    where this machine records the engine's partitions that it has seen. `preferred` is the configured number
    of the node, if any. The other nodes are checked every `every` seconds. `wait` returns after that time,
    or earlier if another node has left.
    """

    engine: SharedEngine
    around: StoreContext
    _: KW_ONLY
    directory: Path
    preferred: int | None = None
    every: float = 2.0
    wait: Wait = asyncio.sleep
    min_free_space: int = 0

    def __post_init__(self) -> None:
        self._own: OwnedPartition
        self._is_open = self._is_closed = False
        self._adopted_partitions: dict[int, OwnedPartition] = {}
        self._first = 0
        self._adopted: BoundedDict[MessageId, OwnedPartition] = BoundedDict(MOST_ADOPTED)
        self._lost = set[DeliveryKey]()
        """Claims that were lost, until their owner has released them."""
        self._stored_reports: set[MessageId] = set()
        self._keepers: dict[int, Keeper] = {}
        """The partitions of other nodes, to read. They stay usable while this node adopts a partition."""
        self._tasks = Tasks()
        self._fenced: set[int] = set()
        self._is_fenced = asyncio.Event()
        self._replaced = asyncio.Event()
        self._requests = Requests(self)
        self._register = NodeRegister(self)
        self._taken: list[OwnedPartition] = []
        """Partitions that this node has taken over and whose queues are not announced yet."""

    # --- opening

    async def opened(self) -> Self:
        """Acquire a partition and start to watch the other nodes. Raises StoreOpenError and StoreError, in
        which case nothing is left open.
        """
        try:
            self._own = await self._take_partition()
            self._is_open = True
            await self._look_at_peers()
        except BaseException:
            await self.close()
            raise
        self._tasks.start(self._watch())
        self._tasks.start(self._replace_lost())
        return self

    async def _take_partition(self) -> OwnedPartition:
        """Become the writer of a partition: preferably the configured one, or one that this machine has used,
        or one whose lease has ended, or a new one. Raises StoreError.
        """
        peers = {peer.node: peer for peer in await self.engine.peers()}
        known = await STORE.run(self._known_nodes)
        over = [node for node, peer in peers.items() if peer.is_over]
        new = [node for node in range(MAX_WORKERS) if node not in peers]
        first = [] if self.preferred is None else [self.preferred]
        if self.preferred is not None:
            new.reverse()  # operators assign the small numbers to other nodes
        refusal: NodeTakenError | None = None
        for node in dict.fromkeys([*first, *known, *over, *new]):
            if node in self._adopted_partitions:
                continue
            try:
                return await self._enter(node, is_own=True)
            except NodeTakenError as error:
                refusal = error
        raise contract.StoreOpenError(f"all {MAX_WORKERS} partitions of the queue are in use") from refusal

    def _known_nodes(self) -> list[int]:
        """Return the node numbers that this machine has used before, most recently used first."""
        found = self.directory.glob("*.seen") if self.directory.is_dir() else ()
        files = sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
        return [int(path.stem) for path in files if path.stem.isdigit()]

    async def _enter(self, node: int, *, is_own: bool) -> OwnedPartition:
        """Become the writer of a partition and open its queue. Raises NodeTakenError and StoreError."""
        # With the token the next process of this machine recognizes the partitions that this one has adopted.
        token = uuid4().hex if is_own else self._own.partition.seen.writer
        seen = await STORE.open(SeenFile, self.directory / f"{node}.seen", token) if is_own else None
        partition = await open_partition(
            self.engine, node, token=token, clock=self.around.clock, seen_file=seen
        )

        def on_stored(deliveries: Sequence[Delivery], is_next: bool) -> int:
            # Claims record the partition of what they return, if it is an adopted one.
            return self.around.on_stored(deliveries, is_next and is_own and partition.is_held())

        around = structs.replace(self.around, register=self._register, on_stored=on_stored)
        if not is_own:
            around = structs.replace(around, on_health=lambda _: None)

        try:
            for prefix in (REQUESTS, ANSWERS):  # left by an earlier process
                await clear(partition, prefix, records.after(prefix), partition.write)
        except BaseException:
            await partition.abandon()  # while its lease continues, nobody would deliver the mail
            raise
        queue = await open_queue(partition, around, min_free_space=self.min_free_space)
        on_failure = partition.on_failure

        def on_error(error: StoreError) -> None:
            on_failure(error)
            if isinstance(error, FencedError):
                self._fenced.add(node)
                self._is_fenced.set()

        partition.on_failure = on_error
        return OwnedPartition(node, partition, queue)

    async def close(self) -> None:
        self._is_closed = True
        await self._tasks.cancel()
        for held in reversed(self.held()) if self._is_open else ():
            await held.queue.close()
        for keeper in self._keepers.values():
            await completed(keeper.close())
        await self.engine.close()

    # --- the other nodes

    async def _watch(self) -> None:
        """Check the other nodes repeatedly, adopt partitions of nodes that are gone, and carry out requests
        of others.
        """
        while True:
            try:
                await self._look_at_peers()
                await self._requests.answer()
            except StoreError as error:
                _log.warning("the other nodes of the queue cannot be checked: %s", error)
            except Exception:  # noqa: BLE001 - without this task mail of nodes that are gone is never sent
                _log.exception("the other nodes of the queue cannot be checked")
            await self.wait(self.every)

    async def _look_at_peers(self) -> None:
        peers = await self.engine.peers()
        held = {self._own.node, *self._adopted_partitions}
        # The writer of these is an earlier process of this machine that has died.
        for peer in peers:
            if peer.node in held:
                continue
            reads = self.reads_of(peer.node)
            try:
                is_free = peer.is_over or peer.writer == self._own.partition.seen.writer
                if is_free and await reads.queues():
                    await self._adopt(peer.node)
            except StoreError as error:  # a damaged partition must not stop other mail
                _log.warning("the mail of stopped node %d cannot be taken over: %s", peer.node, error)
        for adopted in list(self._adopted_partitions.values()):
            if not adopted.queue.claimed_keys() and not await adopted.queue.queues():
                del self._adopted_partitions[adopted.node]
                await completed(adopted.queue.close())
                _log.info("node %d of the queue is empty and was released", adopted.node)
        await self._tell_news()

    async def _adopt(self, node: int) -> None:
        try:
            adopted = await self._enter(node, is_own=False)
        except NodeTakenError:
            return  # it is back, or another node was faster
        _log.warning("node %d of the queue has stopped; its mail is now delivered by this relay", node)
        self._adopted_partitions[node] = adopted
        self._taken.append(adopted)

    async def _tell_news(self) -> None:
        """Report the queues of adopted partitions to the scheduler (`on_news`). Raises StoreError, after
        which the next check announces them.
        """
        while self._taken:
            taken = self._taken[0]
            queues = await taken.queue.queues() if taken in self.held() else ()
            for queue in queues:
                self.around.on_news(queue)
            self._taken = [each for each in self._taken if each is not taken]

    def reads_of(self, node: int) -> QueueReads:
        """Return an object that reads the queue in a node's partition."""
        for held in self.held():
            if held.node == node:
                return QueueReads(held.partition)
        if node not in self._keepers:
            if self._is_closed:
                raise StoreError(contract.Unhealthy.CLOSED)
            self._keepers[node] = self.engine.keeper(node)
        return QueueReads(self._keepers[node])

    @property
    def others(self) -> dict[int, QueueReads]:
        """Readers of the partitions that this node does not hold, by node number."""
        held = [each.node for each in self.held()]
        return {node: QueueReads(keeper) for node, keeper in self._keepers.items() if node not in held}

    async def is_over(self, node: int) -> bool:
        """Return whether the node can no longer store data, because its partition was adopted or its lease
        has ended. Raises StoreError.
        """
        if node in self._adopted_partitions:
            return True
        return any(peer.node == node and peer.is_over for peer in await self.engine.peers())

    async def _replace_lost(self) -> None:
        """Replace this node's partition, or drop an adopted one, whenever another writer has taken it."""
        while True:
            await self._is_fenced.wait()
            self._is_fenced.clear()
            for node in list(self._fenced):
                self._fenced.discard(node)
                lost = self._own if node == self._own.node else self._adopted_partitions.pop(node, None)
                if lost is None:
                    continue
                try:
                    await self._replace(lost)
                except Exception:  # noqa: BLE001 - as below
                    # Without this task the node would never accept mail again.
                    _log.exception("the lost partition could not be replaced")
                    self._fenced.add(node)
                    self._is_fenced.set()
                    await asyncio.sleep(PAUSE)

    async def _replace(self, lost: OwnedPartition) -> None:
        keys = lost.queue.claimed_keys()
        self._lost.update(keys)
        for message_id in [each for each, held in self._adopted.items() if held is lost]:
            del self._adopted[message_id]
        _log.error("node %d has another writer, because the lease of this relay expired", lost.node)
        with contextlib.suppress(StoreError):
            await completed(lost.queue.close())
        if lost is self._own:
            while True:
                try:
                    self._own = await self._take_partition()
                    break
                except StoreError as error:
                    _log.warning("no partition of the queue is available yet: %s", error)
                    await asyncio.sleep(PAUSE)
            self.around.on_health(self._own.queue.unhealthy())
            replaced, self._replaced = self._replaced, asyncio.Event()
            replaced.set()
        self.around.on_lost(keys)
        self._taken.append(self._own)
        with contextlib.suppress(StoreError):
            await self._tell_news()

    # --- choosing the partition

    def held(self) -> list[OwnedPartition]:
        """Return the partitions that this node holds, its own first. The result is a list, because partitions
        are adopted and dropped while a caller waits.
        """
        return [self._own, *self._adopted_partitions.values()]

    async def _holder(self, key: DeliveryKey) -> OwnedPartition:
        """Return the partition in which the delivery is claimed, or else the one that stores it. Deliveries
        that an operator bounces are not claimed.
        """
        for held in self.held():
            if held.queue.has_claim(key):
                return held
        for held in self.held()[1:]:
            if key in {each.key for each in await held.queue.deliveries_of(key.message_id)}:
                return held
        return self._own

    def unclaimed(self, keys: Collection[DeliveryKey]) -> set[DeliveryKey]:
        return {key for key in keys if not any(held.queue.has_claim(key) for held in self.held())}

    def _check_lost(self, message_id: MessageId) -> None:
        """Raise ClaimLostError if this node has lost its claim on the message."""
        if self._lost and any(key.message_id == message_id for key in self._lost):
            raise contract.ClaimLostError("the message is now owned by another node")

    async def _holder_of(self, message_id: MessageId) -> OwnedPartition:
        """Return the partition of this node that stores the message. Raises ClaimLostError."""
        self._check_lost(message_id)
        if not self._adopted_partitions:
            return self._own
        if (known := self._adopted.get(message_id)) is not None:
            return known
        for held in self.held():
            with contextlib.suppress(MessageNotFoundError):
                await held.queue.read_message(message_id)
                return held
        return self._own

    # --- accepting mail

    @property
    def node(self) -> int:
        return self._own.node

    def last_message_id(self) -> MessageId | None:
        return self._own.queue.last_message_id()

    def begin(self, envelope: Envelope) -> BodyWriter:
        return self._own.queue.begin(envelope)

    # --- claims

    async def claim(
        self, queue: QueueName, limit: int, *, now: float, **only: Unpack[contract.ClaimFilter]
    ) -> list[Delivery]:
        """Claim deliveries from all partitions with a valid lease in turn, but new mail only from this node's
        own partition. Raises ClaimLostError if the lease of the own partition has ended, because claimed
        deliveries could not be sent.
        """
        self._own.partition.check()
        if not self._adopted_partitions or only.get("since") is not None:
            return await self._own.queue.claim(queue, limit, now=now, **only)
        all_held = self.held()
        self._first = (self._first + 1) % len(all_held)
        found: list[Delivery] = []
        try:
            for held in [*all_held[self._first :], *all_held[: self._first]]:
                if len(found) >= limit:
                    break
                if not held.partition.is_held():
                    continue
                claimed = await held.queue.claim(queue, limit - len(found), now=now, **only)
                found += claimed
                if held is not self._own:
                    self._adopted.update((delivery.message_id, held) for delivery in claimed)
        except BaseException:
            self.release([delivery.key for delivery in found])
            raise
        return sorted(found, key=lambda delivery: delivery.message_id)

    def release(self, keys: Collection[DeliveryKey]) -> None:
        self._lost.difference_update(keys)
        for held in self.held():
            held.queue.release(keys)

    async def next_due(self, queue: QueueName) -> float | None:
        found = [due for held in self.held() if (due := await held.queue.next_due(queue)) is not None]
        return min(found, default=None)

    def check_claim(self, message_id: MessageId) -> None:
        self._check_lost(message_id)
        self._adopted.get(message_id, self._own).partition.check()

    # --- settling

    async def settle(self, changes: Sequence[contract.Change], *, lazy: bool = False) -> None:
        if not self._adopted_partitions and not self._lost and not self._stored_reports:
            await self._own.queue.settle(changes, lazy=lazy)
            return
        parts: dict[OwnedPartition, list[contract.Change]] = {}
        lost: list[DeliveryKey] = []
        for change in changes:
            if isinstance(change, contract.OwnMessage):
                if change.message.id in self._stored_reports:
                    continue
                about = [key for key in change.about if key not in self._lost]
                if change.about and not about:
                    continue  # the node that has the deliveries now sends its own bounce
                holder = await self._holder(about[0]) if about else self._own
            elif change.delivery.key in self._lost:
                lost.append(change.delivery.key)
                continue
            else:
                holder = await self._holder(change.delivery.key)
            parts.setdefault(holder, []).append(change)
        self._lost.difference_update(lost)
        results = await asyncio.gather(
            *(held.queue.settle(part, lazy=lazy) for held, part in parts.items()), return_exceptions=True
        )
        failed = [result for result in results if isinstance(result, BaseException)]
        for part, result in zip(parts.values(), results, strict=True):
            # If a call has failed in part, the caller repeats all of it. A bounce must not be stored twice.
            ids = {change.message.id for change in part if isinstance(change, contract.OwnMessage)}
            if failed and result is None:
                self._stored_reports |= ids
        if failed:
            raise failed[0]
        self._stored_reports -= {
            change.message.id for change in changes if isinstance(change, contract.OwnMessage)
        }

    async def update(self, keys: Collection[DeliveryKey], change: ChangeOne) -> dict[DeliveryKey, Delivery]:
        found = await self.update_held(keys, change)
        if remaining := [key for key in keys if key not in found]:
            found |= await self._requests.ask(remaining, change)
        return found

    async def update_held(
        self, keys: Collection[DeliveryKey], change: ChangeOne
    ) -> dict[DeliveryKey, Delivery]:
        """Change deliveries in the partitions that this node holds."""
        found: dict[DeliveryKey, Delivery] = {}
        for held in self.held():
            if remaining := [key for key in keys if key not in found]:
                found |= await held.queue.update(remaining, change)
        return found

    # --- reading

    async def read_message(self, message_id: MessageId) -> Message:
        held = await self._holder_of(message_id)
        held.partition.check()
        with contextlib.suppress(MessageNotFoundError), self._reading(held):
            return await held.queue.read_message(message_id)
        return await self._elsewhere().read_message(message_id)

    async def read_body(self, message_id: MessageId) -> AsyncGenerator[bytes, None]:
        held = await self._holder_of(message_id)
        held.partition.check()
        is_begun = False
        try:
            with self._reading(held):
                async with contextlib.aclosing(held.queue.read_body(message_id)) as chunks:
                    async for chunk in chunks:
                        is_begun = True
                        yield chunk
        except MessageNotFoundError:
            if is_begun:
                raise
            async for chunk in self._elsewhere().read_body(message_id):
                yield chunk

    @contextlib.contextmanager
    def _reading(self, held: OwnedPartition) -> Iterator[None]:
        """Raise ClaimLostError if the read in the block failed because another writer has taken over the
        partition. Otherwise the caller would report a deferral of mail that another node is sending.
        """
        try:
            yield
        except (contract.ClaimLostError, MessageNotFoundError):
            raise
        except StoreError as error:
            if held not in self.held() or held.node in self._fenced or not held.partition.is_held():
                raise contract.ClaimLostError("another node may have this message now") from error
            raise

    def _elsewhere(self) -> PartitionsView:
        """Return a view of the partitions that this node does not hold."""
        return PartitionsView(list(self.others.values()))

    async def read_messages(self, ids: Sequence[MessageId]) -> dict[MessageId, Message]:
        found: dict[MessageId, Message] = {}
        for held in self.held():
            found |= await held.queue.read_messages([each for each in ids if each not in found])
        if missing := [each for each in ids if each not in found]:
            found |= await self._elsewhere().read_messages(missing)
        return found

    async def deliveries_of(self, message_id: MessageId, *, own: bool = False) -> list[Delivery]:
        found = [each for held in self.held() for each in await held.queue.deliveries_of(message_id)]
        if own:
            return found
        found += await self._elsewhere().deliveries_of(message_id)
        unique = {delivery.key: delivery for delivery in found}
        return sorted(unique.values(), key=lambda delivery: (delivery.recipient, delivery.queue))

    async def scan(
        self,
        queue: QueueName | None = None,
        *,
        wanted: Wanted = contract.everybody,
        after: DeliveryKey | None = None,
    ) -> AsyncGenerator[Delivery, None]:
        async for delivery in scanned(lambda start, end: self._page(start, end, wanted), queue, after):
            yield delivery

    async def _page(self, start: bytes, end: bytes, wanted: Wanted) -> DeliveryPage:
        """Merge one page of deliveries from each partition, up to the lowest key at which one of these pages
        ends.
        """
        nodes = dict.fromkeys([*(held.node for held in self.held()), *self.others])
        pages = await gathered(self._page_of(node, start, end, wanted) for node in nodes)
        low = min((page.low for page in pages if page.low is not None), default=None)
        found = {records.delivery_key(each.key): each for page in pages for each in page.deliveries}
        return DeliveryPage([found[key] for key in sorted(found) if low is None or key < low], low, [])

    async def _page_of(self, node: int, start: bytes, end: bytes, wanted: Wanted) -> DeliveryPage:
        """Return a page of deliveries from one partition, even if this node adopts, drops or loses it during
        the read.
        """
        while True:
            reads = self.reads_of(node)
            try:
                return await reads.scan_page(start, end, wanted)
            except StoreError:
                if reads.keys is self.reads_of(node).keys:
                    raise

    # --- the whole queue

    def counts(self) -> dict[QueueName, QueueCounts]:
        """Count the deliveries in the partitions that this node holds. The sum over all nodes is the
        queue.
        """
        total: dict[QueueName, QueueCounts] = {}
        for held in self.held():
            for queue, counts in held.queue.counts().items():
                total.setdefault(queue, QueueCounts()).add(counts)
        return total

    def waiting(self, queue: QueueName) -> int:
        return sum(held.queue.waiting(queue) for held in self.held())

    def is_counted(self) -> bool:
        return all(held.queue.is_counted() for held in self.held())

    async def oldest(self, queue: QueueName, *, now: float) -> float | None:
        found = [at for held in self.held() if (at := await held.queue.oldest(queue, now=now)) is not None]
        return min(found, default=None)

    async def queues(self) -> set[QueueName]:
        return {queue for held in self.held() for queue in await held.queue.queues()}

    async def left_over(self) -> str:
        return contract.SHARED

    async def kept_keys(self, cursor: str = "") -> tuple[contract.KeptKeys, str]:
        return await self._own.queue.kept_keys(cursor)

    async def keep_keys(self, keys: contract.KeptKeys) -> None:
        await self._own.queue.keep_keys(keys)
        await self._register.take_over(keys)

    def unhealthy(self) -> contract.Unhealthy | None:
        return self._own.queue.unhealthy()

    def problems(self) -> Sequence[str]:
        return list(dict.fromkeys(problem for held in self.held() for problem in held.queue.problems()))

    async def usable(self) -> bool:
        was_replaced = False
        while True:
            own = self._own
            waiting = asyncio.ensure_future(own.queue.usable())
            replaced = asyncio.ensure_future(self._replaced.wait())
            try:
                await asyncio.wait({waiting, replaced}, return_when=asyncio.FIRST_COMPLETED)
                if own is self._own:
                    return waiting.result() or was_replaced
            finally:
                waiting.cancel()
                replaced.cancel()
            was_replaced = True

    async def probe(self) -> None:
        await self._own.queue.probe()


class _RequestedState(msgspec.Struct, array_like=True):
    """The current and the desired state of a delivery, each as a key and a value. The desired state is empty
    if the delivery is to be removed.
    """

    key: bytes
    present: bytes
    new_key: bytes
    new: bytes


class Requests:
    """The requests that live nodes send each other to change deliveries that another node owns, and their
    answers.

    A partition has one writer. So a node that needs to change another node's deliveries writes a request to
    its own partition: `request PARTITION ID`, with the current and the new state of each delivery. The owner
    of the partition reads these rows of the other nodes and changes the deliveries that are still in that
    state and are not being attempted. Then it writes `answer CLIENT ID` to the partition, with a list of the
    changed ones. The requesting node reads the answer and removes its request, and the owner then removes its
    answer.

    Promise: a request is carried out at most once, because a delivery that has changed is left alone. An
    owner that does not answer within `PATIENCE` is assumed to have left everything alone.
    """

    def __init__(self, store: NodeStore) -> None:
        self._store = store
        self._around = store.around

    # --- requests

    async def ask(self, keys: Collection[DeliveryKey], change: ChangeOne) -> Found:
        """Send requests to change deliveries that other nodes own. Return the changed ones in their former
        state, and those that need no change. Raises StoreError.
        """
        asked = [self._ask_one(node, reads, keys, change) for node, reads in self._store.others.items()]
        return {key: old for found in await asyncio.gather(*asked) for key, old in found.items()}

    async def _ask_one(
        self, node: int, reads: QueueReads, keys: Collection[DeliveryKey], change: ChangeOne
    ) -> Found:
        present = {delivery.key: delivery for delivery in await reads.deliveries(list(keys))}
        new = {key: change(old) for key, old in present.items()}
        found = {key: old for key, old in present.items() if new[key] == old}
        for batch in in_batches(key for key in present if key not in found):
            wanted = [_wanted(present[key], new[key]) for key in batch]
            found |= {batch[at]: present[batch[at]] for at in await self._send(node, reads, wanted)}
        return found

    async def _send(self, node: int, reads: QueueReads, wanted: list[_RequestedState]) -> list[int]:
        """Send a request to one node, and return the indexes of the deliveries that it has changed."""
        own = self._store.held()[0]
        name = uuid4().hex.encode()
        request = b"%b%02x %b" % (REQUESTS, node, name)
        answer = b"%b%02x %b" % (ANSWERS, own.node, name)
        await own.partition.write(Write({request: msgspec.msgpack.encode(wanted)}, makes_room=True))
        try:
            until = self._around.clock.monotonic() + PATIENCE
            while self._around.clock.monotonic() < until:
                await asyncio.sleep(LOOK_AGAIN)
                (found,) = await reads.keys.get([answer])
                if found is not None:
                    return msgspec.msgpack.decode(found, type=list[int])
            return []
        finally:
            await own.partition.write(Write({request: None}, makes_room=True))

    # --- answers

    async def answer(self) -> None:
        """Carry out the requests that other nodes have sent to this one. Raises StoreError."""
        for own in self._store.held():
            for node, reads in self._store.others.items():
                await self._answer(own, node, reads)

    async def _answer(self, own: OwnedPartition, node: int, reads: QueueReads) -> None:
        partition = own.partition
        asked, answers = b"%b%02x " % (REQUESTS, own.node), b"%b%02x " % (ANSWERS, node)
        found = (await reads.keys.page(asked, records.after(asked))).rows
        requests = {key.rpartition(b" ")[2]: value for key, value in found}
        answered = (await partition.page(answers, records.after(answers))).rows
        given = {key.rpartition(b" ")[2] for key, _ in answered}
        if over := given - requests.keys():
            gone: dict[bytes, bytes | None] = {answers + name: None for name in over}
            await partition.write(Write(gone, makes_room=True))
        for name, value in requests.items():
            if name not in given:
                done = await self._carry_out(msgspec.msgpack.decode(value, type=list[_RequestedState]))
                row: dict[bytes, bytes | None] = {answers + name: msgspec.msgpack.encode(done)}
                await partition.write(Write(row, makes_room=True))

    async def _carry_out(self, wanted: list[_RequestedState]) -> list[int]:
        """Carry out one request in a single durable write. A request never exceeds the size limit of a write.
        Return which deliveries were changed.
        """
        by_key = {records.decode_delivery(each.key, each.present).key: each for each in wanted}
        withdraw = self._around.withdraw
        free = self._store.unclaimed(by_key) if withdraw is None else withdraw(by_key.keys())

        def is_meant(delivery: Delivery) -> bool:
            return records.encode_delivery(delivery) == by_key[delivery.key].present

        def change(delivery: Delivery) -> Delivery | None:
            if not is_meant(delivery):
                return delivery
            asked = by_key[delivery.key]
            return records.decode_delivery(asked.new_key, asked.new) if asked.new_key else None

        try:
            found = await self._store.update_held(free, change)
        finally:
            self._around.give_back(free)
        return [at for at, key in enumerate(by_key) if key in found and is_meant(found[key])]


def _wanted(old: Delivery, new: Delivery | None) -> _RequestedState:
    key, row = records.delivery_key(old.key), records.encode_delivery(old)
    if new is None:
        return _RequestedState(key, row, b"", b"")
    return _RequestedState(key, row, records.delivery_key(new.key), records.encode_delivery(new))


class _ReservedId(msgspec.Struct, array_like=True):
    """A reserved idempotency key, as stored in the engine: the node that reserved it, and the message."""

    node: int
    message_id: MessageId
    digest: str
    until: float


class NodeRegister:
    """Reserves idempotency keys in the engine for one node, before messages are stored. Implements
    `KeyRegister`.

    The partitions are authoritative: the key becomes durable in the batch of its message (`StoredKey`). The
    engine's reservation names the node that has stored, or is about to store, a message with the key, so that
    no second node does. It expires with the key.

    On failure: a node that dies between reservation and batch leaves a reservation without a message. Other
    nodes take it over once the lease of the node's partition has ended or the partition is adopted, because
    no batch of that node can become durable then.
    """

    problem = ""

    def __init__(self, store: NodeStore) -> None:
        self._store = store
        self._engine = store.engine
        self._values: dict[str, bytes] = {}
        """The reservations of this node, including those of its earlier process that it has found."""

    @property
    def worker(self) -> int:
        return self._store.node

    def start(self, page: object, settle: object, keep: object) -> None:
        """Do nothing. The partition holds its keys, and reservations of an earlier process are found when
        their keys are used again.
        """

    async def reserve(
        self, once: contract.IdempotencyKey, message_id: MessageId, now: float
    ) -> contract.KeyReservation | None:
        key = once.identity.encode("ascii")
        node = self._store.node
        value = msgspec.msgpack.encode(_ReservedId(node, message_id, once.digest, once.until))
        while True:
            found = await self._engine.reserve(key, value, once.until)
            if found is None:
                self._values[once.identity] = value
                return None
            other = msgspec.msgpack.decode(found, type=_ReservedId)
            kept = await self._store.reads_of(other.node).kept(once.identity)
            if kept is not None and kept.message_id == other.message_id:
                return contract.KeyReservation(kept, other.node, is_pending=False)
            if other.node == node:
                self._values[once.identity] = found
            elif other.until <= now or await self._store.is_over(other.node):
                await self._engine.unreserve(key, found)
                continue
            return contract.KeyReservation(
                contract.StoredKey(other.message_id, other.digest, other.until), other.node, is_pending=True
            )

    async def take_over(self, keys: Collection[tuple[str, contract.StoredKey]]) -> None:
        """Reserve keys that were imported with a queue, so that all nodes know them."""
        for identity, kept in keys:
            value = _ReservedId(self._store.node, kept.message_id, kept.digest, kept.until)
            await self._engine.reserve(identity.encode("ascii"), msgspec.msgpack.encode(value), kept.until)

    async def settle(self, identity: str, message_id: MessageId, is_kept: bool) -> None:
        value = self._values.pop(identity, None)
        if value is not None and not is_kept:
            await self._engine.unreserve(identity.encode("ascii"), value)

    async def forget(self, now: float, most: int) -> None:
        """Do nothing, because the engine removes expired reservations."""

    async def close(self) -> None:
        """Do nothing, because the owner of the engine closes it."""
