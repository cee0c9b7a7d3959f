"""Suspends a destination after failures, and decides when the relay may connect to it again. Pure: `now` is a
parameter.

    open ──a batch finds no host that replies──▶ suspended ──its time is over──▶ probing ──success──▶ open
                                                    ▲                               │
                                                    └────── failure, twice as long ─────┘

If there is no free connection for a probe, the suspension begins again with the same duration.

A failure of a transaction that began before the present suspension is no news and changes nothing. Nor does a
failure while other transactions are active suspend the destination (a peer may reply 421 to the third
connection). It lowers the connection limit to the number of those others, and no more connections are opened.
If they fail as well, the last failure suspends the destination, as one failure, and the lowered limit is
discarded. Successes raise a lowered limit again; each time it was raised in vain, more of them are needed.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from zonerelay.config.settings import RetrySettings
from zonerelay.model.outcome import Outcome, Scope, Verdict
from zonerelay.model.reply import TLS_REQUIRED, Reply

MOST_PATIENCE = 64
"""How many times as many successes are needed to raise a limit that was raised in vain again and again,
because each try defers a message.
"""


PUT_OFF_RATE = 200.0
"""Deliveries per second that are put off for one destination. Each costs a write and a log line, so hundreds
of thousands for a dead host would delay other mail after every probe.
"""
PUT_OFF_MOST = 1000
"""Deliveries that are put off in one suspension. Of the others, only those that may expire or owe a warning
are put off.
"""


class Transition(enum.Enum):
    """A change of the suspension state."""

    NONE = enum.auto()
    SUSPENDED = enum.auto()
    RESUMED = enum.auto()


class Suspension(msgspec.Struct, eq=False, gc=False):
    """The suspension state of one destination.

    It refers to nothing that refers to it, so the garbage collector need not inspect thousands of them
    (`gc=False`).
    """

    _settings: RetrySettings
    _failures: int = 0
    _ceiling: int | None = None
    _since_raise: int = 0
    _raised: bool = False
    _patience: int = 1
    _last_place: float = 0.0
    _is_over: bool = False
    since: float = 0.0
    until: float = 0.0
    put_off: int = 0
    """Deliveries put off since the suspension began."""
    epoch: int = 0
    is_proven: bool = False
    """Whether the last that the peer did was to reply about some mail."""
    reply: Reply | None = None

    def is_suspended(self, now: float) -> bool:
        # the clock was set back
        return self.since <= now < self.until and not self._is_over

    def end(self) -> None:
        """End the suspension; the next delivery is a probe. This holds even if the clock is set back
        later.
        """
        self._is_over = True

    @property
    def is_failing(self) -> bool:
        """Whether the destination is suspended or being probed."""
        return self._failures > 0

    def is_forgettable(self, now: float) -> bool:
        """Return whether this state can be discarded, because there was no failure recently."""
        return not self._failures or now >= self.until + self._longest()

    def limit(self, configured: int, now: float) -> int:
        """Return how many transactions may be active now."""
        if self._failures:
            return 0 if self.is_suspended(now) else 1
        return configured if self._ceiling is None else min(configured, self._ceiling)

    def duration(self) -> float:
        """Return the duration in seconds of the present or the last suspension."""
        return min(self._settings.suspend_min * 2.0 ** min(self._failures - 1, 30), self._longest())

    def _longest(self) -> float:
        return max(self._settings.suspend_min, self._settings.suspend_max)

    def place(self) -> float:
        """Return the time at which the next postponed delivery is checked, at `PUT_OFF_RATE`."""
        self._last_place = max(self._last_place, self.until) + 1 / PUT_OFF_RATE
        return self._last_place

    def failed(self, epoch: int, reply: Reply, others: int, now: float) -> Transition:
        """Note that a transaction reached no host while `others` were active."""
        self.reply = reply
        if epoch != self.epoch:
            return Transition.NONE
        if others and not self._failures:
            self._lower_ceiling(others)
            return Transition.NONE
        self._failures += 1
        self.epoch += 1
        self.is_proven = False
        self._ceiling, self._raised, self._patience = None, False, 1
        self.wait(now)
        return Transition.SUSPENDED

    def succeeded(self, epoch: int) -> Transition:
        """Record that a peer replied, whatever the reply was."""
        if self._failures:
            # A connection from before the suspension proves nothing about new ones.
            self.is_proven = epoch == self.epoch
            return self.resume() if self.is_proven else Transition.NONE
        self.is_proven = True
        if self._ceiling is not None:
            self._raise_ceiling(self._ceiling)
        return Transition.NONE

    def take_at_most(self, connections: int) -> None:
        """Note that the hosts refused mail on one more connection than these, and accepted it on one of
        these.
        """
        if not self._failures and (self._ceiling is None or connections < self._ceiling):
            self._lower_ceiling(connections)

    def wait(self, now: float) -> None:
        """Restart the suspension, because the probe failed or no connection was free for it."""
        self._is_over = False
        self.put_off = 0
        if now < self.since:
            self._last_place = 0.0  # the clock was set back
        self.since = now
        self.until = now + self.duration()

    def resume(self) -> Transition:
        """Lift the suspension, because a probe succeeded or an operator requested it."""
        if not self._failures:
            return Transition.NONE
        self._failures = 0
        self.until = 0.0
        return Transition.RESUMED

    def _lower_ceiling(self, others: int) -> None:
        if self._raised:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        self._ceiling, self._since_raise, self._raised = others, 0, False

    def _raise_ceiling(self, ceiling: int) -> None:
        self._since_raise += 1
        if self._since_raise >= ceiling * self._patience:
            if self._raised:
                self._patience = 1
            self._ceiling, self._since_raise, self._raised = ceiling + 1, 0, True


def suspended(reply: Reply | None) -> Reply:
    """Return the reply for mail that is not attempted because its hosts gave `reply` before."""
    return Reply(451, "4.1", f"delivery temporarily suspended: {reply}")


def learn(
    suspension: Suspension,
    outcomes: Sequence[Outcome],
    *,
    epoch: int,
    others: int,
    now: float,
) -> Transition:
    """Update the suspension from the outcomes of an attempt. Without outcomes it contacted no peer."""
    if outcomes and outcomes[0].verdict is Verdict.DELIVERED:
        return suspension.succeeded(epoch)
    failure = _host_failure(outcomes)
    if failure is not None:
        return suspension.failed(epoch, failure.reply, others, now)
    if not any(_talked(outcome) for outcome in outcomes):
        return Transition.NONE
    transition = suspension.succeeded(epoch)
    # The peer stopped replying in the middle of the transaction. This does not count if it replied to
    # everything and a message requires more TLS than it offers.
    if all(outcome.local and outcome.reply.detail != TLS_REQUIRED for outcome in outcomes):
        suspension.is_proven = False
    return transition


def _talked(outcome: Outcome) -> bool:
    """Return whether a peer replied, whatever the reply was."""
    if outcome.scope is Scope.HOST:
        return outcome.verdict is not Verdict.DEFERRED
    return outcome.scope is Scope.RECIPIENT or outcome.scope is Scope.MESSAGE


def _host_failure(outcomes: Sequence[Outcome]) -> Outcome | None:
    """Return the first outcome if no host replied to the batch; otherwise None."""
    if not outcomes or outcomes[0].scope is not Scope.HOST:
        return None
    if all(outcome.scope is Scope.HOST and not _talked(outcome) for outcome in outcomes):
        return outcomes[0]
    return None
