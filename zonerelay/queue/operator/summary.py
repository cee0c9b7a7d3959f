"""Counts deliveries by one of their properties and by age, as Postfix's qshape does. Pure.

Memory is bounded: at most `MAX_KEYS` keys are counted, and deliveries with any other are `other`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message

MAX_KEYS = 10_000
BOUNDS = (5, 10, 20, 40, 80, 160, 320, 640, 1280)
"""Minutes; the last column is for what is older than all of them."""
UNKNOWN = "(not known)"
NO_ATTEMPT = "(no attempt yet)"
MAX_REPLY = 100

Key = Callable[[Delivery, Message | None], str]

_DIFFERS = re.compile(r"<[^>]*>|\[[^]]*\]|\b[^\s@]+@[^\s@]+\b|\b(?=\w*\d)[\w.:-]{8,}\b")
"""Addresses, and ids with a digit: what differs in replies that say the same."""


def reply_key(delivery: Delivery, _message: Message | None = None) -> str:
    if delivery.last is None:
        return NO_ATTEMPT
    return _DIFFERS.sub("…", str(delivery.last.reply))[:MAX_REPLY]


KEYS: Mapping[str, Key] = {
    "domain": lambda delivery, _: delivery.domain,
    "zone": lambda delivery, _: delivery.zone,
    "priority": lambda delivery, _: delivery.priority.value,
    "reply": reply_key,
    "sender": lambda _, message: UNKNOWN if message is None else message.envelope.sender or "<>",
    "user": lambda _, message: UNKNOWN if message is None else message.envelope.origin.user or "(no log-in)",
}
NEED_MESSAGE = frozenset({"sender", "user"})


@dataclass(frozen=True, slots=True)
class Tally:
    """`ages[n]` counts those of at most `BOUNDS[n]` minutes that are older than the bound before."""

    counts: dict[str, list[int]]
    other: list[int]
    every: int
    """One delivery in so many was looked at, and counts for so many."""


class Summary:
    def __init__(self, every: int, now: float) -> None:
        self.tally = Tally({}, [0] * (len(BOUNDS) + 1), every)
        self._now = now

    def count(self, key: str, created: float) -> None:
        tally = self.tally
        ages = tally.counts.get(key)
        if ages is None:
            if len(tally.counts) < MAX_KEYS:
                ages = tally.counts[key] = [0] * (len(BOUNDS) + 1)
            else:
                ages = tally.other
        ages[bisect_left(BOUNDS, (self._now - created) / 60)] += tally.every
