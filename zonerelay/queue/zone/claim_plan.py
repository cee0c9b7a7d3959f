"""What to ask the store for next: is there room, whose turn is it, which domains are passed over. Pure.

There is a window for each priority (`window.py`), made when the first mail of it comes; their claims take
turns (`precedence.py`). While there is a backlog new mail has claims of its own (`window.py`), every
other one where both have something to ask for. A zone with one route asks for more only when little waits,
because then one claim brings hundreds of deliveries, not one each; for nothing while its next hop is
suspended; and for little until the probe has succeeded, because all of it is put off if the probe fails.
"""

from __future__ import annotations

from collections.abc import Collection

from zonerelay.model.delivery import Delivery
from zonerelay.model.priority import Priority
from zonerelay.queue.destination.destinations import Line
from zonerelay.queue.destination.precedence import STRIDE, Precedence
from zonerelay.queue.zone.window_shares import Claim, NewClaim, Question, Refill, Shares

LOW_MARK = 1000
CLAIM_LIMIT = 500
PROBED = 20
"""Deliveries in memory while the only next hop of a zone is being probed."""

_NOBODY: frozenset[str] = frozenset()


class ClaimPlan:
    """Of one zone; `by_domain`: it is routed by MX."""

    def __init__(self, window: int, *, by_domain: bool) -> None:
        self._window = window
        self._low_mark = min(LOW_MARK, max(1, window // 4))
        self._by_domain = by_domain
        self.is_probing = False
        """The zone's only next hop has failed, and nothing has been heard from it since."""
        self._normal = Shares(window, self._low_mark)
        self._shares = {Priority.NORMAL: self._normal}
        self._precedence = Precedence()

    def of(self, priority: Priority) -> Shares:
        shares = self._shares.get(priority)
        if shares is None:
            shares = self._shares[priority] = Shares(self._window, self._low_mark, priority)
        return shares

    @property
    def waiting(self) -> int:
        return sum(shares.waiting for shares in self._shares.values())

    @property
    def is_crowded(self) -> bool:
        """Enough waits that the next claim may wait for company."""
        return self.waiting >= self._low_mark

    @property
    def is_half_full(self) -> bool:
        return self.waiting * 2 >= self._window

    def wants(self, more: Collection[Priority], new: Collection[Priority] = ()) -> bool:
        """There is room, and perhaps something to claim; of `more` the store may hold due deliveries, of
        `new` new ones.
        """
        if len(self._shares) == 1 and (not more or (Priority.NORMAL in more and len(more) == 1)):
            shares = self._normal
            return self._wants(shares, bool(more)) or (bool(new) and shares.new_room > 0)
        return bool(self._wanted(more, new))

    def next(self, more: Collection[Priority], new: Collection[Priority] = ()) -> Question | None:
        wanted = self._wanted(more, new)
        if not wanted:
            return None
        priority = wanted[0] if len(wanted) == 1 else self._precedence.pick(wanted)
        shares = self._shares[priority]
        newcomers, is_new = shares.newcomers, priority in new and shares.new_room > 0
        if is_new and newcomers.turn:
            newcomers.turn = False
            return self._newer(shares)
        newcomers.turn = True
        plan = self._plan(shares, priority in more) if self._wants(shares, priority in more) else None
        return self._newer(shares) if plan is None and is_new else plan

    def _newer(self, shares: Shares) -> NewClaim:
        since = shares.newcomers.since
        assert since is not None
        return NewClaim(min(CLAIM_LIMIT, shares.new_room), shares.skip_list(), since, shares.priority)

    def claimed(self, plan: Question, count: int) -> None:
        """A claim was answered."""
        if isinstance(plan, Claim) and count < plan.limit:
            shares = self._shares[plan.priority]
            shares.newcomers.exhausted(shares.waiting)

    def drain(self, line: Line) -> list[Delivery]:
        """Everything that waits there, what is urgent first; it no longer waits."""
        deliveries: list[Delivery] = []
        for priority in sorted(line.backlogs, key=STRIDE.__getitem__):
            drained = line.drain(priority)
            self.of(priority).left(drained)
            deliveries += drained
        return deliveries

    def forget(self, line: Line) -> None:
        """The line is no longer in use."""
        for priority, backlog in line.backlogs.items():
            self.of(priority).forget(backlog)

    def _wanted(self, more: Collection[Priority], new: Collection[Priority]) -> list[Priority]:
        for priority in more:
            self.of(priority)
        return [
            each
            for each, shares in self._shares.items()
            if self._wants(shares, each in more) or (each in new and shares.new_room > 0)
        ]

    def _wants(self, shares: Shares, more: bool) -> bool:
        if not self._by_domain:
            most = PROBED if self.is_probing else self._low_mark
            return more and shares.waiting < most and not shares.is_resting
        return (more and shares.room > 0) or shares.wants_refill

    def _plan(self, shares: Shares, more: bool) -> Claim | Refill | None:
        # By turns, so that neither new mail nor what was passed over waits for the other.
        may_claim = more and shares.room > 0
        if not may_claim or not shares.refilled_last:
            refill = shares.plan_refill()
            if refill is not None or not may_claim:
                shares.refilled_last = True
                return refill
        shares.refilled_last = False
        skip = shares.skip_list() if self._by_domain else _NOBODY
        most = PROBED if self.is_probing else CLAIM_LIMIT
        return Claim(min(most, shares.room), skip, shares.priority)
