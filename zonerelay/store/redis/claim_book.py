"""Holds what this relay knows without asking the server: its claims, recent messages and bodies, the counts.

Each claim has the fencing token of the lease that it was made under. Messages and small bodies that were
just stored or read are served from memory only while this relay has claimed one of their deliveries: until
the claim ends, no other relay can remove them. Every answer that changes a zone's counts tells the new ones,
and each renewal of the lease tells all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from zonerelay.model.delivery import DeliveryKey
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import QueueName
from zonerelay.store.common import records
from zonerelay.store.common.body.cache import BodyCache
from zonerelay.store.contract import QueueCounts
from zonerelay.store.redis.connection import Reply, as_list, pairs

HOT_MESSAGES = 4096
_KINDS = {b"r": "ready", b"d": "deferred", b"h": "held"}
NO_TOKEN = b""


class ClaimBook:
    """Changed only on the event loop. No I/O."""

    def __init__(self) -> None:
        self._tokens: dict[DeliveryKey, bytes] = {}
        self._claimed: dict[MessageId, int] = {}
        self._last_token: dict[MessageId, bytes] = {}
        self._hot: dict[MessageId, Message] = {}
        self._bodies = BodyCache()
        self.last_id: MessageId | None = None
        # Zones of which the last claim has left nothing, and nothing was heard since.
        self.quiet: set[QueueName] = set()
        self._counts: dict[QueueName, QueueCounts] = {}

    # --- claims

    def add(self, key: DeliveryKey, token: bytes) -> bool:
        """Notes a claim. Returns false when the delivery was claimed before, under a lease that was lost, and
        is still being worked on: the work goes on under the new token, and the delivery must not be handed
        out a second time.
        """
        is_new = key not in self._tokens
        self._tokens[key] = self._last_token[key.message_id] = token
        if is_new:
            self._claimed[key.message_id] = self._claimed.get(key.message_id, 0) + 1
        return is_new

    def token(self, key: DeliveryKey) -> bytes:
        return self._tokens.get(key, NO_TOKEN)

    def drop(self, keys: Iterable[tuple[DeliveryKey, bytes]]) -> None:
        """Forgets claims that have ended, unless they were made again meanwhile."""
        for key, token in keys:
            if token != NO_TOKEN and self._tokens.get(key) == token:
                del self._tokens[key]
                self._count_down(key.message_id)

    def _count_down(self, message_id: MessageId) -> None:
        left = self._claimed[message_id] - 1
        if left:
            self._claimed[message_id] = left
            return
        del self._claimed[message_id]
        del self._last_token[message_id]
        self._hot.pop(message_id, None)
        self._bodies.drop(message_id)

    def keys(self) -> list[DeliveryKey]:
        return list(self._tokens)

    def has(self, key: DeliveryKey) -> bool:
        return key in self._tokens

    def has_message(self, message_id: MessageId) -> bool:
        return message_id in self._claimed

    def is_sound(self, message_id: MessageId, token: bytes) -> bool:
        """Returns false when the message was last claimed under another token: that lease was lost."""
        return self._last_token.get(message_id, token) == token

    # --- what is known by heart

    def remember(self, message: Message) -> None:
        self._hot[message.id] = message
        if len(self._hot) > HOT_MESSAGES:
            del self._hot[next(iter(self._hot))]

    def remember_body(self, message_id: MessageId, first: int, chunks: Sequence[bytes]) -> None:
        """Keeps the chunks from number `first` on."""
        self._bodies.extend(message_id, first, chunks)

    def forget_body(self, message_id: MessageId) -> None:
        self._bodies.drop(message_id)

    def message(self, message_id: MessageId) -> Message | None:
        return self._hot.get(message_id) if message_id in self._claimed else None

    def body(self, message: Message) -> Sequence[bytes] | None:
        return self._bodies.get(message.id, message.chunks) if message.id in self._claimed else None

    # --- figures

    def note_id(self, message_id: MessageId) -> None:
        self.last_id = max(self.last_id or message_id, message_id)

    def counts(self) -> dict[QueueName, QueueCounts]:
        return {queue: replace(counts) for queue, counts in self._counts.items() if queue.is_mail}

    def queues(self) -> list[QueueName]:
        return list(self._counts)

    def take_counts(self, reply: Reply) -> None:
        """Takes in the counts of changed zones: name, ready, deferred, held of each."""
        answer = as_list(reply)
        for at in range(0, len(answer), 4):
            zone, *numbers = answer[at : at + 4]
            assert isinstance(zone, bytes)
            name = records.queue_in(zone)
            self.quiet.discard(name)
            self._counts[name] = QueueCounts(
                *(int(number) for number in numbers if isinstance(number, bytes))
            )

    def take_all_counts(self, reply: list[Reply]) -> None:
        counts: dict[QueueName, QueueCounts] = {name: QueueCounts() for name in self._counts}
        for name, number in pairs(reply):
            zone = counts.setdefault(records.queue_in(name[2:]), QueueCounts())
            setattr(zone, _KINDS[name[:1]], int(number))
        self._counts = counts

    def clear(self) -> None:
        self._tokens.clear()
        self._claimed.clear()
        self._last_token.clear()
        self._hot.clear()
        self._bodies.clear()
