"""How long a client may take. No timers here: the session asks when its one timer fires.

- idle: between our answer and the client's next complete command (dribbling single octets does not help),
  and between two pieces of a body (RFC 5321 4.5.3.2.7).
- transaction: from MAIL to the end of data, so that a body that trickles ends some day.

Late clients get 421 4.4.2.
"""

from __future__ import annotations

from zonerelay.inbound import answers
from zonerelay.inbound.answers import Answer


class Deadlines:
    """Times are the event loop's, in seconds."""

    __slots__ = ("_began", "_idle", "_transaction", "heard")

    def __init__(self, now: float, *, idle: float, transaction: float) -> None:
        self._idle = idle
        self._transaction = transaction
        self.heard = now  # when the client last did its part: body bytes came, or it is waiting for us
        self._began: float | None = None

    def answered(self, now: float, *, in_transaction: bool) -> None:
        """Commands were answered, and left the client in a transaction or not."""
        self.heard = now
        if not in_transaction:
            self._began = None
        elif self._began is None:
            self._began = now

    def complete(self) -> None:
        """The end of data is here: what takes time now is ours."""
        self._began = None

    def late(self, now: float) -> Answer | None:
        if self._began is not None and now >= self._began + self._transaction:
            return answers.TRANSACTION_TIME
        return answers.IDLE if now >= self.heard + self._idle else None

    def next_look(self, now: float) -> float:
        """When to ask again: never too late for a transaction that begins meanwhile."""
        began = now if self._began is None else self._began
        return min(self.heard + self._idle, began + self._transaction)
