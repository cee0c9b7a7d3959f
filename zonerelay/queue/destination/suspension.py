"""The suspension of a destination: whether it may be connected to now. Pure: `now` is a parameter.

    open ──a batch finds no host that talks──▶ suspended ──its time is over──▶ probing ──success──▶ open
                                                   ▲                              │
                                                   └────────── failure, twice as long ──┘

A probe for which there is no room waits as long again.

A failure of a transaction that began before the present suspension says nothing new and changes
nothing. A failure while other transactions are under way is not the destination's end either (a peer that
answers 421 to the third connection): it lowers the ceiling to those others, and no more are opened. Do they
fail as well, the last one suspends, as one failure, and nothing was learned about ceilings. Successes raise
a ceiling again; where it was raised in vain, each time more of them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec

from zonerelay.config.settings import RetrySettings
from zonerelay.model.outcome import Outcome, Scope, Verdict
from zonerelay.model.reply import TLS_REQUIRED, Reply

MOST_PATIENCE = 64
"""How many times as many successes it takes to raise a ceiling that was raised in vain again and again: each
try costs a message a deferral.
"""


PUT_OFF_RATE = 200.0
"""Deliveries a second that are put off for one destination.
Each costs a write and a line in the log: hundreds of thousands for a dead host would hold up other mail after
every probe.
"""
PUT_OFF_MOST = 1000
"""Deliveries that are put off in one suspension; of the others only those whose age demands it."""


class Transition(enum.Enum):
    NONE = enum.auto()
    SUSPENDED = enum.auto()
    RESUMED = enum.auto()


class Suspension(msgspec.Struct, eq=False, gc=False):
    """The state of one destination.

    It refers to nothing that refers to it, so the garbage collector need not look at thousands (`gc=False`).
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
    """Deliveries, since the suspension began."""
    epoch: int = 0
    is_proven: bool = False
    """The last that was heard from a peer was an answer, about some mail."""
    reply: Reply | None = None

    def is_suspended(self, now: float) -> bool:
        # Before `since` the clock was set back: the suspension would last as much longer.
        return self.since <= now < self.until and not self._is_over

    def end(self) -> None:
        """Its time is over and something waits for the probe, also when the clock is set back then."""
        self._is_over = True

    @property
    def is_troubled(self) -> bool:
        """Suspended, or waiting for the probe that ends it."""
        return self._failures > 0

    def is_forgettable(self, now: float) -> bool:
        """Nothing is lost by starting afresh: no trouble, or none for as long as a suspension can last."""
        return not self._failures or now >= self.until + self._longest()

    def limit(self, configured: int, now: float) -> int:
        """How many transactions may be active now."""
        if self._failures:
            return 0 if self.is_suspended(now) else 1
        return configured if self._ceiling is None else min(configured, self._ceiling)

    def duration(self) -> float:
        """Of the present or the last suspension."""
        return min(self._settings.suspend_min * 2.0 ** min(self._failures - 1, 30), self._longest())

    def _longest(self) -> float:
        return max(self._settings.suspend_min, self._settings.suspend_max)

    def place(self) -> float:
        """When to look again at one more that is put off: behind those before it, at `PUT_OFF_RATE`."""
        self._last_place = max(self._last_place, self.until) + 1 / PUT_OFF_RATE
        return self._last_place

    def failed(self, epoch: int, reply: Reply, others: int, now: float) -> Transition:
        """A transaction reached no host while `others` are active."""
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
        """A peer talked to us, whatever it said about the mail."""
        if self._failures:
            # A connection from before the suspension proves nothing about new ones.
            self.is_proven = epoch == self.epoch
            return self.resume() if self.is_proven else Transition.NONE
        self.is_proven = True
        if self._ceiling is not None:
            self._raise_ceiling(self._ceiling)
        return Transition.NONE

    def take_at_most(self, connections: int) -> None:
        """The hosts have refused mail on a connection more, and took it on one of these."""
        if not self._failures and (self._ceiling is None or connections < self._ceiling):
            self._lower_ceiling(connections)

    def wait(self, now: float) -> None:
        """There is no room for the probe: the suspension begins again."""
        self._is_over = False
        self.put_off = 0
        if now < self.since:
            self._last_place = 0.0  # the clock was set back
        self.since = now
        self.until = now + self.duration()

    def resume(self) -> Transition:
        """Open again: a probe got through, or an operator said so."""
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
    """Return the reply for mail that is not tried because its hosts gave this one."""
    return Reply(451, "4.1", f"delivery temporarily suspended: {reply}")


def learn(
    suspension: Suspension,
    outcomes: Sequence[Outcome],
    *,
    epoch: int,
    others: int,
    now: float,
) -> Transition:
    """What an attempt says about the hosts; no outcomes: it never reached out."""
    if outcomes and outcomes[0].verdict is Verdict.DELIVERED:
        return suspension.succeeded(epoch)
    failure = _host_failure(outcomes)
    if failure is not None:
        return suspension.failed(epoch, failure.reply, others, now)
    if not any(_talked(outcome) for outcome in outcomes):
        return Transition.NONE
    transition = suspension.succeeded(epoch)
    # It began to talk, and then we heard no more; or it said all that we asked, and a message wants more TLS.
    if all(outcome.local and outcome.reply.detail != TLS_REQUIRED for outcome in outcomes):
        suspension.is_proven = False
    return transition


def _talked(outcome: Outcome) -> bool:
    """A peer had its say, whatever it said."""
    if outcome.scope is Scope.HOST:
        return outcome.verdict is not Verdict.DEFERRED
    return outcome.scope is Scope.RECIPIENT or outcome.scope is Scope.MESSAGE


def _host_failure(outcomes: Sequence[Outcome]) -> Outcome | None:
    """The first outcome when the whole batch found no host that would talk, else `None`."""
    if not outcomes or outcomes[0].scope is not Scope.HOST:
        return None
    if all(outcome.scope is Scope.HOST and not _talked(outcome) for outcome in outcomes):
        return outcomes[0]
    return None
