"""The retry policy: when a deferred delivery is attempted again, and when it expires.

Policy: `attempts` is the number of finished attempts, including the one that just failed. Attempt 1 is made
at acceptance. The times below are since acceptance, for attempts that take no time and a jitter of 0:

    attempt           1    2      3       4        5         6          7 …
    schedule          0    1 m    6 m     21 m     51 m      1 h 51 m   3 h 51 m, 7 h 51 m, then every 4 h
    exponential       0    60 s   360 s   1860 s   9360 s    46860 s    none: 6 attempts in all
    quadratic         0    1 m    5 m     14 m     30 m      55 m       91 m, 140 m, 204 m, 285 m, none

`exponential` waits 12·5ⁿ seconds after attempt n ≤ 5, so its sixth failed attempt, 13 h 1 m after acceptance,
is the last. `quadratic` waits n² minutes, and its tenth failed attempt, after 4 h 45 m, is the last.

`max_attempts` lowers these limits; for `quadratic` it can also raise the limit, and 0 means the limit of the
policy itself. Jitter changes every delay of these three policies by up to the given fraction in either
direction. The result of a `backoff` function is used as it is; only `max_age` and `max_attempts` limit it.

Age: a retry that would be later than `max_age` is made exactly at `max_age`, so the last attempt of a message
happens then and its sender is notified without further delay. A delivery that is deferred at or after that
age expires. So a delivery that is overdue after a long downtime is attempted once more and never expires
unattempted, unless its destination is suspended. Messages from the null sender expire after `bounce.max_age`.

Zones may have their own schedule (which replaces the policy and `backoff`), `max_age` and number of attempts.
Values that a zone omits come from [retry]. A zone's `max_age` shortens the life of reports in it but never
prolongs it. Mail in a zone that a reload has removed expires by the values of the default zone.

Failure: a `backoff` function that raises, hangs or returns an invalid value loses no mail. The delay is
`FALLBACK_DELAY`, and a `trouble` event is reported to the operator.
"""

import asyncio
import math
import random as _random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import msgspec

from zonerelay.config.settings import BounceSettings, RetryPolicyName, RetrySettings, ZoneSettings
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import NULL_SENDER, Envelope, is_row
from zonerelay.process.operator_code import DaemonCall, DaemonThreads, named
from zonerelay.routing.zones.zones import DEFAULT_ZONE
from zonerelay.telemetry.events.events import Events

Backoff = Callable[[Envelope, int], float | None]
"""`backoff(envelope, attempts)`, of an operator, returns the seconds until the next attempt, or None for no
further attempt.
"""

Delays = Callable[[int], float | None]
"""The same of a built-in policy, which goes by the attempts alone."""

EXPONENTIAL_ATTEMPTS = 6
QUADRATIC_ATTEMPTS = 10
FALLBACK_DELAY = 15 * 60.0
BACKOFF_TIMEOUT = 5.0

_TOO_CLOSE = 1.0
"""A last attempt this close to the previous one is skipped, which also absorbs the rounding of
stored times.
"""


class IsolatedBackoff:
    """Runs an operator's back-off function in its own thread, so that a slow function does not block the
    event loop.

    `delay` returns within `BACKOFF_TIMEOUT` and raises only CancelledError. While a call hangs, the function
    is not called again and every delivery gets the fallback delay, so at most one thread is lost.
    """

    def __init__(self, function: Backoff, events: Events) -> None:
        self._function = function
        self._events = events
        self._threads = DaemonThreads("backoff", 1)
        weakref.finalize(self, self._threads.close)  # a reload makes another

    async def delay(self, envelope: Envelope, attempts: int) -> float | None:
        now = asyncio.get_running_loop().time()
        if self._threads.stuck(now - 0.99 * BACKOFF_TIMEOUT):  # timers may be a little early
            return FALLBACK_DELAY
        call = DaemonCall(partial(self._called, envelope, attempts), now)
        self._threads.submit(call)
        try:
            async with asyncio.timeout(BACKOFF_TIMEOUT):
                return await asyncio.shield(asyncio.wrap_future(call.answer))
        except Exception as error:  # noqa: BLE001 - a stranger's function may raise anything
            self._events.error("retry.backoff", error, message_id=envelope.id)
        return FALLBACK_DELAY

    def _called(self, envelope: Envelope, attempts: int) -> float | None:
        try:
            return checked_delay(self._function(envelope, attempts))
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise
            # SystemExit of an operator's function must not end the relay, and futures refuse StopIteration.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error


class ZoneRetryPolicy(msgspec.Struct, frozen=True):
    """The retry policy of one zone: a back-off, limited by attempts and by age."""

    settings: RetrySettings
    bounce_max_age: float
    backoff: IsolatedBackoff | Delays

    def lifetime(self, envelope: Envelope) -> float:
        """Return the age in seconds at which deliveries of a message expire."""
        return self.bounce_max_age if envelope.sender == NULL_SENDER else self.settings.max_age

    @property
    def shortest_lifetime(self) -> float:
        """The age in seconds before which no delivery expires."""
        return min(self.bounce_max_age, self.settings.max_age)

    def is_used_up(self, attempts: int) -> bool:
        most = self.settings.max_attempts
        if not most and not self.settings.backoff and self.settings.policy is RetryPolicyName.QUADRATIC:
            most = QUADRATIC_ATTEMPTS
        return 0 < most <= attempts

    async def delay(self, envelope: Envelope, attempts: int, random: _random.Random) -> float | None:
        if isinstance(self.backoff, IsolatedBackoff):
            return await self.backoff.delay(envelope, attempts)
        delay = self.backoff(attempts)
        spread = self.settings.jitter
        if delay is None or not spread:
            return delay
        return delay * (1 + random.uniform(-spread, spread))


class RetryPolicy(msgspec.Struct, frozen=True):
    """The retry policies of [retry] and of zones with their own settings. Rows of the outbox are retried n²
    minutes after the n-th failure, without jitter, and the failure of attempt `row_attempts` is final.
    """

    otherwise: ZoneRetryPolicy
    zones: dict[str, ZoneRetryPolicy]
    random: _random.Random
    row_attempts: int

    def of(self, zone: str) -> ZoneRetryPolicy:
        return self.zones.get(zone, self.otherwise)

    async def next_attempt(self, envelope: Envelope, delivery: Delivery, now: float) -> float | None:
        """Return the Unix time of the next attempt, or None if the delivery is not attempted again.

        `delivery.attempts` includes the attempt that was just deferred. Only CancelledError is raised.
        """
        if is_row(delivery.message_id):
            is_over = delivery.attempts >= self.row_attempts
            return None if is_over else now + quadratic(max(1, delivery.attempts))
        horizon = self.of(delivery.zone)
        last = delivery.created + horizon.lifetime(envelope)
        if last - now < _TOO_CLOSE or horizon.is_used_up(delivery.attempts):
            return None
        delay = await horizon.delay(envelope, max(1, delivery.attempts), self.random)
        return None if delay is None else min(now + delay, last)


def build(
    settings: RetrySettings,
    bounce: BounceSettings,
    zones: Sequence[ZoneSettings] = (),
    *,
    random: _random.Random,
    events: Events,
    row_attempts: int = QUADRATIC_ATTEMPTS,
) -> RetryPolicy:
    """Create the retry policies from the settings. Raise ValueError with a message if `backoff` cannot be
    loaded.
    """
    backoff: IsolatedBackoff | Delays
    if settings.backoff:
        backoff = IsolatedBackoff(load_backoff(settings.backoff), events)
    else:
        backoff = _BUILT_IN.get(settings.policy) or scheduled(settings.schedule)
    general = ZoneRetryPolicy(settings, bounce.max_age, backoff)
    own = {zone.name: _of_zone(zone, settings, bounce, backoff) or general for zone in zones}
    return RetryPolicy(own.get(DEFAULT_ZONE, general), own, random, row_attempts)


def _of_zone(
    zone: ZoneSettings, general: RetrySettings, bounce: BounceSettings, backoff: IsolatedBackoff | Delays
) -> ZoneRetryPolicy | None:
    """Return the policy of a zone, or None if the zone has no retry settings of its own."""
    if not (zone.schedule or zone.max_age or zone.max_attempts):
        return None
    settings = replace(
        general,
        max_age=zone.max_age or general.max_age,
        max_attempts=zone.max_attempts or general.max_attempts,
    )
    if zone.schedule:
        settings = replace(settings, policy=RetryPolicyName.SCHEDULE, schedule=zone.schedule, backoff="")
        backoff = scheduled(zone.schedule)
    bounce_max_age = min(bounce.max_age, zone.max_age) if zone.max_age else bounce.max_age
    return ZoneRetryPolicy(settings, bounce_max_age, backoff)


def scheduled(delays: tuple[float, ...]) -> Delays:
    """Return a function that returns the n-th of these delays after the n-th attempt. The last delay
    repeats.
    """
    return lambda attempts: delays[min(attempts, len(delays)) - 1]


def exponential(attempts: int) -> float | None:
    """Return 12·5ⁿ seconds after attempt n, or None if n > 5 (an example in python-slimta's
    documentation).
    """
    return 12.0 * 5.0**attempts if attempts < EXPONENTIAL_ATTEMPTS else None


def quadratic(attempts: int) -> float:
    """Return the delay after attempt n, which is n² minutes, in seconds. The caller limits the number of
    attempts.
    """
    return 60.0 * attempts * attempts


_BUILT_IN = {RetryPolicyName.EXPONENTIAL: exponential, RetryPolicyName.QUADRATIC: quadratic}


def load_backoff(spec: str) -> Backoff:
    """Load the operator's back-off function, which `module:function` names. Raise ValueError with a message
    if it cannot be loaded.
    """
    function = named(spec, "module:function")
    if not callable(function):
        raise ValueError(f"{spec} is not a function")  # noqa: TRY004 - the configuration is wrong
    return cast(Backoff, function)


def checked_delay(answer: object) -> float | None:
    """Return the result of an operator's back-off function if it is None or a valid number of seconds. Raise
    ValueError otherwise.
    """
    if answer is None:
        return None
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        problem = f"backoff returned {type(answer).__name__}, not seconds or None"
        raise ValueError(problem)  # noqa: TRY004 - one kind of error for every bad answer
    if not math.isfinite(answer) or answer < 0:
        raise ValueError(f"backoff returned {answer}, not a number of seconds from now")
    return float(answer)
