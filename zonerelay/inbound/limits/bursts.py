"""Who sends so much, while the queue is long, that its mail takes turns with everybody else's. No I/O.

While a queue holds more than `LONG` fresh deliveries, each sender has `MANY` fresh recipients, and `RATE`
more in each second (a leaky bucket); what it sends beyond is stored as mail that has come due, as a list is
(`deliveries.py`), until the bucket is no longer full, also when the queue is short by then: or it would keep
it just so long. So a sender of a hundred thousand single messages does not stand before another's, one that
sends a few in a second all the time is never put behind, and nobody pays anything while the queue is short.
What was sent in a flood is remembered for `TIME` after its end. A sender is an envelope sender of one user or
client; addresses that name the recipient or count (VERP: `bounce-1234@`, `list+ann=example.com@`) are one.

Forgotten at a restart. Bounded: `MAX_SENDERS`, those that sent last.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zonerelay.model.clock import Clock
from zonerelay.model.envelope import Envelope
from zonerelay.store.contract import QueueCounts

MANY = 100
"""Recipients; RFC 5321 4.5.3.1.8 has servers take as many in one message."""

RATE = 10.0
LONG = 1000
TIME = 60.0
LOOK_EVERY = 0.1
"""Seconds between looks at how long the queues are."""

MAX_SENDERS = 10_000

_NUMBERS = re.compile(r"[0-9]+")


@dataclass(slots=True)
class _Sender:
    at: float
    level: float = 0.0
    is_over: bool = False


class Bursts:
    """Of one worker, over all listeners."""

    def __init__(self, counts: Callable[[], Mapping[str, QueueCounts]], clock: Clock) -> None:
        self._counts = counts
        self._clock = clock
        self._look_at = 0.0
        self._is_long = False
        self._senders: OrderedDict[tuple[str, str], _Sender] = OrderedDict()
        self._active_until = 0.0
        """Until then there may be a sender that is over."""

    def is_over(self, envelope: Envelope) -> bool:
        """This message is beyond what its sender has."""
        now = self._clock.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY
            self._is_long = any(count.ready > LONG for count in self._counts().values())
        if not self._is_long and now >= self._active_until:
            return False
        return self._count(envelope, now)

    def _count(self, envelope: Envelope, now: float) -> bool:
        key = (envelope.origin.user or envelope.origin.client_address, _general(envelope.sender))
        sender = self._senders.pop(key, None) or _Sender(now)
        leaked = max(0.0, sender.level - RATE * (now - sender.at))
        sender.at, sender.level = now, min(leaked + len(envelope.recipients), MANY + RATE * TIME)
        sender.is_over = sender.level > MANY and (sender.is_over or self._is_long)
        if sender.is_over:
            self._active_until = now + 2 * TIME
        self._senders[key] = sender
        if len(self._senders) > MAX_SENDERS:
            self._senders.popitem(last=False)
        return sender.is_over


def _general(sender: str) -> str:
    """Without what tells one message's sender from the next one's."""
    local, _, domain = sender.rpartition("@")
    return f"{_NUMBERS.sub('#', local.partition('+')[0])}@{domain.lower()}"
