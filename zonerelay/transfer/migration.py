"""Moves messages of one store into another, through the contract that all engines keep.

A message goes through these steps, each of which is durable before the next one begins:

1. The journal names the message, and its deliveries that are held already (PLANNED).
2. All its deliveries are held in the source. So no relay sends them from there any more, neither one that
   shares the source, nor the old one when it is started again between two runs.
3. It is copied, under its own id and held: the copy sleeps. The journal has the digest of it (COPIED).
4. The copy is read back, by a store that was opened after it was written and knows it from nowhere else. Then
   the message is removed from the source, and the journal says so (REMOVED).
5. The copy wakes: what was not held before step 2 is released, and the journal says so (AWAKE).

Wherever a run was killed, the next one repeats the step that the journal names: holding, copying, removing
and waking come to the same when they are done a second time. What has the mark REMOVED, or has left the
source while its copy was there, is never copied again. So no message is ever in both queues without being
held in one of them, and none is in neither.

Held is the mark of a sleeping copy because every engine and every release knows it: no relay claims such a
delivery, and the records on disk are the ones there have always been. What it hides is in the journal, so an
operator who releases mail of either queue during a migration breaks the promise; the documentation says so.

A message moves with all of its deliveries, or not now: one that another relay is attempting is left for a
later pass, as it was. A message that cannot be read stays, too, and is named. An error of a store ends the
run, and another run goes on. An id that another message of the target has already (two relays may hand out
the same one) becomes another one, which follows from it.

Memory: a page of at most `PAGE` messages, and of `MAX_WEIGHT` octets unless one message is larger; bodies
pass in chunks.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.store.contract import (
    MessageNotFoundError,
    QueueCounts,
    Store,
    StoreCorruptError,
    StoreError,
)
from zonerelay.transfer.journal import Journal, Move, Phase
from zonerelay.transfer.stored import Unusable

PAGE = 256
MAX_WEIGHT = 32 * 1024 * 1024
_LOOK_EVERY = 0.5
_IDS = 100
"""Ids that are tried for a message whose own is taken."""

T = TypeVar("T")


@dataclass(slots=True)
class Moved:
    """What a run has done. `zones` counts deliveries by zone and state, as they were read back from the
    target. `already` counts messages that the source showed again after they had left it.
    """

    messages: int = 0
    deliveries: int = 0
    octets: int = 0
    already: int = 0
    zones: dict[str, QueueCounts] = field(default_factory=dict)
    unusable: set[MessageId] = field(default_factory=set)


class Migration:
    """From one spool of the source. `patience` is how long, in seconds, it waits for what another relay has:
    one that was killed keeps it until its lease ends.
    """

    def __init__(
        self,
        source: Store,
        targets: Sequence[Store],
        journal: Journal,
        moved: Moved,
        *,
        spool: int,
        patience: float,
        saw: Callable[[int, Unusable | None], None],
    ) -> None:
        """`saw` hears how many messages are done with, or what is wrong with one that stays."""
        self._source = source
        self._targets = targets
        self._journal = journal
        self._spool = spool
        self._patience = patience
        self._saw = saw
        self._moved = moved

    def _target(self, identity: MessageId) -> Store:
        """The spool of the target that has the copy of a message of the source."""
        return self._targets[int(identity[:-2], 16) % len(self._targets)]

    # --- steps 1 to 3

    async def copy(self, ids: Sequence[MessageId]) -> None:
        """Also copies what was only planned. Messages that are busy are left as they are. Raises StoreError,
        TransferError.
        """
        while moves := self._journal.unfinished(self._spool, Phase.PLANNED, PAGE):
            await _all(self._discard_copy(each) for each in moves)
            await self._copy(moves)
        for start in range(0, len(ids), PAGE):
            some = ids[start : start + PAGE]
            known = self._journal.phases(self._spool, some)
            await self._remove_again([each for each, phase in known.items() if phase >= Phase.REMOVED])
            fresh = [each for each in some if each not in known]
            messages = await self._source.read_messages(fresh)
            for identity in (each for each in fresh if each not in messages):
                await self._tell_unreadable(identity)
            for page in _by_weight(messages.values()):
                moves = await self._planned(page)
                self._journal.plan(self._spool, moves)
                await self._copy(moves)

    async def _remove_again(self, ids: Collection[MessageId]) -> None:
        for identity in ids:
            left = await self._source.deliveries_of(identity)
            await self._source.update([each.key for each in left], lambda _: None)
            self._moved.already += 1
            self._saw(1, None)

    async def _tell_unreadable(self, identity: MessageId) -> None:
        try:
            await self._source.read_message(identity)
        except MessageNotFoundError:
            self._saw(1, None)  # it has been sent meanwhile
        except StoreCorruptError as error:
            self._refuse(identity, str(error))

    def _refuse(self, identity: MessageId, why: str) -> None:
        self._moved.unusable.add(identity)
        self._saw(1, Unusable(identity, why))

    async def _planned(self, page: Sequence[Message]) -> list[Move]:
        moves: list[Move] = []
        states = await _all(self._source.deliveries_of(each.id) for each in page)
        copies = await _all(self._free_id(each) for each in page)
        for message, deliveries, copy in zip(page, states, copies, strict=True):
            if copy:
                held = frozenset((each.queue, each.recipient) for each in deliveries if each.held)
                moves.append(Move(message.id, copy, held))
            else:
                self._refuse(message.id, "the target has this message already, from elsewhere")
        return moves

    async def _free_id(self, message: Message) -> MessageId | None:
        """`None` when the message itself is there."""
        identity = message.id
        for number in range(_IDS):
            known = (await self._target(message.id).read_messages([identity])).get(identity)
            if known is None:
                return identity
            if replace(known.envelope, id=message.id) == message.envelope:
                return None
            told = f"{message.id} {message.envelope.created!r} {number}"
            identity = MessageId(message.id[:11] + hashlib.sha256(told.encode()).hexdigest()[:5])
        raise StoreError(f"message {message.id}: the target has {_IDS} other messages in its place")

    async def _copy(self, moves: Sequence[Move]) -> None:
        source = self._source
        before = await _all(source.deliveries_of(each.id) for each in moves)
        await source.update(
            [each.key for some in before for each in some if not each.held],
            lambda delivery: replace(delivery, held=True),
        )
        held = await _all(source.deliveries_of(each.id) for each in moves)
        copied = await _all(self._copied(*each) for each in zip(moves, held, strict=True))
        self._journal.copied(self._spool, [move for move in copied if move is not None])

    async def _copied(self, move: Move, deliveries: Sequence[Delivery]) -> Move | None:
        """`None`: it stays in the source, or is gone."""
        if not deliveries or not all(each.held for each in deliveries):
            await self._let_go(move)  # another relay has one of them
            return None
        try:
            message = await self._source.read_message(move.id)
            digest = _digest(message, deliveries, move.copy)
            async with self._target(move.id).begin(replace(message.envelope, id=move.copy)) as writer:
                async for piece in self._source.read_body(move.id):
                    digest.update(piece)
                    await writer.write(piece)
                await writer.commit(
                    [replace(each, message_id=move.copy) for each in deliveries],
                    headers=message.headers,
                    eight_bit=message.eight_bit,
                    plain_lines=message.plain_lines,
                    body_hash=message.body_hash,
                    trace=message.trace,
                )
        except (StoreCorruptError, MessageNotFoundError) as error:
            await self._let_go(move)
            self._refuse(move.id, str(error))
            return None
        return replace(move, digest=digest.hexdigest())

    async def _let_go(self, move: Move) -> None:
        """Leaves the message in the source as it was, without a copy."""
        await self._discard_copy(move)
        left = await self._source.deliveries_of(move.id)
        await self._source.update([each.key for each in left if _sleeps(move, each)], _released)
        self._journal.forget(self._spool, [move])

    async def _discard_copy(self, move: Move) -> None:
        """A copy that sleeps is nothing yet: the message is in the source."""
        await self._change(self._target(move.id), [(move, move.copy)], lambda *_: True, lambda _: None)

    # --- steps 4 and 5

    async def finish(self) -> None:
        """Finishes what was copied before the target was opened, in this run or another. Raises StoreError,
        also when a copy is not what was copied; TransferError.
        """
        while moves := self._journal.unfinished(self._spool, Phase.REMOVED, PAGE):
            await self._wake(moves)
        while moves := self._journal.unfinished(self._spool, Phase.COPIED, PAGE):
            states = await _all(self._source.deliveries_of(each.id) for each in moves)
            here = [(move, each) for move, each in zip(moves, states, strict=True) if each]
            sizes = await _all(self._compare(*each) for each in here)
            await self._remove(here)
            self._journal.removed(self._spool, moves)
            await self._wake(moves)
            for (move, deliveries), size in zip(here, sizes, strict=True):
                self._count(move, deliveries, size)

    async def _compare(self, move: Move, deliveries: Sequence[Delivery]) -> int:
        """Returns the size of the body. Raises StoreError when the copy is another one than the message."""
        target = self._target(move.id)
        try:
            message = await target.read_message(move.copy)
            copies = await target.deliveries_of(move.copy)
            digest = _digest(message, copies, move.copy)
            async for piece in target.read_body(move.copy):
                digest.update(piece)
            wanted = _ordered(replace(each, message_id=move.copy) for each in deliveries)
            if digest.hexdigest() == move.digest and _ordered(copies) == wanted:
                return message.size
        except (StoreCorruptError, MessageNotFoundError):
            pass  # as bad as any other difference
        await self._discard_copy(move)
        self._journal.copied(self._spool, [replace(move, digest="")])
        raise StoreError(
            f"message {move.id}: its copy in the target is not what was copied, and is discarded; either"
            " queue was changed meanwhile, or the target loses what it has stored"
        )

    async def _remove(self, here: Sequence[tuple[Move, Sequence[Delivery]]]) -> None:
        seen = {each.key: each for _, deliveries in here for each in deliveries}
        await self._change(
            self._source,
            [(move, move.id) for move, _ in here],
            lambda *_: True,
            lambda delivery: None if delivery == seen.get(delivery.key) else delivery,
        )

    async def _wake(self, moves: Sequence[Move]) -> None:
        for target in self._targets:
            mine = [(move, move.copy) for move in moves if self._target(move.id) is target]
            await self._change(target, mine, _sleeps, _released)
        self._journal.awake(self._spool, moves)
        self._saw(len(moves), None)

    async def _change(
        self,
        store: Store,
        messages: Sequence[tuple[Move, MessageId]],
        concerns: Callable[[Move, Delivery], bool],
        change: Callable[[Delivery], Delivery | None],
    ) -> None:
        """Changes the deliveries of these messages until none is left that it concerns. Raises StoreError
        when one stays as it is.
        """
        deadline = asyncio.get_running_loop().time() + self._patience
        left = list(messages)
        for attempt in itertools.count():
            states = await _all(store.deliveries_of(identity) for _, identity in left)
            open_ones = [
                (each, [delivery.key for delivery in some if concerns(each[0], delivery)])
                for each, some in zip(left, states, strict=True)
            ]
            left = [each for each, keys in open_ones if keys]
            if not left:
                return
            if attempt > 1:
                if asyncio.get_running_loop().time() > deadline:
                    where = "source" if store is self._source else "target"
                    raise StoreError(
                        f"message {left[0][1]} stays as it is in the {where}: it was changed by hand, or a"
                        " relay has it that has to be stopped"
                    )
                await asyncio.sleep(_LOOK_EVERY)
            await store.update([key for _, keys in open_ones for key in keys], change)

    def _count(self, move: Move, deliveries: Sequence[Delivery], size: int) -> None:
        self._moved.messages += 1
        self._moved.octets += size
        for each in deliveries:
            counts = self._moved.zones.setdefault(each.zone, QueueCounts())
            counts.count(each.next_attempt, held=move.was_held(each))
            self._moved.deliveries += 1


def _sleeps(move: Move, delivery: Delivery) -> bool:
    return delivery.held and not move.was_held(delivery)


def _released(delivery: Delivery) -> Delivery:
    return replace(delivery, held=False)


def _by_weight(messages: Iterable[Message]) -> Iterator[list[Message]]:
    page: list[Message] = []
    weight = 0
    for message in sorted(messages, key=lambda each: each.id):
        if page and weight + message.size > MAX_WEIGHT:
            yield page
            page, weight = [], 0
        page.append(message)
        weight += message.size
    if page:
        yield page


def _ordered(deliveries: Iterable[Delivery]) -> list[Delivery]:
    return sorted(deliveries, key=lambda each: (each.queue, each.recipient))


def _digest(
    message: Message, deliveries: Sequence[Delivery], copy: MessageId
) -> Any:  # Any: hashlib has no type
    """Of everything that is to arrive, under the id of the copy; the body is still to come."""
    known = replace(message, envelope=replace(message.envelope, id=copy))
    states = [(each.queue, replace(each, message_id=copy)) for each in _ordered(deliveries)]
    return hashlib.sha256(msgspec.json.encode((known, states)))


async def _all(
    work: Iterable[Coroutine[Any, Any, T]],
) -> list[T]:  # Any: what a coroutine sends is its business
    """Waits for all of them, so that none goes on behind the first error, which it raises."""
    results = await asyncio.gather(*work, return_exceptions=True)
    found: list[T] = []
    for result in results:
        if isinstance(result, BaseException):
            raise result
        found.append(result)
    return found
