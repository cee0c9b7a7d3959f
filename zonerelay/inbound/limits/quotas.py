"""Counts messages, recipients and bytes per user and per minute, hour and day, in total over all workers.

`Usage` counts what one user has sent in windows that slide by one slot at a time and always cover their whole
length. Therefore a window never exceeds its limit, and a message may leave it up to one slot late. `Quotas`
stores the usage of every user as a record in a `RecordStore` that all workers of the machine share, or all
relays with a Redis or PostgreSQL spool. It reads a record, decides, and replaces it unless another worker has
changed it in between; then it tries again.

On failure: AuthorityError, which becomes a temporary refusal for the client. After a crash between the count
and the commit, a message may be counted that was not accepted; the opposite never happens.
"""

import asyncio
import math
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import NamedTuple

import msgspec

from zonerelay.config.units import format_size
from zonerelay.config.user_limits import COUNTED, UserLimits
from zonerelay.inbound.refusal import Reason, Refusal
from zonerelay.limits.authority import AuthorityError
from zonerelay.limits.shared import MAX_TRIES, RecordStore
from zonerelay.model.bounded import BoundedDict
from zonerelay.model.clock import Clock, SystemClock
from zonerelay.model.reply import Reply

LENGTHS = {"minute": (60.0, 12), "hour": (3600.0, 60), "day": (86400.0, 96)}
"""The length of each window in seconds, and its number of slots."""

NEAR = 0.8
"""The fraction of a quota at which the operator is warned."""

MAX_SEEN = 100
"""The number of users whose usage is shown as a metric: those with quotas who sent most recently."""

Sent = tuple[int, int, int]
"""The numbers of messages, recipients and bytes, in the order of COUNTED."""

_KEEP = 2 * 86400.0
_Slots = list[tuple[int, int, int, int]]
_decode = msgspec.msgpack.Decoder(dict[str, _Slots]).decode


class QuotaLevel(NamedTuple):
    """How much of one quota a user has used. `limit` is its name, such as `messages_per_hour`."""

    limit: str
    used: int
    most: int


class ExhaustedQuota(msgspec.Struct, frozen=True):
    """A quota that is used up, and the seconds until it has capacity again. They are infinite if the message
    can never fit.
    """

    limit: str
    most: int
    seconds: float

    def refusal(self) -> Refusal:
        what, _, window = self.limit.split("_")
        most = format_size(self.most) if what == "octets" else f"{self.most} {what}"
        if math.isinf(self.seconds):
            reply = Reply(552, "3.4", f"Message exceeds {most}, this user's quota per {window}")
            return Refusal(Reason.QUOTA, reply, quota=self.limit)
        wait = _in_words(self.seconds)
        reply = Reply(452, "7.1", f"Limit of {most} per {window} reached, try again in {wait}")
        return Refusal(Reason.QUOTA, reply, self.seconds, self.limit)


class Usage:
    """The amount of mail that one user has sent recently, as stored in a usage record. `now` is Unix time by
    the clock of the record store.
    """

    def __init__(self, record: bytes | None, now: float) -> None:
        """Decode a usage record, or start without usage. Raise ValueError if it is invalid."""
        self.now = now
        self._windows: dict[str, _Slots] = {} if record is None else _decode(record)
        self.slide(now)

    def slide(self, now: float) -> None:
        """Remove time slots that are older than the windows, or in the future after the clock was set
        back.
        """
        self.now = now
        for window, (length, slots) in LENGTHS.items():
            current = int(now // (length / slots))
            there = self._windows.get(window, [])
            self._windows[window] = [each for each in there if current - slots <= each[0] <= current + 1]

    def full(self, rails: UserLimits, more: Sent) -> ExhaustedQuota | None:
        """Return the quota that would be exceeded by sending `more`, or None. If several are exhausted,
        return the one that takes longest to recover.
        """
        worst: ExhaustedQuota | None = None
        for (what, window), most in rails.quotas.items():
            at = COUNTED.index(what)
            left = sum(each[1 + at] for each in self._windows[window]) + more[at] - most
            if not more[at] or left <= 0:
                continue
            seconds = math.inf if more[at] > most and what == "octets" else self._room_in(window, at, left)
            if worst is None or seconds > worst.seconds:
                worst = ExhaustedQuota(f"{what}_per_{window}", most, seconds)
        return worst

    def _room_in(self, window: str, at: int, excess: int) -> float:
        length, slots = LENGTHS[window]
        for slot, *counts in self._windows[window]:
            excess -= counts[at]
            if excess <= 0:
                return max((slot + slots + 1) * (length / slots) - self.now, 1.0)
        return length

    def add(self, sent: Sent, when: float) -> None:
        for window, (length, slots) in LENGTHS.items():
            slot, there = int(when // (length / slots)), self._windows[window]
            at = next((at for at, each in enumerate(there) if each[0] == slot), len(there))
            _, *before = there[at] if at < len(there) else (slot, 0, 0, 0)
            messages, recipients, octets = (
                max(count + more, 0) for count, more in zip(before, sent, strict=True)
            )
            there[at : at + 1] = [(slot, messages, recipients, octets)]

    def levels(self, rails: UserLimits) -> Iterator[QuotaLevel]:
        for (what, window), most in rails.quotas.items():
            at = COUNTED.index(what)
            yield QuotaLevel(
                f"{what}_per_{window}", sum(each[1 + at] for each in self._windows[window]), most
            )

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self._windows)


class Quotas:
    """Counts the mail of users, and enforces their quotas. `records` is called when the first user with
    quotas sends. `near` is called with the user and the level of each quota that is nearly exhausted, once
    until its usage falls again.
    """

    def __init__(
        self, records: Callable[[], RecordStore], clock: Clock, near: Callable[[str, QuotaLevel], None]
    ) -> None:
        self._open_records = records
        self._clock = clock
        self._near = near
        self._locks: dict[str, asyncio.Lock] = {}
        self._seen: BoundedDict[str, tuple[UserLimits, Usage]] = BoundedDict(MAX_SEEN)

    async def usage(self, user: str) -> Usage:
        """Return how much a user has sent recently. Raise AuthorityError if it cannot be read."""
        record = await self._records.read(_name(user))
        return self._usage(record.data, record.now)

    async def take(
        self, user: str, rails: UserLimits, sent: Sent, *, counted: float | None = None
    ) -> ExhaustedQuota | float:
        """Count a message before it is accepted; return the time under which it is counted, or the exhausted
        quota. Negative numbers remove one that was not accepted and was `counted` for this time. Raise
        AuthorityError if the usage cannot be counted.
        """
        records, name = self._records, _name(user)
        for _ in range(MAX_TRIES):
            async with self._locks.setdefault(user, asyncio.Lock()):
                record = await records.read(name)
                usage = self._usage(record.data, record.now)
                full = usage.full(rails, sent) if counted is None else None
                before = {each.limit: each.used for each in usage.levels(rails)}
                if full is None:
                    usage.add(sent, usage.now if counted is None else counted)
                    written = records.replace(name, record, usage.encode(), ttl=_KEEP, notices=())
                    if not await written:
                        continue
            self._saw(user, rails, usage, before)
            return full or usage.now
        raise AuthorityError(f"{records.name}: gave up after {MAX_TRIES} write conflicts")

    def seen(self) -> Iterator[tuple[str, QuotaLevel]]:
        """Yield how much of each quota is used, for users who sent recently through this worker."""
        now = self._clock.now()
        for user, (rails, usage) in self._seen.items():
            usage.slide(max(now, usage.now))
            for level in usage.levels(rails):
                yield user, level

    async def close(self) -> None:
        if "_records" in vars(self):
            await self._records.close()

    def _saw(self, user: str, rails: UserLimits, usage: Usage, before: dict[str, int]) -> None:
        self._seen[user] = (rails, usage)
        for level in usage.levels(rails):
            if before[level.limit] < NEAR * level.most <= level.used:
                self._near(user, level)

    def _usage(self, data: bytes | None, now: float) -> Usage:
        try:
            return Usage(data, now)
        except ValueError as error:
            raise AuthorityError(f"the usage record of a user is invalid: {error}") from error

    @cached_property
    def _records(self) -> RecordStore:
        return self._open_records()


async def used_by(records: RecordStore, user: str, rails: UserLimits) -> list[QuotaLevel]:
    """Return how much of each quota a user has used, for a command outside the relay. Raise AuthorityError on
    failure.
    """
    quotas = Quotas(lambda: records, SystemClock(), lambda _user, _level: None)
    try:
        return list((await quotas.usage(user)).levels(rails))
    finally:
        await quotas.close()


def _name(user: str) -> str:
    """Return the key of a user's usage record. It differs from every zone's key, because a zone's name has no
    space.
    """
    return f"user {user}"


def _in_words(seconds: float) -> str:
    if seconds < 120:
        return f"{math.ceil(seconds)} seconds"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} minutes" if minutes < 120 else f"{math.ceil(minutes / 60)} hours"
