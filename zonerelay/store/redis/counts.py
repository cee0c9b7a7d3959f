"""What is known of a shared queue without asking: counts by zone, the highest id, zones with none ready."""

from __future__ import annotations

from zonerelay.model.message_id import MessageId
from zonerelay.store.common import records
from zonerelay.store.contract import QueueCounts
from zonerelay.store.redis.connection import Reply, as_list

_KINDS = {b"r": "ready", b"d": "deferred", b"h": "held"}


class RedisCounts:
    """Told by every answer that changes them, and of everything with each renewal of the lease."""

    def __init__(self) -> None:
        self.last_id: MessageId | None = None
        # Zones of which the last claim has left nothing, and nothing was heard since.
        self.quiet: set[str] = set()
        self._counts: dict[str, QueueCounts] = {}

    def note_id(self, message_id: MessageId) -> None:
        self.last_id = max(self.last_id or message_id, message_id)

    def counts(self) -> dict[str, QueueCounts]:
        return {zone: QueueCounts(c.ready, c.deferred, c.held) for zone, c in self._counts.items()}

    def zones(self) -> list[str]:
        return list(self._counts)

    def take(self, reply: Reply) -> None:
        """Of the zones that were changed: name, ready, deferred, held."""
        answer = as_list(reply)
        for at in range(0, len(answer), 4):
            zone, *numbers = answer[at : at + 4]
            assert isinstance(zone, bytes)
            name = records.unfield(zone)
            self.quiet.discard(name)
            ready, deferred, held = (int(number) for number in numbers if isinstance(number, bytes))
            self._counts[name] = QueueCounts(ready, deferred, held)

    def take_all(self, reply: list[Reply]) -> None:
        counts: dict[str, QueueCounts] = {name: QueueCounts() for name in self._counts}
        for field, number in zip(reply[::2], reply[1::2], strict=True):
            assert isinstance(field, bytes)
            assert isinstance(number, bytes)
            zone = counts.setdefault(records.unfield(field[2:]), QueueCounts())
            setattr(zone, _KINDS[field[:1]], int(number))
        self._counts = counts
