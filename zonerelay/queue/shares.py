"""How much of a zone's window one line may hold, and which domains claims pass over meanwhile. Pure.

A line may hold an eighth of the window, and a sixty-fourth while the window is half full. The
domains of a line that holds its share are passed over by claims; when the line has drained to half of it,
they are fetched by name, in turns, until the store has no more of them. Promise: a domain that is
passed over belongs to a line, and a line that is short and has such domains is in `hungry`, so what was
passed over is always fetched.
"""

from __future__ import annotations

from dataclasses import dataclass

from zonerelay.queue.destinations import Line

MAX_PASSED_OVER = 10_000
"""Names of domains kept per zone. With more, long lines may fill the window: memory stays bounded."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Ask the store for the oldest due deliveries, passing over these domains."""

    limit: int
    skip: frozenset[str]


@dataclass(frozen=True, slots=True)
class Refill:
    """Ask the store for deliveries of one domain that claims passed over."""

    domain: str
    limit: int


class Shares:
    """`waiting` in the arguments is what the whole zone has in memory."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._usual = max(1, window // 8)
        self._crowded = max(1, window // 64)
        self._long: dict[Line, None] = {}
        self.hungry: dict[Line, None] = {}
        """Short lines whose passed-over domains can be fetched."""
        self._resting: set[Line] = set()
        self._skip: set[str] = set()
        self._frozen: frozenset[str] | None = frozenset()

    def share(self, waiting: int) -> int:
        return self._crowded if waiting * 2 >= self._window else self._usual

    def grew(self, line: Line) -> None:
        if line.waiting >= self._crowded:
            self._long[line] = None

    def shortened(self, line: Line, waiting: int) -> None:
        if line.passed_over and self._is_short(line, waiting) and line not in self._resting:
            self.hungry[line] = None
        if self._long and line.waiting < self._crowded:
            self._long.pop(line, None)

    def rest(self, line: Line) -> None:
        """Fetch nothing for the line until `rested`: its destination is suspended."""
        self._resting.add(line)
        self.hungry.pop(line, None)

    def rested(self, line: Line, waiting: int) -> None:
        self._resting.discard(line)
        self.shortened(line, waiting)

    def forget(self, line: Line) -> None:
        """The line is no longer in use; its passed-over domains have moved."""
        self._long.pop(line, None)
        self._resting.discard(line)
        self.hungry.pop(line, None)

    def may_pass_over(self) -> bool:
        return len(self._skip) < MAX_PASSED_OVER

    def pass_over(self, line: Line, domain: str) -> None:
        if domain not in self._skip:
            self._skip.add(domain)
            self._frozen = None
            line.passed_over[domain] = None

    def skip_list(self, waiting: int) -> frozenset[str]:
        """The domains that the next claim passes over."""
        share = self.share(waiting)
        for line in self._long:
            if line.waiting >= share and self.may_pass_over():
                for domain in line.domains:
                    self.pass_over(line, domain)
        if self._frozen is None:
            self._frozen = frozenset(self._skip)
        return self._frozen

    def plan_refill(self, waiting: int) -> Refill | None:
        for line in list(self.hungry):
            if not line.passed_over or not self._is_short(line, waiting):
                del self.hungry[line]
                continue
            domain = next(iter(line.passed_over))
            # To the end: the domains of one destination take turns.
            del line.passed_over[domain]
            line.passed_over[domain] = None
            return Refill(domain, min(self.share(waiting) - line.waiting, self._window - waiting))
        return None

    def exhausted(self, line: Line, domain: str) -> None:
        """The store has no more passed-over deliveries of the domain: claims may return it again."""
        self._skip.discard(domain)
        self._frozen = None
        line.passed_over.pop(domain, None)
        if not line.passed_over:
            self.hungry.pop(line, None)

    def _is_short(self, line: Line, waiting: int) -> bool:
        return line.waiting * 2 < self.share(waiting)
