"""Counts failed log-ins by key: how long each reply waits, and when a key is locked.

The keys are those of `access/auth`: clients, their networks, accounts. Loopback counts like any other client:
it is where an application with an old password is most often found.

A success takes the delay away but not the failures: they age out, so that a client with one good password
cannot guess others without end. The same guess counts once, however often it is made: a fleet with an old
password learns nothing by it, and locks no network out. Nothing here awaits; time is passed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from zonerelay.inbound.limits.connections import Key
from zonerelay.message.srs import Srs, SrsError, SrsFault
from zonerelay.model.address import Mailbox, recipient_key
from zonerelay.model.clock import Clock
from zonerelay.model.reply import Reply

FIRST_DELAY = 0.5
MAX_DELAY = 10.0

MAX_KEYS = 10_000
"""Keys remembered; beyond it the key with the oldest last failure is forgotten."""

MAX_COUNTED = 1000
"""Failures remembered per key, whatever the configuration says."""


class _Failures:
    __slots__ = ("guesses", "in_a_row")

    def __init__(self) -> None:
        self.guesses: dict[object, float] = {}
        """When each was made last, in the order of these times."""
        self.in_a_row = 0


class Attempts:
    """Failed attempts. `max_failures` within `window` seconds lock a key until the oldest of them has aged
    out.
    """

    def __init__(self, *, max_failures: int, window: float) -> None:
        # In the order of their last failures, so that the first is the one to forget.
        self._keys: dict[Hashable, _Failures] = {}
        self.configure(max_failures=max_failures, window=window)

    def configure(self, *, max_failures: int, window: float) -> None:
        """Apply other limits from now on, also to failures that were counted already."""
        self._max_failures = min(max_failures, MAX_COUNTED)
        self._window = window

    def __len__(self) -> int:
        return len(self._keys)

    def locked(self, key: Hashable, now: float) -> bool:
        return self.count(key, now) >= self._max_failures

    def count(self, key: Hashable, now: float) -> int:
        """Return the number of failures that still count."""
        found = self._keys.get(key)
        return 0 if found is None else len(self._recent(found, now))

    def failed(self, key: Hashable, now: float, guess: bytes | None = None) -> float:
        """Count a failure, and return how many seconds its reply has to wait. `guess` is a hash of what was
        tried, the same for the same; without one the failure is like no other.
        """
        found = self._keys.pop(key, None) or _Failures()
        if not self._recent(found, now):
            found.in_a_row = 0
        if found.guesses.pop(guess, None) is None:
            found.in_a_row += 1
        found.guesses[object() if guess is None else guess] = now
        while len(found.guesses) > MAX_COUNTED:
            del found.guesses[next(iter(found.guesses))]
        if len(self._keys) >= MAX_KEYS:
            del self._keys[next(iter(self._keys))]
        self._keys[key] = found
        # The exponent is bounded too: 2 ** 2000 is no float.
        return min(FIRST_DELAY * 2.0 ** min(max(found.in_a_row, 1) - 1, 16), MAX_DELAY)

    def succeeded(self, key: Hashable) -> None:
        found = self._keys.get(key)
        if found is not None:
            found.in_a_row = 0

    def _recent(self, found: _Failures, now: float) -> dict[object, float]:
        """Drop the failures that have aged out, and return the others."""
        guesses = found.guesses
        while guesses:
            oldest = next(iter(guesses))
            if guesses[oldest] > now - self._window:
                break
            del guesses[oldest]
        return guesses


# Remembers clients and recipients of mail to addresses that SRS has made (`message/srs.py`). No I/O.
#
# - Wrong hashes count per client, and each reply waits longer than the last: a client with 50 connections
#   has 6 guesses a second. A hash in the present form has 40 bits, so guessing it takes 6,000 years. One in
#   the old form has 20. A client is allowed `MAX_OLD` wrong ones of those in an hour and all clients
#   together `MAX_OLD_IN_ALL`; beyond that every address in the old form is answered 451 without a look at
#   it: a report comes again.
# - Mail that is taken from strangers because of a hash alone is never reported to its sender, which may be a
#   third person. So a permanent refusal of a recipient by the next hop is repeated to the next stranger at
#   RCPT, for `REMEMBERED`. Only refusals about the recipient (RFC 3463 X.1.x, X.2.1) count: others are about
#   that message.
#
# One object serves all listeners of a worker. It is bounded, and empty after a restart.

HOUR = 3600.0
MAX_OLD = 20
MAX_OLD_IN_ALL = 60
"""In three weeks some 30,000 guesses: one address of 2**20 is found with a chance of 3 %."""
REMEMBERED = HOUR
MAX_REMEMBERED = 10_000

AT_ONCE = 1.0
"""Seconds taken off each wait: the first two wrong hashes are answered at once."""

_ALL = ""


class TooManyGuessesError(Exception):
    """Addresses in the old form are not looked at now."""


class WrongHashError(Exception):
    """The answer has to wait for `delay` seconds."""

    def __init__(self, fault: SrsError, delay: float) -> None:
        super().__init__(str(fault))
        self.delay = delay


class SrsRecipients:
    def __init__(self) -> None:
        self._wrong = Attempts(max_failures=MAX_OLD, window=HOUR)
        self._old = Attempts(max_failures=MAX_OLD_IN_ALL, window=HOUR)
        self._refused: OrderedDict[str, tuple[float, str]] = OrderedDict()

    def reverse(self, srs: Srs, recipient: Mailbox, client: Key, clock: Clock) -> Mailbox | None:
        """Reverse an address as `Srs.reverse` does. Raises SrsError, WrongHashError, TooManyGuessesError."""
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
        """Remember a next hop's permanent refusal of a stranger's mail. `now` is monotonic."""
        if not (reply.detail.startswith("1.") or reply.detail == "2.1"):
            return
        key = recipient_key(recipient)
        self._refused[key] = (now + REMEMBERED, f"{reply.code} {reply.status}")
        self._refused.move_to_end(key)
        if len(self._refused) > MAX_REMEMBERED:
            self._refused.popitem(last=False)

    def refusal(self, recipient: Mailbox, now: float) -> str:
        """Return the codes of the remembered refusal, `""` without one."""
        until, codes = self._refused.get(recipient_key(recipient), (now, ""))
        return codes if now < until else ""
