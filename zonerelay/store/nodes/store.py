"""Implements the store of a node that shares its queue with others: its own partition, and adopted ones.

A **node** is one process with one partition of the engine. Mail that it accepts is in its partition, and only
this node delivers it. When a node has left, or its lease has ended, another node adopts the partition: it
becomes the writer and delivers from it in place until it is empty. So a delivery belongs to the node that
accepted it or to the node that has adopted its partition, and a claim is a mark in memory.

Each change is one batch of the partition that has the message; a call that concerns several partitions is
split. Operators see the mail of all nodes: lists read the partitions of the others, and a change of their
mail is a request to its owner (`requests`).

On failure: if another writer has the own partition, this node may have been stopped for longer than its
lease. Its claims there are reported to `on_lost`, reads of those messages raise ClaimLostError, outcomes
change nothing, and the node continues with another partition. A lost adopted partition is dropped in the same
way. While the engine is unreachable, `Partition` refuses writes, as in a store of one node.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Sequence,
)
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Self, TypeVar, Unpack
from uuid import uuid4

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Envelope, Message
from zonerelay.model.message_id import MAX_WORKERS, MessageId
from zonerelay.model.queue_name import QueueName
from zonerelay.process.tasks import Tasks, completed
from zonerelay.process.threads import STORE
from zonerelay.store.common import records
from zonerelay.store.common.body import BodyWriter
from zonerelay.store.common.write.batches import ChangeOne
from zonerelay.store.context import StoreContext
from zonerelay.store.contract import (
    SHARED,
    Change,
    ClaimFilter,
    ClaimLostError,
    KeptKeys,
    MessageNotFoundError,
    OwnMessage,
    QueueCounts,
    StoreError,
    StoreOpenError,
    Unhealthy,
    Wanted,
    everybody,
)
from zonerelay.store.keys.partition import Hooks, Partition, open_partition
from zonerelay.store.keys.port import FencedError, Keeper, KeyRange, NodeTakenError, SharedEngine
from zonerelay.store.keys.seen_file import SeenFile
from zonerelay.store.leveldb.reads import QueueReads
from zonerelay.store.leveldb.store import LevelDbStore
from zonerelay.store.nodes.key_register import NodeRegister
from zonerelay.store.nodes.requests import ANSWERS, REQUESTS, Requests
from zonerelay.store.queue.queue import open_queue

MOST_ADOPTED = 10_000
"""The number of claimed messages of adopted partitions that are remembered before settled ones are
dropped.
"""
PAUSE = 1.0

T = TypeVar("T")

Wait = Callable[[float], Awaitable[object]]

_log = logging.getLogger("zonerelay.store")


@dataclass(slots=True, eq=False)
class OwnedPartition:
    """A partition that this process writes, with its queue."""

    node: int
    partition: Partition
    queue: LevelDbStore


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
        self._adopted: dict[MessageId, OwnedPartition] = {}
        self._lost: dict[MessageId, set[DeliveryKey]] = {}
        self._stored_reports: set[MessageId] = set()
        self._others: dict[int, QueueReads] = {}
        """The reads of the other nodes' partitions."""
        self._keepers: dict[int, Keeper] = {}
        """The keepers that these read from."""
        self._tasks = Tasks()
        self._fenced: set[int] = set()
        self._is_fenced = asyncio.Event()
        self._replaced = asyncio.Event()
        self._requests = Requests(
            self._update_held,
            self.around,
            lambda: [(held.node, held.partition) for held in self._held()],
            lambda keys: {key for key in keys if not any(held.queue.has_claim(key) for held in self._held())},
            self._others,
        )
        self._register = NodeRegister(self.engine, lambda: self.node, self._reads_of, self._is_over)
        self._over: set[int] = set()

    # --- opening

    async def opened(self) -> Self:
        """Acquire a partition. Raises StoreOpenError and StoreError, in which case nothing is left open."""
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
        """Become the writer of the preferred partition, of one that this machine has used, of one whose lease
        has ended, or of a new one. Raises StoreError.
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
        raise StoreOpenError(f"all {MAX_WORKERS} partitions of the queue are in use") from refusal

    def _known_nodes(self) -> list[int]:
        """Return the numbers of earlier nodes of this machine, most recently used first."""
        found = self.directory.glob("*.seen") if self.directory.is_dir() else ()
        files = sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)
        return [int(path.stem) for path in files if path.stem.isdigit()]

    async def _enter(self, node: int, *, is_own: bool) -> OwnedPartition:
        """Become the writer of a partition and open its queue. Raises NodeTakenError and StoreError."""
        # With the token the next process of this machine recognizes the partitions that this one has adopted.
        token = uuid4().hex if is_own else self._own.partition.writer
        seen = await STORE.open(SeenFile, self.directory / f"{node}.seen", token) if is_own else None
        partition: Partition | None = None

        def on_stored(deliveries: Sequence[Delivery], is_next: bool) -> int:
            # Claims record the partition of what they return, if it is an adopted one.
            may_take = is_own and partition is not None and partition.is_held()
            return self.around.on_stored(deliveries, is_next and may_take)

        around = replace(self.around, register=self._register, on_stored=on_stored)
        if not is_own:
            around = replace(around, on_health=lambda _: None)

        def on_error(hooks: Hooks, error: StoreError) -> None:
            hooks.on_failure(error)
            if isinstance(error, FencedError):
                self._fenced.add(node)
                self._is_fenced.set()

        async def opened(hooks: Hooks) -> Partition:
            nonlocal partition
            partition = await open_partition(
                self.engine,
                node,
                token=token,
                clock=self.around.clock,
                seen_file=seen,
                hooks=replace(hooks, on_failure=lambda error: on_error(hooks, error)),
            )
            try:
                for prefix in (REQUESTS, ANSWERS):  # left by an earlier process
                    await partition.clear(KeyRange.of_prefix(prefix))
            except BaseException:
                await partition.abandon()  # while its lease continues, nobody would deliver the mail
                raise
            return partition

        queue = await open_queue(opened, around, min_free_space=self.min_free_space)
        assert partition is not None
        return OwnedPartition(node, partition, queue)

    async def close(self) -> None:
        self._is_closed = True
        await self._tasks.cancel()
        for held in reversed(self._held()) if self._is_open else ():
            await held.queue.close()
        for node in list(self._others):
            await self._forget_reader(node)
        await self.engine.close()

    # --- the other nodes

    async def _watch(self) -> None:
        """Check the other nodes and carry out their requests."""
        while True:
            try:
                await self._look_at_peers()
                await self._requests.answer()
            except StoreError as error:
                _log.warning("the other nodes of the queue cannot be looked at: %s", error)
            except Exception:  # noqa: BLE001 - without this task mail of nodes that are gone is never sent
                _log.exception("the other nodes of the queue cannot be looked at")
            await self.wait(self.every)

    async def _look_at_peers(self) -> None:
        peers = await self.engine.peers()
        self._over = {peer.node for peer in peers if peer.is_over}
        held = {self._own.node, *self._adopted_partitions}
        # The writer of these is an earlier process of this machine that has died.
        for peer in peers:
            if peer.node in held:
                continue
            reads = await self._reads_of(peer.node)
            try:
                is_free = peer.is_over or peer.writer == self._own.partition.writer
                if is_free and await reads.queues():
                    await self._adopt(peer.node)
            except StoreError as error:  # a damaged partition must not stop other mail
                _log.warning("node %d of the queue is gone and cannot be adopted: %s", peer.node, error)
        for adopted in list(self._adopted_partitions.values()):
            if not adopted.queue.has_claims() and not await adopted.queue.queues():
                del self._adopted_partitions[adopted.node]
                await completed(adopted.queue.close())
                _log.info("node %d of the queue is empty and was left", adopted.node)

    async def _adopt(self, node: int) -> None:
        try:
            adopted = await self._enter(node, is_own=False)
        except NodeTakenError:
            return  # it is back, or another node was faster
        _log.warning("node %d of the queue is gone: its mail is delivered from here", node)
        self._adopted_partitions[node] = adopted
        await self._forget_reader(node)
        for queue in await adopted.queue.queues():
            self.around.on_news(queue)

    async def _reads_of(self, node: int) -> QueueReads:
        """Return the reads of any node's partition."""
        for held in self._held():
            if held.node == node:
                return QueueReads(held.partition)
        if node not in self._others:
            if self._is_closed:
                raise StoreError(Unhealthy.CLOSED)
            self._keepers[node] = keeper = self.engine.keeper(node)
            self._others[node] = QueueReads(keeper)
        return self._others[node]

    async def _forget_reader(self, node: int) -> None:
        reads = self._others.pop(node, None)
        if reads is not None:
            await completed(self._keepers.pop(node).close())

    def _is_over(self, node: int) -> bool:
        """Return whether no process of that node can still be about to store data."""
        return node in self._over or node in self._adopted_partitions

    async def _replace_lost(self) -> None:
        """Replace partitions that other writers have taken over."""
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
                    _log.exception("the partition that was lost could not be replaced")
                    self._fenced.add(node)
                    self._is_fenced.set()
                    await asyncio.sleep(PAUSE)

    async def _replace(self, lost: OwnedPartition) -> None:
        keys = lost.queue.claimed_keys()
        for key in keys:
            self._lost.setdefault(key.message_id, set()).add(key)
        self._adopted = {each: held for each, held in self._adopted.items() if held is not lost}
        _log.error("node %d of the queue has another writer: its lease had ended here", lost.node)
        with contextlib.suppress(StoreError):
            await completed(lost.queue.close())
        if lost is self._own:
            while True:
                try:
                    self._own = await self._take_partition()
                    await self._forget_reader(self.node)
                    break
                except StoreError as error:
                    _log.warning("no partition of the queue can be taken yet: %s", error)
                    await asyncio.sleep(PAUSE)
            self.around.on_health(self._own.queue.unhealthy())
            replaced, self._replaced = self._replaced, asyncio.Event()
            replaced.set()
        self.around.on_lost(keys)
        for queue in await self._own.queue.queues():
            self.around.on_news(queue)

    # --- choosing the partition

    def _held(self) -> list[OwnedPartition]:
        """Return the own partition first. The result is a list, because partitions are adopted and dropped
        while a caller waits.
        """
        return [self._own, *self._adopted_partitions.values()]

    async def _holder(self, key: DeliveryKey) -> OwnedPartition:
        """Return the partition in which the delivery is claimed or else stored. Deliveries that an operator
        bounces are not claimed.
        """
        for held in self._held():
            if held.queue.has_claim(key):
                return held
        for held in self._held()[1:]:
            if key in {each.key for each in await held.queue.deliveries_of(key.message_id)}:
                return held
        return self._own

    def _is_lost(self, key: DeliveryKey) -> bool:
        return key in self._lost.get(key.message_id, ())

    def _found_lost(self, keys: Iterable[DeliveryKey]) -> None:
        """Forget lost claims that the caller has released."""
        for key in keys:
            if lost := self._lost.get(key.message_id):
                lost.discard(key)
                if not lost:
                    del self._lost[key.message_id]

    async def _holder_of(self, message_id: MessageId) -> OwnedPartition:
        """Return the partition that has the message. Raises ClaimLostError."""
        if message_id in self._lost:
            raise ClaimLostError("the message is now owned by another node")
        if not self._adopted_partitions:
            return self._own
        if (known := self._adopted.get(message_id)) is not None:
            return known
        for held in self._held():
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
        self, queue: QueueName, limit: int, *, now: float, **only: Unpack[ClaimFilter]
    ) -> list[Delivery]:
        """Claim from all partitions with a valid lease, in turns, and new mail from the own one, because only
        that receives it. Raises ClaimLostError if the lease of the own partition has ended, because claimed
        deliveries could not be sent.
        """
        self._own.partition.check()
        if not self._adopted_partitions or only.get("since") is not None:
            return await self._own.queue.claim(queue, limit, now=now, **only)
        all_held = self._held()
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
        if len(self._adopted) > MOST_ADOPTED:
            claimed_ids = {
                key.message_id
                for each in self._adopted_partitions.values()
                for key in each.queue.claimed_keys()
            }
            self._adopted = {each: held for each, held in self._adopted.items() if each in claimed_ids}
        return sorted(found, key=lambda delivery: delivery.message_id)

    def release(self, keys: Collection[DeliveryKey]) -> None:
        if self._lost:
            self._found_lost(keys)
        for held in self._held():
            held.queue.release(keys)

    async def next_due(self, queue: QueueName) -> float | None:
        found = [due for held in self._held() if (due := await held.queue.next_due(queue)) is not None]
        return min(found, default=None)

    def check_claim(self, message_id: MessageId) -> None:
        if message_id in self._lost:
            raise ClaimLostError("the message is now owned by another node")
        self._adopted.get(message_id, self._own).partition.check()

    # --- settling

    async def settle(self, changes: Sequence[Change], *, lazy: bool = False) -> None:
        if not self._adopted_partitions and not self._lost and not self._stored_reports:
            await self._own.queue.settle(changes, lazy=lazy)
            return
        parts: dict[OwnedPartition, list[Change]] = {}
        lost: list[DeliveryKey] = []
        for change in changes:
            if isinstance(change, OwnMessage):
                if change.message.id in self._stored_reports:
                    continue
                about = [key for key in change.about if not self._is_lost(key)]
                if change.about and not about:
                    continue  # the node that has the deliveries now sends its own bounce
                holder = await self._holder(about[0]) if about else self._own
            elif self._is_lost(change.delivery.key):
                lost.append(change.delivery.key)
                continue
            else:
                holder = await self._holder(change.delivery.key)
            parts.setdefault(holder, []).append(change)
        self._found_lost(lost)
        results = await asyncio.gather(
            *(held.queue.settle(part, lazy=lazy) for held, part in parts.items()), return_exceptions=True
        )
        failed = [result for result in results if isinstance(result, BaseException)]
        for part, result in zip(parts.values(), results, strict=True):
            # If a call has failed in part, the caller repeats all of it. A bounce must not be stored twice.
            ids = {change.message.id for change in part if isinstance(change, OwnMessage)}
            if failed and result is None:
                self._stored_reports |= ids
        if failed:
            raise failed[0]
        self._stored_reports -= {change.message.id for change in changes if isinstance(change, OwnMessage)}

    async def update(self, keys: Collection[DeliveryKey], change: ChangeOne) -> dict[DeliveryKey, Delivery]:
        found = await self._update_held(keys, change)
        if remaining := [key for key in keys if key not in found]:
            found |= await self._requests.ask(remaining, change)
        return found

    async def _update_held(
        self, keys: Collection[DeliveryKey], change: ChangeOne
    ) -> dict[DeliveryKey, Delivery]:
        """Change deliveries in the partitions that this node holds."""
        found: dict[DeliveryKey, Delivery] = {}
        for held in self._held():
            if remaining := [key for key in keys if key not in found]:
                found |= await held.queue.update(remaining, change)
        return found

    # --- reading

    async def read_message(self, message_id: MessageId) -> Message:
        held = await self._holder_of(message_id)
        held.partition.check()
        with contextlib.suppress(MessageNotFoundError), self._reading(held):
            return await held.queue.read_message(message_id)
        return (await self._elsewhere(message_id))[1]

    async def read_body(self, message_id: MessageId) -> AsyncIterator[bytes]:
        held = await self._holder_of(message_id)
        held.partition.check()
        found = held.queue.read_body(message_id)
        try:
            with self._reading(held):
                first = await anext(found, None)
        except MessageNotFoundError:
            reads, message = await self._elsewhere(message_id)
            async for chunk in reads.body(message):
                yield chunk
            return
        async with (
            contextlib.aclosing(found) if isinstance(found, AsyncGenerator) else contextlib.nullcontext()
        ):
            piece = first
            while piece is not None:
                yield piece
                with self._reading(held):
                    piece = await anext(found, None)

    @contextlib.contextmanager
    def _reading(self, held: OwnedPartition) -> Iterator[None]:
        """Raise ClaimLostError if a read failed because another writer has taken over the partition. The
        caller would report a deferral of mail that another node is sending.
        """
        try:
            yield
        except (ClaimLostError, MessageNotFoundError):
            raise
        except StoreError as error:
            if held not in self._held() or held.node in self._fenced or not held.partition.is_held():
                raise ClaimLostError("another node may have this message now") from error
            raise

    async def _elsewhere(self, message_id: MessageId) -> tuple[QueueReads, Message]:
        """Find a message in another node's partition. Raises MessageNotFoundError."""

        async def found(reads: QueueReads) -> tuple[QueueReads, Message] | None:
            with contextlib.suppress(MessageNotFoundError):
                return reads, (await reads.message(message_id))[0]
            return None

        async for each in self._asked(found):
            if each is not None:
                return each
        raise MessageNotFoundError(f"message {message_id} does not exist")

    async def _asked(self, ask: Callable[[QueueReads], Awaitable[T]]) -> AsyncIterator[T]:
        """Call `ask` with the reads of each other node's partition. Repeat it if the partition is adopted or
        taken during the call.
        """
        for node in list(self._others):
            while True:
                reads = await self._reads_of(node)
                is_theirs = node in self._others
                try:
                    answer = await ask(reads)
                except StoreError:
                    if not is_theirs or self._others.get(node) is reads:
                        raise
                else:
                    break
            yield answer

    async def read_messages(self, ids: Sequence[MessageId]) -> dict[MessageId, Message]:
        found: dict[MessageId, Message] = {}
        for held in self._held():
            found |= await held.queue.read_messages([each for each in ids if each not in found])
        if missing := [each for each in ids if each not in found]:
            async for some in self._asked(lambda reads: reads.messages(missing)):
                found |= some
        return found

    async def deliveries_of(self, message_id: MessageId, *, own: bool = False) -> list[Delivery]:
        found = [each for held in self._held() for each in await held.queue.deliveries_of(message_id)]
        if own:
            return found
        async for some in self._asked(lambda reads: reads.deliveries_of(message_id)):
            found += some
        unique = {delivery.key: delivery for delivery in found}
        return sorted(unique.values(), key=lambda delivery: (delivery.recipient, delivery.queue))

    async def scan(
        self, queue: QueueName | None = None, *, wanted: Wanted = everybody, after: DeliveryKey | None = None
    ) -> AsyncIterator[Delivery]:
        nodes = dict.fromkeys([*(held.node for held in self._held()), *self._others])
        walks = [self._walk(node, queue, wanted, after) for node in nodes]
        heads: list[tuple[bytes, int, Delivery]] = []
        try:
            for number, walk in enumerate(walks):
                async for delivery in walk:
                    heapq.heappush(heads, (records.delivery_key(delivery.key), number, delivery))
                    break
            while heads:
                _, number, delivery = heads[0]
                yield delivery
                following = await anext(walks[number], None)
                if following is None:
                    heapq.heappop(heads)
                else:
                    heapq.heapreplace(heads, (records.delivery_key(following.key), number, following))
        finally:
            for walk in walks:
                await walk.aclose()

    async def _walk(
        self, node: int, queue: QueueName | None, wanted: Wanted, after: DeliveryKey | None
    ) -> AsyncGenerator[Delivery, None]:
        """Yield the deliveries of one partition, which may be adopted, dropped or lost during the scan."""
        while True:
            reads = await self._lists_of(node)
            walk = reads.scan(queue, wanted=wanted, after=after)
            try:
                async for delivery in walk:
                    after = delivery.key
                    yield delivery
                return
            except StoreError:
                if reads is await self._lists_of(node):
                    raise
            finally:
                if isinstance(walk, AsyncGenerator):
                    await walk.aclose()

    async def _lists_of(self, node: int) -> LevelDbStore | QueueReads:
        """Return the object that lists the deliveries of a partition at present."""
        for held in self._held():
            if held.node == node:
                return held.queue
        return await self._reads_of(node)

    # --- the whole queue

    def counts(self) -> dict[QueueName, QueueCounts]:
        """Count the mail that this node delivers. The sum over all nodes is the queue."""
        total: dict[QueueName, QueueCounts] = {}
        for held in self._held():
            for queue, counts in held.queue.counts().items():
                total.setdefault(queue, QueueCounts()).add(counts)
        return total

    def waiting(self, queue: QueueName) -> int:
        return sum(held.queue.waiting(queue) for held in self._held())

    def is_counted(self) -> bool:
        return all(held.queue.is_counted() for held in self._held())

    async def oldest(self, queue: QueueName, *, now: float) -> float | None:
        found = [at for held in self._held() if (at := await held.queue.oldest(queue, now=now)) is not None]
        return min(found, default=None)

    async def queues(self) -> set[QueueName]:
        return {queue for held in self._held() for queue in await held.queue.queues()}

    async def left_over(self) -> str:
        return SHARED

    async def kept_keys(self, cursor: str = "") -> tuple[KeptKeys, str]:
        return await self._own.queue.kept_keys(cursor)

    async def keep_keys(self, keys: KeptKeys) -> None:
        await self._own.queue.keep_keys(keys)
        await self._register.take_over(keys)

    def unhealthy(self) -> Unhealthy | None:
        return self._own.queue.unhealthy()

    def problems(self) -> Sequence[str]:
        return list(dict.fromkeys(problem for held in self._held() for problem in held.queue.problems()))

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
