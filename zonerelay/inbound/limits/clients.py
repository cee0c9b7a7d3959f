"""Counts what clients use and do wrong: connections, errors, failed logins, wrong addresses and bursts.

Connections of a listener are counted in total, from one client, and from one network. A client is an IPv4
address or an IPv6 /64 (the prefix of one household or machine); a network is an IPv4 /24 or an IPv6 /48 (the
prefix of one customer). Each `enter` needs one `leave`. The address `""` is counted in the total only:
clients on a Unix socket are the operator's own processes, and the address of a client behind a load balancer
is unknown until its PROXY header is read. `move` then counts the client by its own address.

Failed logins are counted by key; their number decides how long each reply is delayed and when a key is
locked. `access/auth` defines the keys: clients, their networks, and accounts. Loopback addresses count like
any other client, because an application with an old password is often on the same machine.

A successful login resets the delay but not the failures. They only expire, so that a client with one good
password cannot guess others without limit. A repeated guess counts once: repeating the same old password
reveals nothing, so a fleet of machines that does it does not lock its network out. Nothing in this module
awaits; the caller passes the time.
"""

import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from socket import AF_INET6, inet_pton

from zonerelay.config.settings import ListenerSettings
from zonerelay.inbound.refusal import Reason
from zonerelay.message.srs import Srs, SrsError, SrsFault
from zonerelay.model.bounded import BoundedDict
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery, QueueName
from zonerelay.model.envelope import Envelope, Mailbox, recipient_key
from zonerelay.model.reply import Reply
from zonerelay.store.contract import QueueCounts

# Finds senders whose mail would delay the other mail of a zone. No I/O.
#
# A zone is slow while more than `LONG` of its fresh deliveries wait that need more than `PATIENCE` seconds
# at the rate at which new mail starts, and for `TIME` seconds after that; otherwise a sender would keep the
# queue at just that length. In a slow zone each sender may have `MANY` fresh recipients, and `RATE` more in
# each second (a leaky bucket). Mail beyond that is stored as deferred mail that has become due, like mail to
# a long list of recipients. Thus a sender of a hundred thousand single messages does not delay the others, a
# sender of a few messages a second is never delayed, and nothing is counted while new mail moves fast: a
# long queue then delays nobody, and to store mail as due and read it back costs half as much again as its
# delivery.
#
# A sender is an envelope sender of one user or client. Addresses that contain the recipient or a number
# (VERP: `bounce-1234@`, `list+ann=example.com@`) count as one sender. Counts are lost at a restart. Only the
# `MAX_SENDERS` most recent senders are counted.

MANY = 100
"""Recipients. RFC 5321 4.5.3.1.8 requires servers to accept this many in one message."""

RATE = 10.0
LONG = 300
"""Fresh deliveries. In a shorter queue nobody is put behind, however slow it is."""

PATIENCE = 2.0
TIME = 60.0
LOOK_EVERY = 0.1
"""Seconds between two checks of the queues."""

MAX_SENDERS = 10_000

_NUMBERS = re.compile(r"[0-9]+")


class Bursts:
    """Counters of each sender's recent recipients in slow zones, for one worker and all its listeners."""

    def __init__(
        self,
        counts: Callable[[], Mapping[QueueName, QueueCounts]],
        rate: Callable[[str], float],
        clock: Clock,
    ) -> None:
        """Create the counters. `rate` returns how many new deliveries of a zone start per second."""
        self._counts = counts
        self._rate = rate
        self._clock = clock
        self._look_at = 0.0
        self._slow: dict[str, float] = {}
        """The slow zones, and the time until which each is one."""
        self._senders: BoundedDict[tuple[str, str, str], tuple[float, float]] = BoundedDict(MAX_SENDERS)
        """The recent recipients of each sender in a zone, and their time."""

    def is_over(self, envelope: Envelope, deliveries: Sequence[Delivery]) -> bool:
        """Count a message's new deliveries, and return whether its sender exceeds the burst limit."""
        now = self._clock.monotonic()
        if now >= self._look_at:
            self._look(now)
        if not self._slow:
            return False
        zone = next((each.zone for each in deliveries if each.zone in self._slow), None)
        if zone is None:
            return False
        key = (envelope.origin.user or envelope.origin.client_address, _general(envelope.sender), zone)
        count, at = self._senders.get(key, (0.0, now))
        count = max(0.0, count - RATE * (now - at)) + len(envelope.recipients)
        self._senders[key] = min(count, MANY + RATE * TIME), now
        return count > MANY

    def _look(self, now: float) -> None:
        self._look_at = now + LOOK_EVERY
        for queue, count in self._counts().items():
            if count.ready > LONG and count.ready > PATIENCE * self._rate(queue.zone):
                self._slow[queue.zone] = now + TIME
        for zone in [zone for zone, until in self._slow.items() if until <= now]:
            del self._slow[zone]


def _general(sender: str) -> str:
    """Remove the parts of a sender's address that differ from one message to the next."""
    local, _, domain = sender.rpartition("@")
    return f"{_NUMBERS.sub('#', local.partition('+')[0])}@{domain.lower()}"


Key = str | bytes


def client_key(address: str) -> Key:
    """Return the key under which a client is counted: its IPv4 address, or the /64 prefix of its IPv6
    address. `address` is spelled as `AccessPolicy` does.
    """
    return inet_pton(AF_INET6, address)[:8] if ":" in address else address


@lru_cache(maxsize=1024)
def client_and_network(address: str) -> tuple[Key, Key]:
    """Return the keys of a client and of its network. It is called twice per connection, so it does not use
    ipaddress, which takes microseconds.
    """
    client = client_key(address)
    return client, client[:6] if isinstance(client, bytes) else address.rpartition(".")[0]


class ConnectionLimits:
    """Limits the connections of a listener: in total, per client and per network. New `settings` apply to new
    connections.
    """

    def __init__(self, settings: ListenerSettings) -> None:
        self.settings = settings
        self.count = 0
        self._open: dict[Key, int] = {}  # connections of clients and of networks, whose keys differ in length

    def enter(self, address: str) -> Reason | None:
        """Count a new connection. If a limit is reached, count nothing and return the reason."""
        if self.count >= self.settings.max_connections:
            return Reason.CONNECTIONS
        reason = self._refusal(address)
        if reason is None:
            self.count += 1
            self._add(address, 1)
        return reason

    def leave(self, address: str) -> None:
        self.count -= 1
        self._add(address, -1)

    def move(self, old: str, new: str) -> Reason | None:
        """Move a connection from the counts of the address `old` to those of the address `new`.

        If a limit is reached, nothing changes, the reason is returned, and the connection leaves as `old`.
        """
        self._add(old, -1)  # first: otherwise a client that moves within its network would be counted twice
        reason = self._refusal(new)
        self._add(new if reason is None else old, 1)
        return reason

    def _refusal(self, address: str) -> Reason | None:
        if not address:
            return None
        client, network = client_and_network(address)
        if self._open.get(client, 0) >= self.settings.max_connections_per_client:
            return Reason.CLIENT_CONNECTIONS
        full = self._open.get(network, 0) >= self.settings.max_connections_per_network
        return Reason.NETWORK_CONNECTIONS if full else None

    def _add(self, address: str, number: int) -> None:
        for key in client_and_network(address) if address else ():
            count = self._open.pop(key, 0) + number
            if count:
                self._open[key] = count


# Counts the recent errors of clients that may not relay, and returns the delay of the next error reply.
#
# This is Postfix's smtpd_error_sleep_time, extended over all connections of a client. A client that guesses
# addresses gets a few replies a second, however many connections it opens. Each error expires on its own.

FREE = 10
"""Errors without a delay, as in Postfix's smtpd_soft_error_limit."""

STEP = 0.25
MAX_ERROR_DELAY = 5.0
"""Seconds. Each further error increases the delay by `STEP`."""

AGE = 6.0
"""Seconds after which one error is forgotten."""

MAX_CLIENTS = 10_000
"""The number of remembered clients. Beyond it, the client whose last error is oldest is forgotten."""

_MOST = FREE + 2 * MAX_ERROR_DELAY / STEP


class ErrorDelays:
    """The delays of replies to clients that cause errors."""

    def __init__(self) -> None:
        # Errors, and their time.
        self._clients: BoundedDict[Key, tuple[float, float]] = BoundedDict(MAX_CLIENTS)

    def made(self, client: Key, now: float) -> float:
        """Count an error, and return the delay of its reply in seconds."""
        count, at = self._clients.get(client, (0.0, now))
        count = min(max(count - (now - at) / AGE, 0.0) + 1.0, _MOST)
        self._clients[client] = count, now
        return min(max(count - FREE, 0.0) * STEP, MAX_ERROR_DELAY)


FIRST_DELAY = 0.5
MAX_DELAY = 10.0

MAX_KEYS = 10_000
"""The number of remembered keys. Beyond it, the key whose last failure is oldest is forgotten."""

MAX_COUNTED = 1000
"""The number of remembered failures per key, regardless of the configuration."""


class _Failures:
    """The failed attempts that are counted under one key, such as a client or a network."""

    __slots__ = ("guesses", "in_a_row")

    def __init__(self) -> None:
        self.guesses: dict[object, float] = {}
        """The time of the last attempt with each guess, in the order of these times."""
        self.in_a_row = 0


class FailedAttempts:
    """Counts failed attempts by key, and locks keys that have too many. `max_failures` within `window`
    seconds lock a key until the oldest failure expires.
    """

    def __init__(self, *, max_failures: int, window: float) -> None:
        # In the order of their last failures: the first key is forgotten first.
        self._keys: BoundedDict[Hashable, _Failures] = BoundedDict(MAX_KEYS)
        self.configure(max_failures=max_failures, window=window)

    def configure(self, *, max_failures: int, window: float) -> None:
        """Apply new limits, also to failures that were already counted."""
        self._max_failures = min(max_failures, MAX_COUNTED)
        self._window = window

    def locked(self, key: Hashable, now: float) -> bool:
        return self.count(key, now) >= self._max_failures

    def count(self, key: Hashable, now: float) -> int:
        """Return the number of a key's failed attempts that have not expired."""
        found = self._keys.get(key)
        return 0 if found is None else len(self._recent(found, now))

    def failed(self, key: Hashable, now: float, guess: bytes | None = None) -> float:
        """Count a failed attempt, and return the delay of its reply in seconds. `guess` is a hash of the
        attempt, so that equal attempts have equal hashes. A failure without a guess is always a new one.
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
        """Remove expired attempts, and return the others."""
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
    """SRS addresses in the old format are not checked now, because there were too many wrong hashes."""


class SrsRecipients:
    """Checks the hashes of SRS addresses in RCPT, and limits how often clients can guess them."""

    def __init__(self) -> None:
        self._wrong = FailedAttempts(max_failures=MAX_OLD, window=HOUR)
        self._old = FailedAttempts(max_failures=MAX_OLD_IN_ALL, window=HOUR)
        self._refused: BoundedDict[str, tuple[float, str]] = BoundedDict(MAX_REMEMBERED)

    def reverse(self, srs: Srs, recipient: Mailbox, client: Key, clock: Clock) -> Mailbox | None:
        """Restore the original address of an SRS address, like `Srs.reverse`. Raise TooManyGuessesError or
        SrsError, with a `delay` for the reply to a wrong hash.
        """
        now = clock.monotonic()
        old = srs.is_in_old_form(recipient)
        if old and (self._wrong.locked(client, now) or self._old.locked(_ALL, now)):
            raise TooManyGuessesError
        try:
            return srs.reverse(recipient, clock.now())
        except SrsError as error:
            if error.kind is SrsFault.WRONG_HASH:
                if old:
                    self._old.failed(_ALL, now)
                error.delay = max(self._wrong.failed(client, now) - AT_ONCE, 0.0)
            raise

    def refused(self, recipient: Mailbox, reply: Reply, now: float) -> None:
        """Remember that the next hop permanently rejected a bounce of an unauthenticated client. `now` is
        monotonic.
        """
        if not (reply.detail.startswith("1.") or reply.detail == "2.1"):
            return
        self._refused[recipient_key(recipient)] = (now + REMEMBERED, f"{reply.code} {reply.status}")

    def refusal(self, recipient: Mailbox, now: float) -> str:
        """Return the reply codes of a rejection by the next hop that was remembered for this recipient, or
        "".
        """
        until, codes = self._refused.get(recipient_key(recipient), (now, ""))
        return codes if now < until else ""
