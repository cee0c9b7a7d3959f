"""A bounded set of keys that leave it after a time: what the relay remembers about hosts for a while."""

from __future__ import annotations

from collections import OrderedDict

from zonerelay.model.clock import Clock

MAX_REMEMBERED = 10_000


class ExpiringSet:
    """Keys are in the set for `seconds` after the latest `add`. A full set forgets the oldest key."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._until: OrderedDict[str, float] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        until = self._until.get(key)
        if until is None:
            return False
        if until > self._clock.monotonic():
            return True
        del self._until[key]
        return False

    def discard(self, key: str) -> None:
        self._until.pop(key, None)

    def add(self, key: str) -> None:
        self._until[key] = self._clock.monotonic() + self._seconds
        self._until.move_to_end(key)
        if len(self._until) > MAX_REMEMBERED:
            self._until.popitem(last=False)
