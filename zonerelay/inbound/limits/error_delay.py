"""Counts the latest errors of clients that may not relay, and says how long the reply to the next one waits.

This is Postfix's smtpd_error_sleep_time, carried over from one connection to the next: a client that guesses
addresses gets a few replies a second, however many connections it opens. Each error ages by itself.
"""

from __future__ import annotations

from zonerelay.inbound.limits.connections import Key

FREE = 10
"""Errors without a delay, as Postfix's smtpd_soft_error_limit."""

STEP = 0.25
MAX_DELAY = 5.0
"""Seconds: each further error waits a step longer."""

AGE = 6.0
"""Seconds after which one error is forgotten."""

MAX_CLIENTS = 10_000
"""Clients remembered; beyond it the client with the oldest last error is forgotten."""

_MOST = FREE + 2 * MAX_DELAY / STEP


class ErrorDelays:
    def __init__(self) -> None:
        self._clients: dict[Key, tuple[float, float]] = {}  # errors and when; the latest is last

    def __len__(self) -> int:
        return len(self._clients)

    def made(self, client: Key, now: float) -> float:
        """Count an error, and return how many seconds its reply waits."""
        count, at = self._clients.pop(client, (0.0, now))
        count = min(max(count - (now - at) / AGE, 0.0) + 1.0, _MOST)
        if len(self._clients) >= MAX_CLIENTS:
            del self._clients[next(iter(self._clients))]
        self._clients[client] = count, now
        return min(max(count - FREE, 0.0) * STEP, MAX_DELAY)
