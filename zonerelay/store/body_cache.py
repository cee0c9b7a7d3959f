"""Small bodies that were just stored, so that delivering new mail reads no disk. Bounded in octets."""

from __future__ import annotations

from zonerelay.model.message_id import MessageId

CAPACITY = 8 * 1024 * 1024


class BodyCache:
    """Keeps the youngest bodies; a missing one is read from the store."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._size = 0
        self._bodies: dict[MessageId, bytes] = {}

    def put(self, message_id: MessageId, body: bytes) -> None:
        self.drop(message_id)
        self._bodies[message_id] = body
        self._size += len(body)
        while self._size > self._capacity:
            # The oldest goes: with a queue this long its turn is far away, or it waits for a retry.
            oldest = next(iter(self._bodies))
            self._size -= len(self._bodies.pop(oldest))

    def get(self, message_id: MessageId) -> bytes | None:
        return self._bodies.get(message_id)

    def drop(self, message_id: MessageId) -> None:
        body = self._bodies.pop(message_id, None)
        if body is not None:
            self._size -= len(body)

    def clear(self) -> None:
        self._bodies.clear()
        self._size = 0
