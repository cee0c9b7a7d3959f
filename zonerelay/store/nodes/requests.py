"""Changes of the mail of other living nodes: each is a request that its owner carries out.

A partition has one writer, so a node that wants another node's deliveries changed writes the request into its
own partition: `request OWNER ID`, with the present and the wanted state of each delivery. The owner reads
such rows of the others, changes the deliveries that are still in that state and that no attempt has in hand,
and writes `answer ASKER ID` into its partition, which says which ones it has changed. The asker reads the
answer and removes its request, and the owner then removes its answer.

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
from zonerelay.store.common.write.batches import ChangeOne, in_batches
from zonerelay.store.keys.partition import Partition
from zonerelay.store.keys.port import KeyRange, Write
from zonerelay.store.queue.reads import QueueReads
from zonerelay.store.surroundings import Surroundings

REQUESTS, ANSWERS = records.REQUEST_PREFIX, records.ANSWER_PREFIX
PATIENCE = 30.0
LOOK_AGAIN = 0.25

Found = dict[DeliveryKey, Delivery]
Update = Callable[[Collection[DeliveryKey], ChangeOne], Awaitable[Found]]


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

    async def ask(self, keys: Collection[DeliveryKey], change: ChangeOne) -> Found:
        """Have deliveries of other nodes changed. Returns those that were, as they were before, and those
        that need no change. Raises StoreError.
        """
        asked = [self._ask_one(node, reads, keys, change) for node, reads in list(self._others.items())]
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

    async def _send(self, node: int, reads: QueueReads, wanted: list[_Wanted]) -> list[int]:
        """Returns which of them the owner has changed."""
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
                    return msgspec.msgpack.decode(found, type=list[int])
            return []
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
                    done = await self._carry_out(msgspec.msgpack.decode(value, type=list[_Wanted]))
                    row: dict[bytes, bytes | None] = {answers.start + name: msgspec.msgpack.encode(done)}
                    await partition.write(Write(row, makes_room=True))

    async def _carry_out(self, wanted: list[_Wanted]) -> list[int]:
        """One durable write, as a request is no larger than that. Returns which were changed."""
        by_key = {records.decode_delivery(each.key, each.present).key: each for each in wanted}
        withdraw = self._around.withdraw
        free = self._unclaimed(by_key.keys()) if withdraw is None else withdraw(by_key.keys())

        def is_meant(delivery: Delivery) -> bool:
            return records.encode_delivery(delivery) == by_key[delivery.key].present

        def change(delivery: Delivery) -> Delivery | None:
            if not is_meant(delivery):
                return delivery
            asked = by_key[delivery.key]
            return records.decode_delivery(asked.new_key, asked.new) if asked.new_key else None

        try:
            found = await self._update(free, change)
        finally:
            self._around.give_back(free)
        return [at for at, key in enumerate(by_key) if key in found and is_meant(found[key])]


def _wanted(old: Delivery, new: Delivery | None) -> _Wanted:
    key, row = records.delivery_key(old.key), records.encode_delivery(old)
    if new is None:
        return _Wanted(key, row, b"", b"")
    return _Wanted(key, row, records.delivery_key(new.key), records.encode_delivery(new))
