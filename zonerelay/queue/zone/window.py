"""Determines how much of a zone's mail is kept in memory (its window), and what is claimed next. Pure.

There is a window for each priority (`PriorityWindow`), which is created when its first mail arrives, so a
long bulk queue leaves space for urgent mail. `Precedence` chooses between their claims. A zone with one route
claims more only when little mail waits, because one claim then returns hundreds of deliveries instead of one.
While its next hop is suspended it claims nothing, and until the probe has succeeded it claims little, because
all of it is deferred if the probe fails.

In a zone routed by MX a line may hold an eighth of the window, and a sixty-fourth once the window is half
full. A line of new mail may hold more while new mail has free places. Claims skip the domains of a line that
holds its share (they are *passed over*). When the line has drained to half of its share, those domains are
claimed by name, one after the other, until the store has no more of them. New mail that was passed over is
claimed into the places of new mail, because otherwise the backlog, which takes all other places, would come
before it. Promise: a domain that is passed over belongs to a line, and a line that is short and has such
domains is in `_hungry` or `_hungry_new`, so everything that was passed over is claimed in the end.

New mail and backlog: a sender's mail for an idle host must not wait behind a hundred thousand earlier
messages for other hosts. So when more than `crowd` deliveries wait in memory, everything that was accepted
until then becomes *backlog*, however much of it is still in the store, and is treated like deferred mail
(`destination/backlog.py`). Mail that is accepted from then on is *new*. It has its own claims, which
alternate with the others; `new_most` places in memory in addition to the window; and the precedence of fresh
mail in look-ups, in the round robin, among unproven destinations and in each line. So a sender with an
ordinary amount of mail hardly notices a backlog, the backlog has its share however much new mail arrives, and
all new mail leaves. When new mail has used up its places it becomes backlog too, and the boundary is moved:
at once while the window has space for it, otherwise at most every `AGAIN` seconds, because newer mail would
gradually fill the window. The backlog ends when the store has no more and little waits. While little waits,
nothing is counted.
"""

from collections.abc import Sequence

import msgspec

from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import MessageId, Priority, first_at
from zonerelay.queue.destination.backlog import STRIDE, Backlog, DestinationQueue, Precedence

LOW_MARK = 1000
CLAIM_LIMIT = 500
PROBED = 20
"""Deliveries in memory while the only next hop of a zone is being probed."""
MAX_PASSED_OVER = 10_000
"""Domain names kept per priority. When there are more, long lines may fill the window, so memory stays
bounded.
"""
AGAIN = 60.0


class ClaimRequest(msgspec.Struct, frozen=True, gc=False):
    """A request to claim the oldest due deliveries from the store, except those to the domains in `skip`.
    With `since` it is one of new mail. With `domain` it is a *refill*, of what earlier claims passed over.
    """

    limit: int
    skip: frozenset[str] = frozenset()
    priority: Priority = Priority.NORMAL
    since: MessageId | None = None
    domain: str | None = None

    @property
    def is_of_backlog(self) -> bool:
        return self.since is None and self.domain is None


class PriorityWindow:
    """The mail of one priority that a zone has in memory: `waiting` deliveries, of which `new_waiting` are
    new.
    """

    def __init__(self, size: int, crowd: int, priority: Priority = Priority.NORMAL) -> None:
        self.priority = priority
        self.waiting = 0
        self.new_waiting = 0
        self.new_most = max(1, size // 4)
        self.since: MessageId | None = None
        """The first message id that is new, or None if there is no backlog."""
        self.new_is_next = True
        """Whether the next claim is one of new mail if other mail waits for a claim, too."""
        self.refilled_last = False
        self.has_more = False
        """Whether the store may hold due deliveries."""
        self.has_new = False
        """Whether the store may hold new mail."""
        self.is_due_unknown = False
        self.claimed_at = 0.0
        self._size = size
        self._crowd = crowd
        self._drawn = 0.0
        self._usual = max(1, size // 8)
        self._crowded = max(1, size // 64)
        self._long: dict[Backlog, None] = {}
        self._hungry: dict[Backlog, None] = {}
        """Short lines whose passed-over domains can be claimed."""
        self._hungry_new: dict[Backlog, None] = {}
        """Those of the short lines whose passed-over mail is new, as far as is known."""
        self._refills_new = False
        self._resting: set[Backlog] = set()
        self._skip: set[str] = set()

    @property
    def is_resting(self) -> bool:
        """Whether the mail of any suspended destination is excluded from claims. A zone with one next hop has
        only one.
        """
        return bool(self._resting)

    @property
    def room(self) -> int:
        """The number of deliveries for which there is room in memory, whether or not they are new. Memory
        never holds more than the window and the places of new mail.
        """
        return self._size - self.waiting + min(self.new_waiting, self.new_most)

    @property
    def new_room(self) -> int:
        """The number of new deliveries for which there is reserved room in memory (0 without a backlog)."""
        if self.since is None:
            return 0
        return self.new_most - max(self.new_waiting, self.waiting - self._size)

    @property
    def wants_new(self) -> bool:
        """Whether there is room for new mail that the store may hold."""
        return self.has_new and self.new_room > 0

    def look(self, *, due: bool = True) -> None:
        """Record that the store may hold mail to claim, and with `due` also mail that becomes due later."""
        self.has_more = self.has_new = True
        self.is_due_unknown = self.is_due_unknown or due

    @property
    def wants_refill(self) -> bool:
        """Whether there is room for deliveries that earlier claims may have skipped."""
        if not (self._hungry or self._hungry_new):
            return False
        return self.room > 0 or (bool(self._hungry_new) and self.new_room > 0)

    def entered(self, deliveries: Sequence[Delivery]) -> None:
        """Count deliveries that were added to memory."""
        self.waiting += len(deliveries)
        if self.since is not None:
            self.new_waiting += sum(map(self.is_new, deliveries))

    def left(self, deliveries: Sequence[Delivery]) -> None:
        """Count deliveries that were removed from memory."""
        self.waiting -= len(deliveries)
        if self.since is not None:
            self.new_waiting -= sum(map(self.is_new, deliveries))

    # New mail

    def is_new(self, delivery: Delivery) -> bool:
        return self.since is not None and self.is_fresh(delivery)

    def is_fresh(self, delivery: Delivery) -> bool:
        """Return whether a delivery was not attempted before and is not backlog."""
        return delivery.next_attempt <= 0 and (self.since is None or delivery.message_id >= self.since)

    def is_to_be_drawn(self, now: float) -> bool:
        """Return whether there is so much queued mail that it should be declared backlog now."""
        if self.since is None:
            return self.waiting > self._crowd
        if self.new_waiting < self.new_most:
            return False
        return self.waiting <= self._size or not self._drawn <= now < self._drawn + AGAIN

    def is_drawn_earlier(self, now: float) -> bool:
        """Return whether the clock was set back, so that some of the backlog becomes new."""
        return now < self._drawn

    def draw(self, now: float) -> MessageId:
        """Declare all mail accepted before `now` to be backlog, and return the first message id of new mail.
        The caller counts the new deliveries among the waiting ones.
        """
        self._drawn = now
        self.new_waiting = 0
        self.since = first_at(now)
        return self.since

    def claimed_all(self) -> None:
        """Record that the store has nothing more to claim. If little mail is waiting, there is no backlog any
        more.
        """
        if self.since is not None and self.waiting <= self._crowd // 2:
            self.since = None
            self.new_waiting = 0

    # Shares

    def takes(self, line: Backlog, domain: str) -> bool:
        """Return whether a destination queue has room for a new delivery that was just stored."""
        return domain not in self._skip and line.waiting < self.share(line)

    def share(self, line: Backlog) -> int:
        """Return how many deliveries to one destination may be in memory. A destination with new mail may
        have half as many as there are free places. A single such destination then gets a third of the places,
        and many of them leave some for another one (dynamic thresholds, Choudhury and Hahne 1998).
        """
        if self.waiting * 2 < self._size:
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
        """Exclude the mail of a suspended destination from claims until `rested` is called."""
        self._resting.add(line)
        self._sate(line)

    def rested(self, line: Backlog) -> None:
        self._resting.discard(line)
        self.shortened(line)

    def forget(self, line: Backlog) -> None:
        """Remove the queue of an unused destination. Its skipped domains have moved to another queue."""
        self._long.pop(line, None)
        self._resting.discard(line)
        self._sate(line)

    def may_pass_over(self) -> bool:
        return len(self._skip) < MAX_PASSED_OVER

    def pass_over(self, line: Backlog, domain: str) -> None:
        if domain not in self._skip:
            self._skip.add(domain)
            line.passed_over[domain] = None

    def skip_list(self) -> frozenset[str]:
        """Return the domains whose mail the next claim skips, because enough of it is in memory."""
        for line in self._long:
            if line.waiting >= self.share(line) and self.may_pass_over():
                for domain in line.domains:
                    self.pass_over(line, domain)
        return frozenset(self._skip)

    def plan_refill(self) -> ClaimRequest | None:
        """Return the next claim of deliveries that earlier claims skipped, or None. New mail and the rest
        take turns, as far as the window has room for them.
        """
        self._refills_new = not self._refills_new
        for new in (self._refills_new, not self._refills_new):
            # New mail may use any free place. Otherwise it would wait for its own places while the window is
            # empty.
            places = max(self.room, self.new_room) if new else self.room
            if places > 0 and (refill := self._refill(self._hungry_new if new else self._hungry, places)):
                return refill
        return None

    def _refill(self, hungry: dict[Backlog, None], places: int) -> ClaimRequest | None:
        for line in list(hungry):
            if not line.passed_over or not self._is_short(line):
                self._sate(line)
                continue
            if line.is_new is not (hungry is self._hungry_new):
                self._sate(line)
                self.shortened(line)
                continue
            domain = next(iter(line.passed_over))
            # Move it to the end, so that the domains of one destination alternate.
            del line.passed_over[domain]
            line.passed_over[domain] = None
            limit = min(self.share(line) - line.waiting, places)
            return ClaimRequest(limit, priority=self.priority, domain=domain)
        return None

    def _sate(self, line: Backlog) -> None:
        self._hungry.pop(line, None)
        self._hungry_new.pop(line, None)

    def exhausted(self, line: Backlog, domain: str) -> None:
        """Record that the store has no more skipped mail of a domain, so that claims no longer skip it."""
        self._skip.discard(domain)
        line.passed_over.pop(domain, None)
        if not line.passed_over:
            self._sate(line)

    def _is_short(self, line: Backlog) -> bool:
        return line.waiting * 2 < self.share(line)


class QueueWindow:
    """Limits the mail that one zone has in memory, separately for each priority. `by_domain` is true if the
    zone is routed by MX.
    """

    def __init__(self, size: int, *, by_domain: bool) -> None:
        self._size = size
        self._low_mark = min(LOW_MARK, max(1, size // 4))
        self._by_domain = by_domain
        # The share of one line, because all deliveries of a claim may be for one host. Only afterwards is its
        # line known to be long, and the host may have only one connection until it answers.
        self._claim_limit = min(CLAIM_LIMIT, max(1, size // 8)) if by_domain else CLAIM_LIMIT
        self._probed = min(PROBED, size)
        self.is_probing = False
        """Whether the zone's only next hop has failed and has not answered since."""
        self.windows = {Priority.NORMAL: PriorityWindow(size, self._low_mark)}
        """The windows of the priorities of which the zone has or has had mail."""
        self._precedence = Precedence()

    def of(self, priority: Priority) -> PriorityWindow:
        window = self.windows.get(priority)
        if window is None:
            window = self.windows[priority] = PriorityWindow(self._size, self._low_mark, priority)
        return window

    def new_places(self, window: PriorityWindow, delivery: Delivery) -> int:
        """Return how many of the deliveries that were just stored, beginning with `delivery`, may be added
        without a claim.
        """
        if not self._by_domain:
            most = self._probed if self.is_probing else self._size
            return 0 if window.is_resting else most - window.waiting
        return min(self._claim_limit, window.new_room if window.is_new(delivery) else window.room)

    @property
    def waiting(self) -> int:
        return sum(window.waiting for window in self.windows.values())

    @property
    def is_crowded(self) -> bool:
        """Whether enough mail is queued that the next claim can be postponed."""
        return self.waiting >= self._low_mark

    @property
    def is_half_full(self) -> bool:
        return self.waiting * 2 >= self._size

    def wants(self) -> bool:
        """Return whether to query the store: for deliveries to claim, or for the next due time."""
        for window in self.windows.values():
            if self._wants_more(window) or window.wants_new:
                return True
        return self.wants_due()

    def wants_due(self) -> bool:
        """Return whether to query the store for the next due time only, because no mail is ready to be
        claimed.
        """
        is_unknown = False
        for window in self.windows.values():
            if window.has_more:
                return False
            is_unknown = is_unknown or window.is_due_unknown
        return is_unknown

    def next(self, now: float) -> ClaimRequest | None:
        """Return the next claim, or None. Pass the number of its deliveries to `claimed`."""
        windows = self.windows.items()
        wanted = [each for each, window in windows if self._wants_more(window) or window.wants_new]
        if not wanted:
            return None
        window = self.windows[wanted[0] if len(wanted) == 1 else self._precedence.pick(wanted)]
        is_new = window.wants_new
        if is_new and window.new_is_next:
            window.new_is_next = False
            return self._newer(window)
        window.new_is_next = True
        request = self._plan(window, now) if self._wants_more(window) else None
        return self._newer(window) if request is None and is_new else request

    def _newer(self, window: PriorityWindow) -> ClaimRequest:
        window.has_new = False
        limit = min(CLAIM_LIMIT, window.new_room)
        return ClaimRequest(limit, window.skip_list(), window.priority, since=window.since)

    def claimed(self, request: ClaimRequest, count: int) -> None:
        """Record that a claim returned `count` deliveries."""
        window, is_full = self.windows[request.priority], count >= request.limit
        if request.since is not None:
            window.has_new = window.has_new or is_full
        elif is_full is request.is_of_backlog:
            # A domain of which there is no more is no longer passed over, so a claim may find what was
            # released since.
            window.has_more = True
        if request.is_of_backlog and not is_full:
            window.claimed_all()

    def drain(self, line: DestinationQueue) -> list[Delivery]:
        """Remove and return all deliveries to a destination, most urgent first."""
        deliveries: list[Delivery] = []
        for priority in sorted(line.backlogs, key=STRIDE.__getitem__):
            drained = line.drain(priority)
            self.of(priority).left(drained)
            deliveries += drained
        return deliveries

    def forget(self, line: DestinationQueue) -> None:
        """Remove the queues of an unused destination."""
        for priority, backlog in line.backlogs.items():
            self.of(priority).forget(backlog)

    def _wants_more(self, window: PriorityWindow) -> bool:
        if not self._by_domain:
            most = self._probed if self.is_probing else self._low_mark
            return window.has_more and window.waiting < most and not window.is_resting
        return (window.has_more and window.room > 0) or window.wants_refill

    def _plan(self, window: PriorityWindow, now: float) -> ClaimRequest | None:
        # Claims and refills alternate, so that neither new mail nor passed-over mail waits for the other.
        may_claim = window.has_more and window.room > 0
        if not may_claim or not window.refilled_last:
            refill = window.plan_refill()
            if refill is not None or not may_claim:
                window.refilled_last = True
                return refill
        window.refilled_last = window.has_more = False
        window.claimed_at = now
        most = self._probed if self.is_probing else self._claim_limit
        return ClaimRequest(min(most, window.room), window.skip_list(), window.priority)
