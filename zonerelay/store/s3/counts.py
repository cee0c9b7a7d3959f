"""Counts a shared queue: this relay's mail from its index, the others' from their leases.

The counts cost no request; those of other relays are as old as their last beat. Mail that is left to a
relay with room is not counted until a relay has taken it over.
"""

from __future__ import annotations

from zonerelay.model.message_id import MessageId, is_message_id
from zonerelay.store.contract import QueueCounts
from zonerelay.store.s3.nodes import Nodes
from zonerelay.store.s3.own_messages import OwnMessages
from zonerelay.store.s3.records import LeaseRecord


class S3Counts:
    """One per store."""

    def __init__(self, mine: OwnMessages, nodes: Nodes) -> None:
        self._mine = mine
        self._nodes = nodes

    @property
    def ready(self) -> int:
        """Deliveries of this relay that have not been tried yet."""
        return sum(zone.counts.ready for zone in self._mine.index.values())

    def counts(self) -> dict[str, QueueCounts]:
        found = dict(self._mine.index.counts())
        for lease in self._nodes.company():
            for name, (ready, deferred, held) in lease.counts.items():
                counts = found.setdefault(name, QueueCounts())
                counts.ready += ready
                counts.deferred += deferred
                counts.held += held
        return found

    def zones(self) -> set[str]:
        others = {name for lease in self._nodes.company() for name in lease.counts}
        return self._mine.index.zones() | others

    def oldest(self, zone: str, now: float) -> float | None:
        mine = self._mine.index[zone].oldest(now)
        others = [lease.oldest[zone] for lease in self._nodes.company() if zone in lease.oldest]
        return min((when for when in (mine, *others) if when is not None and when <= now), default=None)

    def lease(self, offers: int, now: float) -> LeaseRecord:
        """The record that this relay writes into its lease."""
        index = self._mine.index
        named = {name: counts for name, counts in index.counts() if counts.total}
        oldest = {name: index[name].oldest(now) for name in named}
        return LeaseRecord(
            offers=offers,
            last_id=self._mine.last_id or "",
            counts={name: (c.ready, c.deferred, c.held) for name, c in named.items()},
            oldest={name: when for name, when in oldest.items() if when is not None},
        )

    def heard_ids(self) -> None:
        """Takes note of other relays' ids: ids never go backwards, in any relay."""
        for name in self._nodes.last_ids:
            if is_message_id(name):
                self._mine.note_id(MessageId(name))
        self._nodes.last_ids.clear()
