"""How much of a zone's window one line may hold, and which domains claims pass over meanwhile. Pure.

Each priority has its own, with a window of its own: a long bulk queue leaves room for urgent mail.

A line may hold an eighth of the window, and a sixty-fourth while the window is half full, or more of new
mail (`window.py`) while that has places. The
domains of a line that holds its share are passed over by claims; when the line has drained to half of it,
they are fetched by name, in turns, until the store has no more of them. For new mail (`window.py`) that is
done in the places of newcomers, or the backlog, which takes all other room, would stand before it after all.
Promise: a domain that is passed over belongs to a line, and a line that is short and has such domains is in
`_hungry`, so what was passed over is always fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zonerelay.model.delivery import Delivery
from zonerelay.model.message_id import MessageId
from zonerelay.model.priority import Priority
from zonerelay.queue.destination.destinations import Backlog
from zonerelay.queue.zone.newcomers import Newcomers

MAX_PASSED_OVER = 10_000
"""Names of domains kept per zone. With more, long lines may fill the window: memory stays bounded."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Ask the store for the oldest due deliveries, passing over these domains."""

    limit: int
    skip: frozenset[str]
    priority: Priority = Priority.NORMAL


@dataclass(frozen=True, slots=True)
class NewClaim:
    """Ask the store for the oldest fresh deliveries of messages from `since` on, passing over domains."""

    limit: int
    skip: frozenset[str]
    since: MessageId
    priority: Priority = Priority.NORMAL


@dataclass(frozen=True, slots=True)
class Refill:
    """Ask the store for deliveries of one domain that claims passed over."""

    domain: str
    limit: int
    priority: Priority = Priority.NORMAL


Question = Claim | NewClaim | Refill


class Shares:
    """Those of one priority; `waiting` is what the whole zone has of it in memory."""

    def __init__(self, window: int, crowd: int, priority: Priority = Priority.NORMAL) -> None:
        self.priority = priority
        self.waiting = 0
        self.newcomers = Newcomers(window, crowd)
        self.refilled_last = False
        self._window = window
        self._usual = max(1, window // 8)
        self._crowded = max(1, window // 64)
        self._long: dict[Backlog, None] = {}
        self._hungry: dict[Backlog, None] = {}
        """Short lines whose passed-over domains can be fetched."""
        self._hungry_new: dict[Backlog, None] = {}
        """Those of which what was passed over is new, as far as is known."""
        self._turn_of_new = False
        self._resting: set[Backlog] = set()
        self._skip: set[str] = set()
        self._frozen: frozenset[str] | None = frozenset()

    @property
    def is_resting(self) -> bool:
        """A line rests; in a zone with one next hop there is no other."""
        return bool(self._resting)

    @property
    def room(self) -> int:
        """For what is not known to be new; no more than window and newcomers' places are ever in memory."""
        return self._window - self.waiting + min(self.newcomers.waiting, self.newcomers.most)

    @property
    def new_room(self) -> int:
        """For new mail only."""
        newcomers = self.newcomers
        if newcomers.since is None:
            return 0
        return min(newcomers.most - newcomers.waiting, self._window + newcomers.most - self.waiting)

    @property
    def wants_refill(self) -> bool:
        """There is room, and perhaps something that was passed over."""
        room = self.room
        if room > 0:
            return bool(self._hungry or self._hungry_new)
        return bool(self._hungry_new) and self.new_room > 0

    def entered(self, deliveries: Sequence[Delivery]) -> None:
        """They wait in memory now."""
        self.waiting += len(deliveries)
        if self.newcomers.since is not None:
            self.newcomers.entered(deliveries)

    def left(self, deliveries: Sequence[Delivery]) -> None:
        """They no longer wait."""
        self.waiting -= len(deliveries)
        if self.newcomers.since is not None:
            self.newcomers.left(deliveries)

    def share(self, line: Backlog) -> int:
        """How many of a line may wait. Of new mail half as many as there are places left: alone it may have a
        third of them, and many lines leave some for one more (dynamic thresholds, Choudhury and Hahne 1998).
        """
        if self.waiting * 2 < self._window:
            return self._usual
        return max(self._crowded, self.new_room // 2) if line.is_new else self._crowded

    def grew(self, line: Backlog) -> None:
        if line.waiting >= self._crowded:
            self._long[line] = None

    def shortened(self, line: Backlog) -> None:
        if line.passed_over and self._is_short(line) and line not in self._resting:
            (self._hungry_new if line.is_new else self._hungry)[line] = None
        if self._long and line.waiting < self._crowded:
            self._long.pop(line, None)

    def rest(self, line: Backlog) -> None:
        """Fetch nothing for the line until `rested`: its destination is suspended."""
        self._resting.add(line)
        self._sate(line)

    def rested(self, line: Backlog) -> None:
        self._resting.discard(line)
        self.shortened(line)

    def forget(self, line: Backlog) -> None:
        """The line is no longer in use; its passed-over domains have moved."""
        self._long.pop(line, None)
        self._resting.discard(line)
        self._sate(line)

    def may_pass_over(self) -> bool:
        return len(self._skip) < MAX_PASSED_OVER

    def pass_over(self, line: Backlog, domain: str) -> None:
        if domain not in self._skip:
            self._skip.add(domain)
            self._frozen = None
            line.passed_over[domain] = None

    def skip_list(self) -> frozenset[str]:
        """The domains that the next claim passes over."""
        for line in self._long:
            if line.waiting >= self.share(line) and self.may_pass_over():
                for domain in line.domains:
                    self.pass_over(line, domain)
        if self._frozen is None:
            self._frozen = frozenset(self._skip)
        return self._frozen

    def plan_refill(self) -> Refill | None:
        """Of new mail and of other mail by turns, as there is room."""
        self._turn_of_new = not self._turn_of_new
        for new in (self._turn_of_new, not self._turn_of_new):
            # What is new may have any room, or it would wait for its places while the window is empty.
            places = max(self.room, self.new_room) if new else self.room
            if places > 0 and (refill := self._refill(self._hungry_new if new else self._hungry, places)):
                return refill
        return None

    def _refill(self, hungry: dict[Backlog, None], places: int) -> Refill | None:
        for line in list(hungry):
            if not line.passed_over or not self._is_short(line):
                self._sate(line)
                continue
            if line.is_new is not (hungry is self._hungry_new):
                self._sate(line)
                self.shortened(line)
                continue
            domain = next(iter(line.passed_over))
            # To the end: the domains of one destination take turns.
            del line.passed_over[domain]
            line.passed_over[domain] = None
            return Refill(domain, min(self.share(line) - line.waiting, places), self.priority)
        return None

    def _sate(self, line: Backlog) -> None:
        self._hungry.pop(line, None)
        self._hungry_new.pop(line, None)

    def exhausted(self, line: Backlog, domain: str) -> None:
        """The store has no more passed-over deliveries of the domain: claims may return it again."""
        self._skip.discard(domain)
        self._frozen = None
        line.passed_over.pop(domain, None)
        if not line.passed_over:
            self._sate(line)

    def _is_short(self, line: Backlog) -> bool:
        return line.waiting * 2 < self.share(line)
