"""What one observer has seen against what was promised: the most at once, in any time, in one go.

Pure bookkeeping; times are readings of the receivers' clock.
"""

from collections import deque

import msgspec


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """0 or `None`: nothing was promised."""

    connections: int = 0
    recipients: int = 0
    messages: int = 0
    rate: tuple[int, float] | None = None


class Seen(msgspec.Struct, kw_only=True):
    """Under one promise. `first` and `last`: when transactions began."""

    promise: Promise
    connections: int = 0
    recipients: int = 0
    messages: int = 0
    in_window: int = 0
    transactions: int = 0
    first: float = 0.0
    last: float = 0.0

    @property
    def exceeded(self) -> list[str]:
        promise = self.promise
        found = []
        for name, seen, most in (
            ("connections", self.connections, promise.connections),
            ("recipients", self.recipients, promise.recipients),
            ("messages", self.messages, promise.messages),
            ("rate", self.in_window, promise.rate[0] if promise.rate else 0),
        ):
            if most and seen > most:
                found.append(f"{name}: {seen} of {most}")
        return found

    @property
    def used(self) -> float:
        """Part of the rate that was used."""
        assert self.promise.rate is not None
        count, seconds = self.promise.rate
        return (self.transactions - 1) / (self.last - self.first) / (count / seconds)


class Tally:
    """One observer's count."""

    def __init__(self, promise: Promise) -> None:
        self.open = 0
        self.seen = Seen(promise=promise)
        self._promise = promise
        self._times: deque[float] = deque()

    @property
    def is_full(self) -> bool:
        return bool(self._promise.connections) and self.open >= self._promise.connections

    def opened(self, *, gone: int = 0) -> None:
        """A connection more; `gone` of the others have been closed by their client already."""
        self.open += 1
        self.seen.connections = max(self.seen.connections, self.open - gone)

    def closed(self) -> None:
        self.open -= 1

    def mail(self, now: float) -> None:
        """A transaction begins."""
        seen = self.seen
        seen.first = seen.first or now
        seen.last = now
        seen.transactions += 1
        if self._promise.rate is None:
            return
        count, seconds = self._promise.rate
        times = self._times
        times.append(now)
        # As many are kept as can tell by how much a rate was exceeded.
        while len(times) > 4 * count:
            times.popleft()
        seen.in_window = max(seen.in_window, sum(time > now - seconds for time in times))

    def recipients(self, number: int) -> None:
        self.seen.recipients = max(self.seen.recipients, number)

    def messages(self, number: int) -> None:
        """So many transactions on one connection."""
        self.seen.messages = max(self.seen.messages, number)
