"""Generates message ids: fixed width, strictly increasing, sortable as text.

    019aa1f2b3c 01f 00        11 hex digits of milliseconds, 3 of sequence, 2 of worker (written together)

An id that begins with `f` is the number of a row of the outbox. Those of a spool get there in the year 2515.

The order of ids is the order of acceptance within one worker, so iterating a spool in key order
delivers the oldest mail first. Ids never go backwards: when the clock steps back the last
millisecond is kept and the sequence counts on; `last` carries that promise over a restart.
"""

from __future__ import annotations

from typing import NewType

from zonerelay.model.clock import Clock

MessageId = NewType("MessageId", str)

LENGTH = 16
MAX_WORKERS = 256
_SEQUENCE_BITS = 12
_ROW = "f"
MAX_ROW = 2**60 - 1


class MessageIdSource:
    """Generates message ids for one worker. Not thread-safe: one event loop owns it."""

    def __init__(self, clock: Clock, worker: int = 0, last: MessageId | None = None) -> None:
        self._clock = clock
        self._counter = int(last[:-2], 16) if last else 0
        self.renumber(worker)

    def renumber(self, worker: int) -> None:
        """Make ids of this worker from now on."""
        if not 0 <= worker < MAX_WORKERS:
            raise ValueError(f"worker must be 0 to {MAX_WORKERS - 1}, not {worker}")
        self._suffix = f"{worker:02x}"

    def next(self) -> MessageId:
        # Milliseconds and sequence are one integer, so a full sequence carries into the next millisecond.
        self._counter = max(self._counter + 1, int(self._clock.now() * 1000) << _SEQUENCE_BITS)
        return MessageId(f"{self._counter:014x}{self._suffix}")


def first_at(now: float) -> MessageId:
    """Return a bound: ids made before this time (Unix seconds) are not larger, later ones not smaller."""
    return MessageId(f"{int(now * 1000) << _SEQUENCE_BITS:014x}00")


def row_id(row: int) -> MessageId:
    return MessageId(f"{_ROW}{row:0{LENGTH - 1}x}")


def is_row(message_id: MessageId) -> bool:
    return message_id.startswith(_ROW)


def row_of(message_id: MessageId) -> int:
    return int(message_id[1:], 16)


def is_message_id(text: str) -> bool:
    return len(text) == LENGTH and all(c in "0123456789abcdef" for c in text)
