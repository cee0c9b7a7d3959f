"""Failed log-ins per client: how long each answer waits, and when a client is not looked at any more.

A client is an IPv4 address, an IPv6 /64 (`limits.client_key`), or all those without an address together.
Loopback counts like any other: it is where an application with an old password is most often found.

A success takes the delay away, not the failures: they age out, so that somebody with one good password
cannot guess others without end. Nothing here awaits; time is passed in.
"""

from __future__ import annotations

from zonerelay.inbound.limits import Key

FIRST_DELAY = 0.5
MAX_DELAY = 10.0

MAX_CLIENTS = 10_000
"""Clients remembered; beyond it the one whose last failure is longest ago is forgotten."""

MAX_COUNTED = 1000
"""Failures remembered per client, whatever the configuration says."""


class _Failures:
    __slots__ = ("in_a_row", "times")

    def __init__(self) -> None:
        self.times: list[float] = []
        self.in_a_row = 0


class Attempts:
    """`max_failures` within `window` seconds lock a client until the oldest of them has aged out."""

    def __init__(self, *, max_failures: int, window: float) -> None:
        # In the order of their last failures, so that the first is the one to forget.
        self._clients: dict[Key, _Failures] = {}
        self.configure(max_failures=max_failures, window=window)

    def configure(self, *, max_failures: int, window: float) -> None:
        """Other limits from now on, also for what was counted already."""
        self._max_failures = min(max_failures, MAX_COUNTED)
        self._window = window

    def __len__(self) -> int:
        return len(self._clients)

    def locked(self, key: Key, now: float) -> bool:
        client = self._clients.get(key)
        return client is not None and len(self._recent(client, now)) >= self._max_failures

    def failed(self, key: Key, now: float) -> float:
        """Count a failure; how long its answer has to wait."""
        client = self._clients.pop(key, None) or _Failures()
        if not self._recent(client, now):
            client.in_a_row = 0
        client.times.append(now)
        del client.times[:-MAX_COUNTED]
        client.in_a_row += 1
        if len(self._clients) >= MAX_CLIENTS:
            del self._clients[next(iter(self._clients))]
        self._clients[key] = client
        # The exponent is bounded too: 2 ** 2000 is no float.
        return min(FIRST_DELAY * 2.0 ** min(client.in_a_row - 1, 16), MAX_DELAY)

    def succeeded(self, key: Key) -> None:
        client = self._clients.get(key)
        if client is not None:
            client.in_a_row = 0

    def _recent(self, client: _Failures, now: float) -> list[float]:
        """What still counts; the rest is forgotten here."""
        times = client.times
        old = 0
        while old < len(times) and times[old] <= now - self._window:
            old += 1
        del times[:old]
        return times
