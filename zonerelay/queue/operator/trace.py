"""Shows the history of one message, in order of time. Pure.

A spool holds the state of a delivery, not its history: the acceptance, the last attempt and the next one are
known here; everything else is in the log under the same message id.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from zonerelay.model.delivery import Delivery, DeliveryState
from zonerelay.model.envelope import Message


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
