"""Mappings and sets of bounded size, for what the relay remembers about clients, hosts and messages."""

from collections import OrderedDict
from typing import Generic, TypeVar

from zonerelay.model.clock import Clock

Key = TypeVar("Key")
Value = TypeVar("Value")

MAX_REMEMBERED = 10_000


class BoundedDict(OrderedDict[Key, Value]):
    """A dict of at most `limit` keys, which removes the oldest one when it is full. Setting a key makes it
    the newest one.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self.limit:
            self.popitem(last=False)


class ExpiringSet(Generic[Key]):
    """A set from which keys are removed `seconds` after their latest `add`; `until` has the expiry of each. A
    full set forgets the oldest key.
    """

    def __init__(self, clock: Clock, seconds: float, limit: int = MAX_REMEMBERED) -> None:
        self._clock = clock
        self._seconds = seconds
        self.until: BoundedDict[Key, float] = BoundedDict(limit)

    def __contains__(self, key: Key) -> bool:
        until = self.until.get(key)
        if until is None:
            return False
        if until > self._clock.monotonic():
            return True
        del self.until[key]
        return False

    def discard(self, key: Key) -> None:
        self.until.pop(key, None)

    def add(self, key: Key) -> None:
        self.until[key] = self._clock.monotonic() + self._seconds
