"""Who sends so much, while the queue is long, that its mail takes turns with everybody else's. No I/O.

While a queue holds more than `LONG` fresh deliveries, each sender has `MANY` fresh recipients in `TIME`; what
it sends beyond that is stored as mail that has come due, as a list is (`deliveries.py`). So a sender of a
hundred thousand single messages does not stand before another's, and nobody pays anything while the queue is
short. A sender is an envelope sender of one user or client; addresses that name the recipient or count (VERP:
`bounce-1234@`, `list+ann=example.com@`) are one.

Forgotten at a restart. Bounded: `MAX_SENDERS`, those that sent last.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping

from zonerelay.model.clock import Clock
from zonerelay.model.envelope import Envelope
from zonerelay.store.base import QueueCounts

MANY = 100
"""Recipients; RFC 5321 4.5.3.1.8 has servers take as many in one message."""

LONG = 1000
TIME = 60.0
LOOK_EVERY = 0.1
"""Seconds between looks at how long the queues are."""

MAX_SENDERS = 10_000

_NUMBERS = re.compile(r"[0-9]+")
_NONE: frozenset[str] = frozenset()


class Bursts:
    """Of one worker, over all listeners."""

    def __init__(self, counts: Callable[[], Mapping[str, QueueCounts]], clock: Clock) -> None:
        self._counts = counts
        self._clock = clock
        self._look_at = 0.0
        self._long: Collection[str] = _NONE
        self._senders: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def long_queues(self) -> Collection[str]:
        """Names of queues where fresh mail waits for others' fresh mail; none most of the time."""
        now = self._clock.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY
            self._long = frozenset(name for name, count in self._counts().items() if count.ready > LONG)
        return self._long

    def is_over(self, envelope: Envelope) -> bool:
        """This message is beyond what its sender has; counts it."""
        now = self._clock.monotonic()
        origin = envelope.origin
        key = (origin.user or origin.client_address, _general(envelope.sender))
        since, sent = self._senders.pop(key, (now, 0))
        if now - since >= TIME:
            since, sent = now, 0
        sent += len(envelope.recipients)
        self._senders[key] = (since, sent)
        if len(self._senders) > MAX_SENDERS:
            self._senders.popitem(last=False)
        return sent > MANY


def _general(sender: str) -> str:
    """Without what tells one message's sender from the next one's."""
    local, _, domain = sender.rpartition("@")
    return f"{_NUMBERS.sub('#', local.partition('+')[0])}@{domain.lower()}"
