"""Finds senders whose mail would delay all other mail while the queue is long. No I/O.

While a queue holds more than `LONG` fresh deliveries, each sender has `MANY` fresh recipients, and `RATE`
more in each second (a leaky bucket). Mail beyond that is stored as if it had come due, as a list is
(`cleanup/deliveries`), until the bucket is no longer full, even if the queue is short by then: otherwise the
sender would keep the queue just that short. A sender of a hundred thousand single messages thus does not
delay the others, a sender of a few messages a second is never delayed, and there is no cost while the queue
is short. A flood is remembered for `TIME` after its end. A sender is an envelope sender of one user or
client; addresses that name the recipient or count (VERP: `bounce-1234@`, `list+ann=example.com@`) are one
sender.

Counts are lost at a restart, and bounded by `MAX_SENDERS`, the latest ones.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from zonerelay.model.clock import Clock
from zonerelay.model.envelope import Envelope
from zonerelay.model.queue_name import QueueName
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
    """The senders of one worker, over all listeners."""

    def __init__(self, counts: Callable[[], Mapping[QueueName, QueueCounts]], clock: Clock) -> None:
        self._counts = counts
        self._clock = clock
        self._look_at = 0.0
        self._is_long = False
        self._senders: OrderedDict[tuple[str, str], _Sender] = OrderedDict()
        self._active_until = 0.0
        """Until this time (monotonic) a sender may be over its limit."""

    def is_over(self, envelope: Envelope) -> bool:
        """Count the message; true when its sender is over the limit."""
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
    """Remove the parts of an address that differ from one message to the next."""
    local, _, domain = sender.rpartition("@")
    return f"{_NUMBERS.sub('#', local.partition('+')[0])}@{domain.lower()}"
