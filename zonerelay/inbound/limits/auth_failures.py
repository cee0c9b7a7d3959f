"""Counts failed log-ins by key: how long each reply waits, and when a key is locked.

The keys are those of `access/auth`: clients, their networks, accounts. Loopback counts like any other client:
it is where an application with an old password is most often found.

A success takes the delay away but not the failures: they age out, so that a client with one good password
cannot guess others without end. The same guess counts once, however often it is made: a fleet with an old
password learns nothing by it, and locks no network out. Nothing here awaits; time is passed in.
"""

from __future__ import annotations

from collections.abc import Hashable

FIRST_DELAY = 0.5
MAX_DELAY = 10.0

MAX_KEYS = 10_000
"""Keys remembered; beyond it the key with the oldest last failure is forgotten."""

MAX_COUNTED = 1000
"""Failures remembered per key, whatever the configuration says."""


class _Failures:
    __slots__ = ("guesses", "in_a_row")

    def __init__(self) -> None:
        self.guesses: dict[object, float] = {}
        """When each was made last, in the order of these times."""
        self.in_a_row = 0


class Attempts:
    """`max_failures` within `window` seconds lock a key until the oldest of them has aged out."""

    def __init__(self, *, max_failures: int, window: float) -> None:
        # In the order of their last failures, so that the first is the one to forget.
        self._keys: dict[Hashable, _Failures] = {}
        self.configure(max_failures=max_failures, window=window)

    def configure(self, *, max_failures: int, window: float) -> None:
        """Apply other limits from now on, also to failures that were counted already."""
        self._max_failures = min(max_failures, MAX_COUNTED)
        self._window = window

    def __len__(self) -> int:
        return len(self._keys)

    def locked(self, key: Hashable, now: float) -> bool:
        return self.count(key, now) >= self._max_failures

    def count(self, key: Hashable, now: float) -> int:
        """Return the number of failures that still count."""
        found = self._keys.get(key)
        return 0 if found is None else len(self._recent(found, now))

    def failed(self, key: Hashable, now: float, guess: bytes | None = None) -> float:
        """Count a failure, and return how many seconds its reply has to wait. `guess` is a hash of what was
        tried, the same for the same; without one the failure is like no other.
        """
        found = self._keys.pop(key, None) or _Failures()
        if not self._recent(found, now):
            found.in_a_row = 0
        if found.guesses.pop(guess, None) is None:
            found.in_a_row += 1
        found.guesses[object() if guess is None else guess] = now
        while len(found.guesses) > MAX_COUNTED:
            del found.guesses[next(iter(found.guesses))]
        if len(self._keys) >= MAX_KEYS:
            del self._keys[next(iter(self._keys))]
        self._keys[key] = found
        # The exponent is bounded too: 2 ** 2000 is no float.
        return min(FIRST_DELAY * 2.0 ** min(max(found.in_a_row, 1) - 1, 16), MAX_DELAY)

    def succeeded(self, key: Hashable) -> None:
        found = self._keys.get(key)
        if found is not None:
            found.in_a_row = 0

    def _recent(self, found: _Failures, now: float) -> dict[object, float]:
        """Drop the failures that have aged out, and return the others."""
        guesses = found.guesses
        while guesses:
            oldest = next(iter(guesses))
            if guesses[oldest] > now - self._window:
                break
            del guesses[oldest]
        return guesses
