"""Remembers clients and recipients of mail to addresses that SRS has made (`message/srs.py`). No I/O.

- Wrong hashes count per client, and each reply waits longer than the last: a client with 50 connections has 6
  guesses a second. A hash in the present form has 40 bits, so guessing it takes 6,000 years. One in the old
  form has 20. A client is allowed `MAX_OLD` wrong ones of those in an hour and all clients together
  `MAX_OLD_IN_ALL`; beyond that every address in the old form is answered 451 without a look at it: a report
  comes again.
- Mail that is taken from strangers because of a hash alone is never reported to its sender, which may be a
  third person. So a permanent refusal of a recipient by the next hop is repeated to the next stranger at
  RCPT, for `REMEMBERED`. Only refusals about the recipient (RFC 3463 X.1.x, X.2.1) count: others are about
  that message.

One object serves all listeners of a worker. It is bounded, and empty after a restart.
"""

from __future__ import annotations

from collections import OrderedDict

from zonerelay.inbound.limits.auth_failures import Attempts
from zonerelay.inbound.limits.connections import Key
from zonerelay.message.srs import Srs, SrsError, SrsFault
from zonerelay.model.address import Mailbox, recipient_key
from zonerelay.model.clock import Clock
from zonerelay.model.reply import Reply

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
