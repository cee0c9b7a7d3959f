"""Counts deliveries by one of their properties and by age, as Postfix's qshape does. Pure.

Memory is bounded: at most `MAX_KEYS` keys are counted, and deliveries with any other are `other`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from zonerelay.model.delivery import Delivery, DeliveryState
from zonerelay.model.envelope import Message

# Shows the history of one message, in order of time. Pure.
#
# A spool holds the state of a delivery, not its history: the acceptance, the last attempt and the next one
# are known here; everything else is in the log under the same message id.


@dataclass(frozen=True, slots=True)
class Shown:
    """A message and its open deliveries with their states."""

    message: Message
    deliveries: tuple[tuple[Delivery, DeliveryState], ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that happened or will; `recipient` `""` concerns the whole message."""

    at: float
    event: str
    recipient: str = ""
    text: str = ""


def steps(shown: Shown) -> tuple[Step, ...]:
    """The steps of a message in order of time; what happens next comes last."""
    envelope = shown.message.envelope
    trace = list(shown.message.trace) or [f"protocol={envelope.origin.protocol}"]
    found = [Step(envelope.created, "accepted", text=note) for note in trace]
    gone = len(envelope.recipients) - len(shown.deliveries)
    if gone:
        text = f"{gone} of {len(envelope.recipients)} recipients have left the queue; the log says how"
        found.append(Step(envelope.created, "settled", text=text))
    for delivery, state in shown.deliveries:
        found += _of(delivery, state, envelope.created)
    return tuple(sorted(found, key=lambda step: step.at))


def _of(delivery: Delivery, state: DeliveryState, accepted: float) -> Iterator[Step]:
    recipient = delivery.recipient
    last = delivery.last
    at = accepted if last is None else last.at
    if last is not None:
        peer = f" [{last.peer}]" if last.peer else ""
        host = f"{last.host}{peer}: " if last.host else ""
        doubt = " (in doubt)" if last.in_doubt else ""
        yield Step(last.at, "attempt", recipient, f"{host}{last.reply}{doubt}")
    if delivery.warned:
        yield Step(at, "warned", recipient, "the sender was told of the delay")
    if delivery.created > accepted:
        yield Step(delivery.created, "release", recipient, "its sender wants it held back until then")
    after = f"after {delivery.attempts} attempt{'s' if delivery.attempts != 1 else ''}"
    if state is DeliveryState.DEFERRED:
        yield Step(delivery.next_attempt, "next attempt", recipient, after)
    else:
        yield Step(at, state.value, recipient, after)


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
