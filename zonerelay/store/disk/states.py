"""Keeps the states of messages in the disk queue as the event loop knows them, and plans their changes.

A message's state is one file, so a change of one delivery needs them all. States are kept in
memory while a caller holds them and, as long as there is room, afterwards; what is not here is read from
its file, by one reader at a time. They run ahead of the disk: a change is planned from what
earlier submissions will have left. That is sound because submissions are written in order and
fail together; `reset` then drops every guess.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.store.common import records
from zonerelay.store.contract import Once, StoreCorruptError, StoreError
from zonerelay.store.disk import format as disk_format
from zonerelay.store.disk.batch import Keep, Op, Put, Remove, Rewrite
from zonerelay.store.disk.files import EncodedMessage, State

HOT_DELIVERIES = 10_000
"""Deliveries whose states stay in memory when no caller holds them."""

_log = logging.getLogger("zonerelay.store")

Transition = tuple[Delivery | None, Delivery | None]
"""One delivery's step from old to new. Old None: it is new; new None: it leaves."""


class MessageState:
    """One message's open deliveries once everything submitted is written.

    `known` are all that were open when this was read; `pins` counts its holders and its writes in flight.
    `is_new`: it is not durable yet; `is_own`: it is one of ours, so that no sender is refused with it.
    """

    __slots__ = ("deliveries", "id", "is_new", "is_own", "known", "message", "pins", "records")

    def __init__(
        self,
        message_id: MessageId,
        deliveries: Iterable[Delivery],
        *,
        is_new: bool = False,
        is_own: bool = False,
    ) -> None:
        self.id = message_id
        self.deliveries = {delivery.key: delivery for delivery in deliveries}
        self.known = tuple(self.deliveries)
        self.records: dict[DeliveryKey, bytes] | None = None
        self.message: Message | None = None
        self.pins = 0
        self.is_new = is_new
        self.is_own = is_own

    def encoded(self) -> dict[DeliveryKey, bytes]:
        """A copy of the records as they stand in the file."""
        if self.records is None:
            self.records = {key: disk_format.encode_record(d) for key, d in self.deliveries.items()}
        return dict(self.records)


ReadStates = Callable[[Sequence[MessageId]], Awaitable[dict[MessageId, State]]]


class States:
    """One per store; changed only on the event loop."""

    def __init__(self, read: ReadStates) -> None:
        self._read = read
        self._known: dict[MessageId, MessageState] = {}
        self._count = 0
        self._reading = asyncio.Lock()
        self._epoch = 0

    def get(self, message_id: MessageId) -> MessageState | None:
        return self._known.get(message_id)

    async def hold(self, ids: Collection[MessageId]) -> dict[MessageId, MessageState]:
        """The states of these messages, which stay until `drop`; absent are those that do not exist or
        cannot be read. Does not wait when all are here.
        """
        held: dict[MessageId, MessageState] = {}
        epoch = self._epoch
        try:
            if self._hold_known(ids, held):
                async with self._reading:
                    await self._read_missing(self._hold_known(ids, held))
                self._hold_known(ids, held)
                if epoch != self._epoch:
                    raise StoreError("the queue failed while it was being read")
        except BaseException:
            self.drop(held.values())
            raise
        return held

    def _hold_known(self, ids: Collection[MessageId], held: dict[MessageId, MessageState]) -> list[MessageId]:
        """Adds the states that are here to `held`. Returns the ids of the others."""
        missing = []
        for message_id in ids:
            if message_id not in held:
                state = self._known.get(message_id)
                if state is None:
                    missing.append(message_id)
                else:
                    state.pins += 1
                    held[message_id] = state
        return missing

    async def _read_missing(self, ids: Sequence[MessageId]) -> None:
        """By one reader at a time, so that no state comes in that is older than one that has left memory."""
        epoch = self._epoch
        found = await self._read(ids) if ids else {}
        for message_id, state in found.items():
            if isinstance(state, StoreCorruptError):
                _log.error("left for the operator: %s", state)
            elif message_id not in self._known and epoch == self._epoch:
                self.add(MessageState(message_id, state))

    def drop(self, states: Iterable[MessageState]) -> None:
        """They are no longer held, or what was under way has ended."""
        for state in states:
            state.pins -= 1
            if not state.pins and not state.deliveries:
                self.forget(state)  # not before: a later change of it may still be under way, and fail
        if self._count > HOT_DELIVERIES:
            self._evict()

    def add(self, state: MessageState) -> None:
        """A new message, or one in the place of another: what that is in the middle of goes on here."""
        before = self._known.get(state.id)
        if before is not None:
            self.forget(before)
            state.known = tuple(dict.fromkeys((*before.known, *state.known)))
        self._known[state.id] = state
        self._count += len(state.known)

    def forget(self, state: MessageState) -> None:
        """The message is gone."""
        if self._known.get(state.id) is state:
            del self._known[state.id]
            self._count -= len(state.known)

    def _evict(self) -> None:
        for state in [state for state in self._known.values() if not state.pins]:
            if self._count <= HOT_DELIVERIES // 2:
                return
            self.forget(state)

    def reset(self) -> list[MessageState]:
        """A write failed: nothing here is certain any more. Returns what was held or under way."""
        uncertain = [state for state in self._known.values() if state.pins]
        self._known.clear()
        self._count = 0
        self._epoch += 1
        return uncertain


class ChangePlan:
    """One submission's changes, decided before any I/O. Single use: build, `seal`, and `States` knows."""

    def __init__(self, held: dict[MessageId, MessageState]) -> None:
        """`held` are the states of the messages that deliveries will be changed of."""
        self.held = held
        self._encoded: dict[MessageId, dict[DeliveryKey, bytes]] = {}
        self._open: dict[MessageId, dict[DeliveryKey, Delivery]] = {}
        self._new: dict[MessageId, Put] = {}
        self.ops: list[Op] = []
        self.once: tuple[Once, MessageId] | None = None
        self.size = 0
        self.states: dict[MessageId, MessageState] = {}
        self.transitions: dict[DeliveryKey, Transition] = {}

    def add_message(
        self,
        message: Message,
        deliveries: Sequence[Delivery],
        chunks: Sequence[bytes] | None,
        *,
        is_own: bool,
    ) -> EncodedMessage:
        """A new message. `chunks` None: it is staged already."""
        state = MessageState(message.id, deliveries, is_new=True, is_own=is_own)
        state.message = message
        encoded = state.encoded()
        new = EncodedMessage(message.id, records.encode_message(message), tuple(encoded.values()))
        self._new[message.id] = Put(new, chunks)
        self._encoded[message.id] = encoded
        self._open[message.id] = dict(state.deliveries)
        self.states[message.id] = state
        for key, delivery in state.deliveries.items():
            self.transitions[key] = (None, delivery)
        self.size += len(new.message) + sum(map(len, chunks or ()))
        return new

    def current(self, key: DeliveryKey) -> Delivery | None:
        """The delivery as the plan leaves it so far, `None` when it does not exist (any more)."""
        state = self.held.get(key.message_id)
        return None if state is None else self._open.get(state.id, state.deliveries).get(key)

    def change(self, key: DeliveryKey, new: Delivery | None) -> None:
        """A delivery's new state, perhaps in another queue, `None` if it leaves. Ignored when it does not
        exist (any more).
        """
        old = self.current(key)
        if old is None:
            return
        state = self.held[key.message_id]
        record = None if new is None else disk_format.encode_record(new)
        if state.id not in self._open:
            self._open[state.id] = dict(state.deliveries)
            self._encoded[state.id] = state.encoded()
            self.states[state.id] = state
        deliveries = self._open[state.id]
        moved = new is not None and new.key != key
        if new is None or moved:
            del deliveries[key], self._encoded[state.id][key]
        if new is not None and record is not None:
            deliveries[new.key], self._encoded[state.id][new.key] = new, record
        before = self.transitions.get(key)
        self.transitions[key] = (old if before is None else before[0], None if moved else new)
        if new is not None and moved:
            self.transitions[new.key] = (None, new)
            state.known = (*state.known, new.key)

    def seal(self, states: States) -> None:
        """Complete the operations and let the states run ahead. They are handed to the committer at once."""
        if self.once is not None:
            self.ops.append(Keep(disk_format.key_name(*self.once)))
        for message_id, state in self.states.items():
            deliveries, encoded = self._open[message_id], self._encoded[message_id]
            if message_id in self._new:
                self.ops.append(self._new[message_id])
                states.add(state)
            if not deliveries:
                self.ops.append(Remove(message_id))
            elif message_id not in self._new or len(encoded) != len(state.known):
                self.ops.append(Rewrite(message_id, tuple(encoded.values())))
                self.size += sum(map(len, encoded.values()))
            state.deliveries, state.records = deliveries, encoded
            state.pins += 1
