"""Changes mail that other live nodes own, by sending them requests.

A partition has one writer. So a node that needs to change another node's deliveries writes a request to its
own partition: `request PARTITION ID`, with the current and the new state of each delivery. The owner of the
partition reads these rows of the other nodes and changes the deliveries that are still in that state and are
not being attempted. Then it writes `answer CLIENT ID` to the partition, with a list of the changed ones. The
requesting node reads the answer and removes its request, and the owner then removes its answer.

Promise: a request is carried out at most once, because a delivery that has changed is left alone. An owner
that does not answer within `PATIENCE` is assumed to have left everything alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from uuid import uuid4

import msgspec

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.store.common import records
from zonerelay.store.common.write.batches import ChangeOne, in_batches
from zonerelay.store.context import StoreContext
from zonerelay.store.keys.partition import Partition
from zonerelay.store.keys.port import KeyRange, Write
from zonerelay.store.leveldb.reads import QueueReads

REQUESTS, ANSWERS = records.REQUEST_PREFIX, records.ANSWER_PREFIX
PATIENCE = 30.0
LOOK_AGAIN = 0.25

Found = dict[DeliveryKey, Delivery]
Update = Callable[[Collection[DeliveryKey], ChangeOne], Awaitable[Found]]


class _RequestedState(msgspec.Struct, array_like=True):
    """The current and the desired state of a delivery, as rows. The second is empty if the delivery is to be
    removed.
    """

    key: bytes
    present: bytes
    new_key: bytes
    new: bytes


@dataclass(frozen=True, slots=True)
class Requests:
    """Sends and answers the requests between nodes. `update` changes the deliveries of this node, `held`
    returns its own and then its adopted partitions, and `others` are the reads of the other nodes.
    """

    update: Update
    around: StoreContext
    held: Callable[[], Sequence[tuple[int, Partition]]]
    unclaimed: Callable[[Collection[DeliveryKey]], set[DeliveryKey]]
    others: Mapping[int, QueueReads]

    # --- requests

    async def ask(self, keys: Collection[DeliveryKey], change: ChangeOne) -> Found:
        """Request changes of other nodes' deliveries. Return the changed ones in their former state, and
        those that need no change. Raises StoreError.
        """
        asked = [self._ask_one(node, reads, keys, change) for node, reads in list(self.others.items())]
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
        """Send a request, and return which of the deliveries its owner has changed."""
        own, partition = self.held()[0]
        name = uuid4().hex.encode()
        request = b"%b%02x %b" % (REQUESTS, node, name)
        answer = b"%b%02x %b" % (ANSWERS, own, name)
        await partition.write(Write({request: msgspec.msgpack.encode(wanted)}, makes_room=True))
        try:
            until = self.around.clock.monotonic() + PATIENCE
            while self.around.clock.monotonic() < until:
                await asyncio.sleep(LOOK_AGAIN)
                (found,) = await reads.keys.get([answer])
                if found is not None:
                    return msgspec.msgpack.decode(found, type=list[int])
            return []
        finally:
            await partition.write(Write({request: None}, makes_room=True))

    # --- answers

    async def answer(self) -> None:
        """Carry out the requests that other nodes have sent to this one. Raises StoreError."""
        for own, partition in self.held():
            for node, reads in list(self.others.items()):
                await self._answer(own, partition, node, reads)

    async def _answer(self, own: int, partition: Partition, node: int, reads: QueueReads) -> None:
        asked = KeyRange.of_prefix(b"%b%02x " % (REQUESTS, own))
        answers = KeyRange.of_prefix(b"%b%02x " % (ANSWERS, node))
        requests = {key.rpartition(b" ")[2]: value for key, value in (await reads.keys.page(*asked)).rows}
        given = {key.rpartition(b" ")[2] for key, _ in (await partition.page(*answers)).rows}
        if over := given - requests.keys():
            gone: dict[bytes, bytes | None] = {answers.start + name: None for name in over}
            await partition.write(Write(gone, makes_room=True))
        for name, value in requests.items():
            if name not in given:
                done = await self._carry_out(msgspec.msgpack.decode(value, type=list[_RequestedState]))
                row: dict[bytes, bytes | None] = {answers.start + name: msgspec.msgpack.encode(done)}
                await partition.write(Write(row, makes_room=True))

    async def _carry_out(self, wanted: list[_RequestedState]) -> list[int]:
        """Carry out a request in one durable write, whose limit no request exceeds. Return which deliveries
        were changed.
        """
        by_key = {records.decode_delivery(each.key, each.present).key: each for each in wanted}
        withdraw = self.around.withdraw
        free = self.unclaimed(by_key.keys()) if withdraw is None else withdraw(by_key.keys())

        def is_meant(delivery: Delivery) -> bool:
            return records.encode_delivery(delivery) == by_key[delivery.key].present

        def change(delivery: Delivery) -> Delivery | None:
            if not is_meant(delivery):
                return delivery
            asked = by_key[delivery.key]
            return records.decode_delivery(asked.new_key, asked.new) if asked.new_key else None

        try:
            found = await self.update(free, change)
        finally:
            self.around.give_back(free)
        return [at for at, key in enumerate(by_key) if key in found and is_meant(found[key])]


def _wanted(old: Delivery, new: Delivery | None) -> _RequestedState:
    key, row = records.delivery_key(old.key), records.encode_delivery(old)
    if new is None:
        return _RequestedState(key, row, b"", b"")
    return _RequestedState(key, row, records.delivery_key(new.key), records.encode_delivery(new))
