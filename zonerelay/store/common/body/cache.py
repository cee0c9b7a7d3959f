"""Keeps the bodies that were just stored, so that delivering new mail reads no disk.

The cache keeps chunks as they were written, also while a large body is still arriving. It holds at most
`CAPACITY` octets: the oldest message goes first. It does not keep a body larger than `LARGEST`, which would
push out all the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from zonerelay.model.message_id import MessageId

CAPACITY = 24 * 1024 * 1024
LARGEST = 4 * 1024 * 1024


class BodyCache:
    """Keeps the youngest bodies; a missing one is read from the store."""

    def __init__(self, capacity: int = CAPACITY, largest: int = LARGEST) -> None:
        self._capacity = capacity
        self._largest = largest
        self._size = 0
        self._bodies: dict[MessageId, tuple[bytes, ...]] = {}

    def put(self, message_id: MessageId, body: bytes) -> None:
        """A whole small body; an empty one has no chunks."""
        self.extend(message_id, 1, (body,) if body else ())

    def extend(self, message_id: MessageId, first: int, chunks: Sequence[bytes]) -> None:
        """More of a large body: the chunks from number `first` (they count from one)."""
        size = sum(map(len, chunks))
        body = tuple(chunks)
        before = self._bodies.get(message_id)
        if first > 1:
            if before is None:
                return  # its beginning is gone already
            body = (*before, *chunks)
            if sum(map(len, body)) > self._largest:
                self.drop(message_id)
                return
        elif before is not None:
            self.drop(message_id)
        if size > self._largest:
            return
        self._bodies[message_id] = body
        self._size += size
        if self._size > self._capacity:
            self._evict()

    def get(self, message_id: MessageId, count: int) -> Sequence[bytes] | None:
        """All `count` chunks of the body."""
        body = self._bodies.get(message_id)
        return body if body is not None and len(body) == count else None

    def drop(self, message_id: MessageId) -> None:
        body = self._bodies.pop(message_id, None)
        if body is not None:
            self._size -= sum(map(len, body))

    def clear(self) -> None:
        self._bodies.clear()
        self._size = 0

    def _evict(self) -> None:
        # The oldest goes: with a queue this long its turn is far away, or it waits for a retry.
        while self._size > self._capacity:
            self.drop(next(iter(self._bodies)))
