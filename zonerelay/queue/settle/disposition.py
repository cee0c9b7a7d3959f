"""The disposition of a delivery: its new durable state after an outcome, and the report that it owes. No I/O.

Policy, in this order:

- delivered: the delivery leaves. A report is owed if the sender requested one (NOTIFY=SUCCESS) and the peer
  cannot send it because it does not support DSN.
- in doubt (the connection was lost after the final dot): the setting of the zone applies. `retry` treats it
  as a deferral, `hold` keeps it until an operator releases it, and `bounce` treats it as a refusal.
- bounced: the delivery leaves with a failure report.
- deferred: the retry policy determines the next attempt. If there is none (too old, too many attempts), the
  delivery expires, which is a failure. An error of the relay itself (`Scope.LOCAL`) does not count as an
  attempt; the delivery is tried again after a quarter of its age, but at least `LOCAL_FIRST` (if the store
  recovers quickly, new mail should not wait a minute) and at most `LOCAL_DELAY`. An outcome that does not
  count because no peer was contacted is handled in the same way, between `LOCAL_DELAY` and
  `UNCOUNTED_LONGEST`. Mail of a suspended destination is tried again when the suspension ends.
- a delivery that is deferred for the first time after `bounce.delay_warning` owes one delay report.

A failure report is owed if the sender is not null (RFC 5321 4.5.5), `[bounce]` is enabled, and NOTIFY is
FAILURE or missing (RFC 3461 4.1). The same holds for a delay report with DELAY. A success report is owed only
if NOTIFY is SUCCESS (RFC 3461 5.2.2 b). No report is made for a row of the outbox, which records its own
result, nor for mail accepted from an unauthenticated client, whose sender address may be forged. The age of a
delivery is counted from its `created`, which for mail that its sender delays (RFC 4865) is the release time.

If a message cannot be read, its sender is unknown and cannot be notified. So its deliveries never leave; they
are deferred by `UNREADABLE_DELAY`, however old they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import structs

from zonerelay.config.settings import BounceSettings, InDoubtAction, ZoneSettings
from zonerelay.message.dsn import DsnKind
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import NULL_SENDER, OUTBOX, Envelope, Message, Notify
from zonerelay.model.reply import Outcome, Reply, Scope, Verdict
from zonerelay.queue.settle.retry import RetryPolicy
from zonerelay.routing.zones.zones import DEFAULT_ZONE
from zonerelay.store.contract import Finish, Postpone

LOCAL_FIRST = 5.0
LOCAL_DELAY = 60.0
UNCOUNTED_LONGEST = 30 * 60.0
UNREADABLE_DELAY = 15 * 60.0

_TOO_CLOSE = 1.0

STRANGER = "stranger"
"""The reason why no report is made about mail of a client that is not allowed to relay."""


def _local_deferral(text: str) -> Outcome:
    return Outcome(Verdict.DEFERRED, Reply(451, "3.0", text), Scope.LOCAL, local=True, counts=False)


LOCAL_ERROR = _local_deferral("temporary internal error")
UNREADABLE = _local_deferral("the message cannot be read from the spool now")


class Disposition(msgspec.Struct, frozen=True):
    """The decision about one delivery after an outcome. `delivery` is its old state, and `outcome` the
    outcome that is recorded (an expiry was a deferral before).

    `report` is the report that is owed to the sender. `silence` is the reason why a failure, or a success
    that the sender asked to be reported, is not reported.
    """

    delivery: Delivery
    outcome: Outcome
    change: Finish | Postpone
    next_attempt: float | None = None
    report: DsnKind | None = None
    silence: str = ""


class DispositionPolicy:
    """Decides what happens to a delivery after an outcome, by the retry and bounce settings and by how each
    zone handles an outcome in doubt.
    """

    def __init__(self, retry: RetryPolicy, bounce: BounceSettings, zones: Sequence[ZoneSettings]) -> None:
        self._in_doubt = {zone.name: zone.in_doubt for zone in zones}
        self.retry = retry
        self._bounce = bounce

    async def decide(
        self,
        message: Message | None,
        delivery: Delivery,
        outcome: Outcome,
        *,
        now: float,
        until: float | None = None,
        paused: float = 0.0,
    ) -> Disposition:
        """Decide about a delivery. `until` is the time of the next check of a delivery that was deferred
        without an attempt. `paused` is the number of seconds that do not count towards its age.
        """
        if message is None:
            return put_off(delivery, outcome, now)
        if outcome.verdict is Verdict.DELIVERED:
            return self._delivered(message.envelope, delivery, outcome)
        if outcome.in_doubt and outcome.verdict is Verdict.DEFERRED:
            in_doubt = self._in_doubt.get(delivery.zone) or self._in_doubt.get(DEFAULT_ZONE)
            if in_doubt is InDoubtAction.HOLD:
                return _held(delivery, outcome, now)
            if in_doubt is InDoubtAction.BOUNCE:
                outcome = structs.replace(outcome, verdict=Verdict.BOUNCED)
        if outcome.verdict is not Verdict.DEFERRED:
            return self._failed(message.envelope, delivery, outcome)
        aged = structs.replace(delivery, created=delivery.created + paused) if paused else delivery
        next_attempt = await self._next_attempt(message.envelope, aged, outcome, until, now)
        if next_attempt is None:
            return self._failed(message.envelope, delivery, _expired(delivery, outcome))
        counts = outcome.counts and outcome.scope is not Scope.LOCAL
        later = delivery.deferred(next_attempt, outcome.attempt(now), counts=counts)
        warns = self._owes_warning(message.envelope, aged, now)
        change = Postpone(structs.replace(later, warned=True) if warns else later)
        return Disposition(delivery, outcome, change, next_attempt, DsnKind.DELAYED if warns else None)

    def needs_message(self, delivery: Delivery, now: float) -> bool:
        """Return whether a deferral without an attempt may expire the delivery or owe a warning, which
        depends on the sender.
        """
        age = now - delivery.created
        # Which maximum age applies is known only when the sender is known.
        return age >= self.retry.of(delivery.zone).shortest_lifetime - _TOO_CLOSE or (
            not delivery.warned and self._is_late(delivery, now)
        )

    def is_old(self, delivery: Delivery, now: float) -> bool:
        """Return whether a delivery may expire or owe a warning, so that it must be checked from time to time
        wherever it waits.
        """
        expires = delivery.created + self.retry.of(delivery.zone).shortest_lifetime
        return self._is_late(delivery, now) or expires - now <= _TOO_CLOSE

    def expiry(self, envelope: Envelope, delivery: Delivery) -> float:
        """Return the Unix time until which a delivery is tried."""
        return delivery.created + self.retry.of(delivery.zone).lifetime(envelope)

    async def _next_attempt(
        self, envelope: Envelope, delivery: Delivery, outcome: Outcome, until: float | None, now: float
    ) -> float | None:
        if until is None and outcome.counts and outcome.scope is not Scope.LOCAL:
            counted = structs.replace(delivery, attempts=delivery.attempts + 1)
            return await self.retry.next_attempt(envelope, counted, now)
        expires = self.expiry(envelope, delivery)
        if expires - now < _TOO_CLOSE:
            return None
        if until is None:
            until = now + _uncounted_delay(outcome, now - delivery.created)
        return min(until, expires)

    def _owes_warning(self, envelope: Envelope, delivery: Delivery, now: float) -> bool:
        return (
            not delivery.warned
            and self._is_late(delivery, now)
            and envelope.sender != NULL_SENDER
            and envelope.origin.protocol != OUTBOX
            and not envelope.origin.stranger
            and _wants(delivery, Notify.DELAY)
        )

    def _is_late(self, delivery: Delivery, now: float) -> bool:
        bounce = self._bounce
        return bounce.enabled and 0 < bounce.delay_warning < now - delivery.created

    def _delivered(self, envelope: Envelope, delivery: Delivery, outcome: Outcome) -> Disposition:
        if not asks_for_success(delivery, outcome):
            return Disposition(delivery, outcome, Finish(delivery))
        silence = self._silence(envelope, delivery, Notify.SUCCESS)
        report = None if silence else DsnKind.RELAYED
        return Disposition(delivery, outcome, Finish(delivery), report=report, silence=silence)

    def _failed(self, envelope: Envelope, delivery: Delivery, outcome: Outcome) -> Disposition:
        silence = self._silence(envelope, delivery, Notify.FAILURE)
        report = None if silence else DsnKind.FAILED
        return Disposition(delivery, outcome, Finish(delivery, outcome), report=report, silence=silence)

    def _silence(self, envelope: Envelope, delivery: Delivery, about: Notify) -> str:
        if envelope.origin.stranger:
            return STRANGER
        if envelope.sender == NULL_SENDER:
            return "null sender"
        if envelope.origin.protocol == OUTBOX:
            return "outbox"  # its row is the report
        if not _wants(delivery, about):
            return "notify"
        return "" if self._bounce.enabled else "switched off"


def asks_for_success(delivery: Delivery, outcome: Outcome) -> bool:
    """Return whether the sender requested a success report that the peer will not send."""
    return not outcome.dsn_passed and bool(delivery.notify & Notify.SUCCESS)


def deferred(delivery: Delivery, outcome: Outcome, until: float, now: float) -> Disposition:
    """Defer a delivery without an attempt. The caller has checked that neither expiry nor a
    warning is due.
    """
    change = Postpone(delivery.deferred(until, outcome.attempt(now), counts=False))
    return Disposition(delivery, outcome, change, until)


def put_off(delivery: Delivery, outcome: Outcome, now: float) -> Disposition:
    """Keep a delivery for a while, whatever its age, because the relay or its spool must be
    repaired first.
    """
    if outcome.verdict is Verdict.DELIVERED:
        return Disposition(delivery, outcome, Finish(delivery))
    outcome = structs.replace(outcome, verdict=Verdict.DEFERRED)
    return deferred(delivery, outcome, now + UNREADABLE_DELAY, now)


def unreported(disposition: Disposition, now: float) -> Disposition:
    """Return the disposition without its report, which could not be made. A failed delivery stays in the
    queue, and a warning is owed next time.

    A success leaves without its report: keeping the delivery would send the message again.
    """
    change = disposition.change
    if isinstance(change, Finish):
        return put_off(disposition.delivery, disposition.outcome, now)
    change = Postpone(structs.replace(change.delivery, warned=False))
    return structs.replace(disposition, change=change, report=None)


def _held(delivery: Delivery, outcome: Outcome, now: float) -> Disposition:
    held = structs.replace(delivery.deferred(0.0, outcome.attempt(now), counts=outcome.counts), held=True)
    return Disposition(delivery, outcome, Postpone(held))


def _expired(delivery: Delivery, outcome: Outcome) -> Outcome:
    """Return the expiry of a delivery, with the last reply of a peer instead of the reason why none was
    contacted.
    """
    last = delivery.last
    if outcome.counts or last is None:
        return structs.replace(outcome, verdict=Verdict.EXPIRED)
    return structs.replace(
        outcome,
        verdict=Verdict.EXPIRED,
        reply=last.reply,
        host=last.host,
        peer=last.peer,
        local=last.local,
        in_doubt=last.in_doubt,
    )


def local_delay(age: float) -> float:
    """Return the seconds until a delivery is tried again that failed because of an error in the relay."""
    return min(max(age / 4, LOCAL_FIRST), LOCAL_DELAY)


def _uncounted_delay(outcome: Outcome, age: float) -> float:
    if outcome.scope is Scope.LOCAL:
        return local_delay(age)
    return min(max(age / 4, LOCAL_DELAY), UNCOUNTED_LONGEST)


def _wants(delivery: Delivery, report: Notify) -> bool:
    return not delivery.notify or bool(delivery.notify & report)
