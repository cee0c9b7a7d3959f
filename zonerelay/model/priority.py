"""Priorities, and the queues of a zone: one for each priority.

A *queue* is what stores keep deliveries under: the zone's name for mail of normal priority, `zone;high` and
`zone;bulk` for the others. So every store has them apart, oldest first, and knows nothing of priorities. No
name of a zone has a semicolon in it (`config/convert.py`).
"""

from __future__ import annotations

import enum


class Priority(enum.StrEnum):
    HIGH = "high"
    NORMAL = "normal"
    BULK = "bulk"


def queue_of(zone: str, priority: Priority) -> str:
    return zone if priority is Priority.NORMAL else f"{zone};{priority.value}"


def queues_of(zone: str) -> tuple[str, ...]:
    """What is urgent first."""
    return tuple(queue_of(zone, each) for each in Priority)


def zone_of(queue: str) -> str:
    return queue.partition(";")[0]


def priority_of(queue: str) -> Priority:
    """A newer release's priority, which this one does not know, is normal."""
    named = queue.partition(";")[2]
    return _BY_NAME.get(named, Priority.NORMAL)


_BY_NAME = {each.value: each for each in Priority}
