"""Which fresh mail is new, while a backlog is worked off. Pure.

A sender's mail for a host that is idle must not wait behind a hundred thousand messages for others that came
before. So when more waits in a zone's memory than `crowd`, everything that came until then is *backlog*,
however much of it is still in the store; it stands with mail that has been put off (`rows.py`). What comes
from then on is new: it has claims of its own, by turns with the others, `most` places in memory besides the
window, and the turns of fresh mail in look-ups, in the ring, on probation and in each line. So whoever sends
in the ordinary way hardly notices a backlog, and this has its part of the turns (`rows.py`), however much new
mail comes, and all that new mail leaves.

When new mail has used up its places, it is backlog, too, and the line is drawn again: at once while the
window has room for it, and otherwise at most every `AGAIN` seconds, or newer mail would fill the window bit
by bit. It ends when the store has no more and little waits. While little waits, nothing is counted.
"""

from __future__ import annotations

from collections.abc import Iterable

from zonerelay.model.delivery import Delivery
from zonerelay.model.message_id import MessageId, first_at

AGAIN = 60.0


class Newcomers:
    """Of one zone and priority, with a window for everything else; `waiting` are those in memory."""

    __slots__ = ("_crowd", "_drawn", "_window", "most", "since", "turn", "waiting")

    def __init__(self, window: int, crowd: int) -> None:
        self.most = max(1, window // 4)
        self.since: MessageId | None = None
        """The first message id that is new; `None`: there is no backlog."""
        self.waiting = 0
        self.turn = True
        """The next claim is theirs, if others want one, too."""
        self._window = window
        self._crowd = crowd
        self._drawn = 0.0

    def is_new(self, delivery: Delivery) -> bool:
        return self.since is not None and self.is_fresh(delivery)

    def is_fresh(self, delivery: Delivery) -> bool:
        """New, or tried for the first time while there is no backlog."""
        return delivery.next_attempt <= 0 and (self.since is None or delivery.message_id >= self.since)

    def entered(self, deliveries: Iterable[Delivery]) -> None:
        self.waiting += sum(map(self.is_new, deliveries))

    def left(self, deliveries: Iterable[Delivery]) -> None:
        self.waiting -= sum(map(self.is_new, deliveries))

    def is_to_be_drawn(self, waiting: int, now: float) -> bool:
        """So much waits, of all kinds, that what is here is backlog from now on."""
        if self.since is None:
            return waiting > self._crowd
        if self.waiting < self.most:
            return False
        return waiting <= self._window or not self._drawn <= now < self._drawn + AGAIN

    def is_drawn_earlier(self, now: float) -> bool:
        """Than the last line, for the clock was set back: some of what is backlog is new then."""
        return now < self._drawn

    def draw(self, now: float) -> MessageId:
        """Who sorts what waits by this counts again what is new."""
        self._drawn = now
        self.waiting = 0
        self.since = first_at(now)
        return self.since

    def exhausted(self, waiting: int) -> None:
        """The store has nothing else."""
        if self.since is not None and waiting <= self._crowd // 2:
            self.since = None
            self.waiting = 0
