"""Limits the number of claimed rows of the outbox. Pure.

A queue belongs to a zone or a mailbox, and to one priority. Policies:

- A queue whose rows fill its share claims no more until they fill only half of it, so one slow server does
  not fill the window.
- A share is at most `SHARE`, and at most half of the free window, so several slow servers leave space for
  others.
- A queue with fewer than `FEW` rows may claim beyond `MOST`, so a new queue gets rows even if the window is
  full.
- The window never holds more than `MOST` + `RESERVE` rows, so memory grows neither with the table nor with
  the number of mailboxes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from zonerelay.model.queue_name import QueueName

BATCH = 100
"""Rows that one statement claims at most."""
MOST = 2000
SHARE = 500
FEW = 10
RESERVE = 2000


class Window:
    """Counts the claimed rows by queue and limits them."""

    def __init__(self) -> None:
        self._counts: Counter[QueueName] = Counter()
        self._total = 0
        self._full: set[QueueName] = set()
        self._wants_room = False

    def __contains__(self, queue: QueueName) -> bool:
        return queue in self._counts

    @property
    def queues(self) -> set[QueueName]:
        """Return the queues that have claimed rows."""
        return set(self._counts)

    def full(self) -> Collection[QueueName]:
        """Return the queues that must not claim at present."""
        share = self._share()
        self._full = {
            queue
            for queue, count in self._counts.items()
            if count >= share or (queue in self._full and count > share // 2)
        }
        return self._full

    def room(self) -> int:
        """Return how many rows to claim next. All of a batch may belong to one queue, so it is at most one
        share.
        """
        room = min(BATCH, self._share(), MOST + RESERVE - self._total)
        self._wants_room = room <= 0
        return max(room, 0)

    def _share(self) -> int:
        return max(FEW, min(SHARE, (MOST - self._total) // 2))

    def add(self, queue: QueueName) -> None:
        self._counts[queue] += 1
        self._total += 1

    def remove(self, queue: QueueName) -> bool:
        """Count a row less for the queue, and return whether it is worth claiming more."""
        left = self._counts[queue] - 1
        if left:
            self._counts[queue] = left
        else:
            del self._counts[queue]
        self._total -= 1
        if queue in self._full and left <= self._share() // 2:
            self._full.discard(queue)
            return True
        return self._wants_room and self._total <= MOST + RESERVE - FEW

    def clear(self) -> None:
        self._counts.clear()
        self._full.clear()
        self._total = 0
