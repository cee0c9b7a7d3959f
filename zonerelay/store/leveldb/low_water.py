"""Keeps the low-water mark of a sorted range of keys: how far it has been read into memory. No I/O.

A mark moves up when rows are read and down when something is stored below it that memory does not hold; what
is stored while rows are being read moves it back down when the read is over. So nothing is missed, and reads
never go back to the start of a range, where LevelDB would walk over the tombstones of delivered mail.
"""

from __future__ import annotations

from zonerelay.store.common import records


class DiskRange:
    """A sorted range of keys on disk of which everything below `low` is accounted for.

    `exact` is true while a row is known to be at `low`.
    """

    __slots__ = ("_lowest_noted", "_reading", "end", "exact", "low", "prefix")

    def __init__(self, prefix: bytes, low: bytes | None) -> None:
        self.prefix = prefix
        self.end = records.after(prefix)
        self.low = low
        self.exact = False
        self._reading = False
        self._lowest_noted: bytes | None = None

    def note(self, key: bytes) -> None:
        """There is something at `key` that memory does not hold."""
        if self._reading and (self._lowest_noted is None or key < self._lowest_noted):
            self._lowest_noted = key
        if self.low is None or key < self.low:
            self.low = key
            self.exact = True

    def gone(self, key: bytes) -> None:
        """The row at `key` was removed."""
        if key == self.low:
            self.exact = False

    def start_reading(self) -> bytes:
        self._reading = True
        self._lowest_noted = None
        return self.low or self.prefix

    def stop_reading(self) -> None:
        """The read failed or its result is void: the mark stays."""
        self._reading = False

    def read_up_to(self, low: bytes | None, *, exact: bool = True) -> None:
        """Memory now holds everything below `low` (None: everything), as of when the read started."""
        self._reading = False
        self.exact = exact
        noted = self._lowest_noted
        # What was stored while the rows were being read may have been missed by the reader.
        self.low = noted if low is None or (noted is not None and noted < low) else low
