"""Deliveries with an outcome but no attempt: what waits for a suspended or an unroutable destination.

There may be thousands, which are worked through a few at a time. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from zonerelay.model.delivery import Delivery
from zonerelay.model.message_id import MessageId
from zonerelay.model.outcome import Outcome

TOGETHER = 100
"""Deferrals that are written as one entry."""


@dataclass(slots=True, eq=False)
class Unattempted:
    """In message order; the first `done` have been handed on. `until`: when to look again at the next one."""

    all: Sequence[Delivery]
    outcome: Outcome
    destination: str
    until: Callable[[], float] | None
    done: int = 0

    @property
    def deliveries(self) -> Iterator[Delivery]:
        """Those that are left."""
        return islice(self.all, self.done, None)

    def parts(self, needs_message: Callable[[Delivery], bool]) -> Iterator[tuple[Sequence[Delivery], bool]]:
        """In order: about `TOGETHER` of which no message has to be read (true), or those of one message."""
        together: list[Delivery] = []
        for _, group in groupby(self.all, key=_message_id):
            some = list(group)
            is_needed = any(map(needs_message, some))
            if not is_needed:
                together += some
            if together and (is_needed or len(together) >= TOGETHER):
                yield together, True
                together = []
            if is_needed:
                yield some, False
        if together:
            yield together, True


def _message_id(delivery: Delivery) -> MessageId:
    return delivery.message_id
