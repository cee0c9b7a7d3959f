"""Counts failed logins by key, and decides how long each reply is delayed and when a key is locked.

`access/auth` defines the keys: clients, their networks, and accounts. Loopback addresses count like any other
client, because an application with an old password is often on the same machine.

A successful login resets the delay but not the failures. They only expire, so that a client with one good
password cannot guess others without limit. A repeated guess counts once: repeating the same old password
reveals nothing, so a fleet of machines that does it does not lock its network out. Nothing in this module
awaits; the caller passes the time.
"""

from __future__ import annotations

from collections.abc import Hashable

from zonerelay.inbound.limits.connections import Key
from zonerelay.message.srs import Srs, SrsError, SrsFault
from zonerelay.model.bounded import BoundedDict
from zonerelay.model.clock import Clock
from zonerelay.model.envelope import Mailbox, recipient_key
from zonerelay.model.reply import Reply

FIRST_DELAY = 0.5
MAX_DELAY = 10.0

MAX_KEYS = 10_000
"""The number of remembered keys. Beyond it, the key whose last failure is oldest is forgotten."""

MAX_COUNTED = 1000
"""The number of remembered failures per key, regardless of the configuration."""


class _Failures:
    """The failures of one key."""

    __slots__ = ("guesses", "in_a_row")

    def __init__(self) -> None:
        self.guesses: dict[object, float] = {}
        """The time of the last attempt with each guess, in the order of these times."""
        self.in_a_row = 0


class FailedAttempts:
    """Counts failed attempts by key. `max_failures` within `window` seconds lock a key until the oldest
    failure expires.
    """

    def __init__(self, *, max_failures: int, window: float) -> None:
        # In the order of their last failures: the first key is forgotten first.
        self._keys: BoundedDict[Hashable, _Failures] = BoundedDict(MAX_KEYS)
        self.configure(max_failures=max_failures, window=window)

    def configure(self, *, max_failures: int, window: float) -> None:
        """Apply new limits, also to failures that were already counted."""
        self._max_failures = min(max_failures, MAX_COUNTED)
        self._window = window

    def __len__(self) -> int:
        return len(self._keys)

    def locked(self, key: Hashable, now: float) -> bool:
        return self.count(key, now) >= self._max_failures

    def count(self, key: Hashable, now: float) -> int:
        """Return the number of failures that have not expired."""
        found = self._keys.get(key)
        return 0 if found is None else len(self._recent(found, now))

    def failed(self, key: Hashable, now: float, guess: bytes | None = None) -> float:
        """Count a failure, and return the delay of its reply in seconds. `guess` is a hash of the attempt, so
        that equal attempts have equal hashes. A failure without a guess is always a new one.
        """
        found = self._keys.get(key) or _Failures()
        if not self._recent(found, now):
            found.in_a_row = 0
        if found.guesses.pop(guess, None) is None:
            found.in_a_row += 1
        found.guesses[object() if guess is None else guess] = now
        while len(found.guesses) > MAX_COUNTED:
            del found.guesses[next(iter(found.guesses))]
        self._keys[key] = found
        # The exponent is bounded too: 2.0 ** 2000 would overflow.
        return min(FIRST_DELAY * 2.0 ** min(max(found.in_a_row, 1) - 1, 16), MAX_DELAY)

    def succeeded(self, key: Hashable) -> None:
        found = self._keys.get(key)
        if found is not None:
            found.in_a_row = 0

    def _recent(self, found: _Failures, now: float) -> dict[object, float]:
        """Remove the expired failures, and return the others."""
        guesses = found.guesses
        while guesses:
            oldest = next(iter(guesses))
            if guesses[oldest] > now - self._window:
                break
            del guesses[oldest]
        return guesses


# Remembers clients and recipients of mail to addresses that SRS has made (`message/srs.py`). No I/O.
#
# - Wrong hashes are counted per client, and each reply is delayed longer than the last: a client with 50
#   connections can make 6 guesses a second. A hash in the current format has 40 bits, so guessing it takes
#   6,000 years. A hash in the old format has 20 bits. In one hour, a client may send `MAX_OLD` wrong hashes
#   in the old format, and all clients together `MAX_OLD_IN_ALL`. Beyond that, every address in the old format
#   is answered with 451 and is not checked. The sender of a bounce message will retry.
# - Mail that is accepted from unauthenticated clients only because of a hash never causes a bounce message to
#   its sender, which may be a third party. Instead, if the next hop rejects a recipient permanently, RCPT
#   commands for the same recipient from such clients are rejected for `REMEMBERED` seconds. Only rejections
#   of the recipient (RFC 3463 X.1.x, X.2.1) count; other rejections concern the message.
#
# One object serves all listeners of a worker. Its size is bounded, and it is empty after a restart.

HOUR = 3600.0
MAX_OLD = 20
MAX_OLD_IN_ALL = 60
"""This allows about 30,000 guesses in three weeks, which find one address of 2**20 with a probability of 3
%.
"""
REMEMBERED = HOUR
MAX_REMEMBERED = 10_000

AT_ONCE = 1.0
"""Seconds subtracted from each delay, so that the first two wrong hashes are answered immediately."""

_ALL = ""


class TooManyGuessesError(Exception):
    """Addresses in the old format are not checked at the moment, because there were too many wrong hashes."""


class WrongHashError(Exception):
    """An SRS address has a wrong hash. The reply must be delayed by `delay` seconds."""

    def __init__(self, fault: SrsError, delay: float) -> None:
        super().__init__(str(fault))
        self.delay = delay


class SrsRecipients:
    """Checks the hashes of SRS recipients, and limits guessing."""

    def __init__(self) -> None:
        self._wrong = FailedAttempts(max_failures=MAX_OLD, window=HOUR)
        self._old = FailedAttempts(max_failures=MAX_OLD_IN_ALL, window=HOUR)
        self._refused: BoundedDict[str, tuple[float, str]] = BoundedDict(MAX_REMEMBERED)

    def reverse(self, srs: Srs, recipient: Mailbox, client: Key, clock: Clock) -> Mailbox | None:
        """Reverse an address as `Srs.reverse` does. Raise SrsError, WrongHashError or TooManyGuessesError."""
        now = clock.monotonic()
        old = srs.is_in_old_form(recipient)
        if old and (self._wrong.locked(client, now) or self._old.locked(_ALL, now)):
            raise TooManyGuessesError
        try:
            return srs.reverse(recipient, clock.now())
        except SrsError as error:
            if error.kind is not SrsFault.WRONG_HASH:
                raise
            if old:
                self._old.failed(_ALL, now)
            delay = self._wrong.failed(client, now) - AT_ONCE
            raise WrongHashError(error, max(delay, 0.0)) from error

    def refused(self, recipient: Mailbox, reply: Reply, now: float) -> None:
        """Remember that the next hop rejected mail of an unauthenticated client permanently. `now` is
        monotonic.
        """
        if not (reply.detail.startswith("1.") or reply.detail == "2.1"):
            return
        self._refused[recipient_key(recipient)] = (now + REMEMBERED, f"{reply.code} {reply.status}")

    def refusal(self, recipient: Mailbox, now: float) -> str:
        """Return the codes of the remembered rejection, or an empty string if there is none."""
        until, codes = self._refused.get(recipient_key(recipient), (now, ""))
        return codes if now < until else ""
