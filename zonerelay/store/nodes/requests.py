"""Changes of the mail of other living nodes: each is a request that its owner carries out.

A partition has one writer, so a node that wants another node's deliveries changed writes the request into its
own partition: `request OWNER ID`, with the present and the wanted state of each delivery. The owner reads
such rows of the others, changes the deliveries that are still in that state and that no attempt has in hand,
and writes `answer ASKER ID` into its partition, with the number that was changed. The asker reads the answer
and removes its request, and the owner then removes its answer.

Promise: a request is carried out at most once, for a delivery that has changed meanwhile is left alone. An
owner that does not answer within `PATIENCE` counts as one that has left everything alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from uuid import uuid4

import msgspec

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.store.common import records
from zonerelay.store.contract import StoreError
from zonerelay.store.keys.partition import Partition
from zonerelay.store.keys.port import KeyRange, Write
from zonerelay.store.queue.reads import QueueReads
from zonerelay.store.surroundings import Surroundings

REQUESTS, ANSWERS = records.REQUEST_PREFIX, records.ANSWER_PREFIX
PATIENCE = 30.0
LOOK_AGAIN = 0.25
MOST = 500
"""Deliveries in one request."""

ChangeOne = Callable[[Delivery], Delivery | None]
Update = Callable[[Collection[DeliveryKey], ChangeOne], Awaitable[tuple[int, set[DeliveryKey]]]]


class _Wanted(msgspec.Struct, array_like=True):
    """A delivery as it is and as it shall be, as rows; the second is empty when it shall be removed."""

    key: bytes
    present: bytes
    new_key: bytes
    new: bytes


class Requests:
    """The requests and answers of one node. `update` changes what this node holds; `own` is its partition,
    and `others` are the reads of the other nodes.
    """

    def __init__(
        self,
        update: Update,
        around: Surroundings,
        own: Callable[[], tuple[int, Partition]],
        unclaimed: Callable[[Collection[DeliveryKey]], set[DeliveryKey]],
        others: Mapping[int, QueueReads],
    ) -> None:
        self._update = update
        self._around = around
        self._own = own
        self._unclaimed = unclaimed
        self._others = others

    # --- asking

    async def ask(self, keys: Collection[DeliveryKey], change: ChangeOne) -> int:
        """Have deliveries of other nodes changed. Returns the number that was. Raises StoreError."""
        asked = [self._ask_one(node, reads, keys, change) for node, reads in list(self._others.items())]
        return sum(await asyncio.gather(*asked))

    async def _ask_one(
        self, node: int, reads: QueueReads, keys: Collection[DeliveryKey], change: ChangeOne
    ) -> int:
        wanted = []
        for delivery in await reads.deliveries(list(keys)):
            new = change(delivery)
            key, row = records.delivery_key(delivery.key), records.encode_delivery(delivery)
            wanted.append(
                _Wanted(key, row, b"", b"")
                if new is None
                else _Wanted(key, row, records.delivery_key(new.key), records.encode_delivery(new))
            )
        count = 0
        for first in range(0, len(wanted), MOST):
            count += await self._send(node, reads, wanted[first : first + MOST])
        return count

    async def _send(self, node: int, reads: QueueReads, wanted: list[_Wanted]) -> int:
        own, partition = self._own()
        name = uuid4().hex.encode()
        request = b"%b%02x %b" % (REQUESTS, node, name)
        answer = b"%b%02x %b" % (ANSWERS, own, name)
        await partition.write(Write({request: msgspec.msgpack.encode(wanted)}, makes_room=True))
        try:
            until = self._around.clock.monotonic() + PATIENCE
            while self._around.clock.monotonic() < until:
                await asyncio.sleep(LOOK_AGAIN)
                (found,) = await reads.keys.get([answer])
                if found is not None:
                    return int(found)
            return 0
        finally:
            await partition.write(Write({request: None}, makes_room=True))

    # --- answering

    async def answer(self) -> None:
        """Carry out what other nodes ask of this one. Raises StoreError."""
        own, partition = self._own()
        for node, reads in list(self._others.items()):
            asked = KeyRange.of_prefix(b"%b%02x " % (REQUESTS, own))
            answers = KeyRange.of_prefix(b"%b%02x " % (ANSWERS, node))
            requests = {key.rpartition(b" ")[2]: value for key, value in (await reads.keys.page(*asked)).rows}
            given = {key.rpartition(b" ")[2] for key, _ in (await partition.page(*answers)).rows}
            if over := given - requests.keys():
                gone: dict[bytes, bytes | None] = {answers.start + name: None for name in over}
                await partition.write(Write(gone, makes_room=True))
            for name, value in requests.items():
                if name not in given:
                    count = await self._carry_out(msgspec.msgpack.decode(value, type=list[_Wanted]))
                    row: dict[bytes, bytes | None] = {answers.start + name: b"%d" % count}
                    await partition.write(Write(row, makes_room=True))

    async def _carry_out(self, wanted: list[_Wanted]) -> int:
        by_key = {records.decode_delivery(each.key, each.present).key: each for each in wanted}
        withdraw = self._around.withdraw
        free = self._unclaimed(by_key.keys()) if withdraw is None else withdraw(by_key.keys())
        count = 0

        def change(delivery: Delivery) -> Delivery | None:
            nonlocal count
            asked = by_key[delivery.key]
            if records.encode_delivery(delivery) != asked.present:
                return delivery
            count += 1
            return records.decode_delivery(asked.new_key, asked.new) if asked.new_key else None

        try:
            await self._update(free, change)
        except StoreError:
            count = 0
            raise
        finally:
            self._around.give_back(free)
        return count
