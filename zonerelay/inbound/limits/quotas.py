"""Quotas of users: messages, recipients and bytes per minute, hour and day, as totals of all workers.

`Usage` is what a user has sent, in windows that slide by a slot at a time and always cover their whole
length: a window never has more than its limit; what was sent leaves it up to one slot late. `Quotas` keeps
the usage of every user as a page in a `BookStore` that all workers of the machine share, or all relays on a
Redis or PostgreSQL spool: read, decided on, replaced unless another worker has written meanwhile.

Failure: AuthorityError, which the client hears as a temporary refusal. A crash between the count and the
commit leaves a message counted that was not accepted, never the other way round.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

from zonerelay.config.rails import COUNTED, Rails
from zonerelay.config.units import format_size
from zonerelay.limits.shared import MAX_TRIES, BookStore
from zonerelay.limits.values import AuthorityError
from zonerelay.model.clock import Clock, SystemClock
from zonerelay.model.reply import Reply

LENGTHS = {"minute": (60.0, 12), "hour": (3600.0, 60), "day": (86400.0, 96)}
"""Seconds of each window, and its slots."""

NEAR = 0.8
"""The part of a quota at which the operator is warned."""

MAX_SEEN = 100
"""Users whose usage is a metric: those with quotas who have sent last."""

Sent = tuple[int, int, int]
"""Messages, recipients, octets, as in COUNTED."""

T = TypeVar("T")

_KEEP = 2 * 86400.0
_Slots = list[tuple[int, int, int, int]]
_decode = msgspec.msgpack.Decoder(dict[str, _Slots]).decode


class Level(NamedTuple):
    """How much of one quota is used. `limit`: as in `messages_per_hour`."""

    limit: str
    used: int
    most: int


@dataclass(frozen=True, slots=True)
class Full:
    """The quota that is met, and the seconds until there is room; infinite: it never fits."""

    limit: str
    most: int
    seconds: float

    def reply(self) -> Reply:
        what, _, window = self.limit.split("_")
        most = format_size(self.most) if what == "octets" else f"{self.most} {what}"
        if math.isinf(self.seconds):
            return Reply(552, "3.4", f"Message is larger than {most}, this user's quota per {window}")
        return Reply(
            452, "7.1", f"Limit of {most} per {window} reached, try again in {_in_words(self.seconds)}"
        )


class Usage:
    """What one user has sent. `now` is Unix time by the clock of the store of pages."""

    def __init__(self, page: bytes | None, now: float) -> None:
        """Raises ValueError."""
        self.now = now
        self._windows: dict[str, _Slots] = {} if page is None else _decode(page)
        self.slide(now)

    def slide(self, now: float) -> None:
        """Forget what has left the windows, and what a clock that was set back has left in the future."""
        self.now = now
        for window, (length, slots) in LENGTHS.items():
            current = int(now // (length / slots))
            there = self._windows.get(window, [])
            self._windows[window] = [each for each in there if current - slots <= each[0] <= current + 1]

    def full(self, rails: Rails, more: Sent) -> Full | None:
        """The quota that has no room for `more`; of several the one that takes longest."""
        worst: Full | None = None
        for (what, window), most in rails.quotas.items():
            at = COUNTED.index(what)
            left = sum(each[1 + at] for each in self._windows[window]) + more[at] - most
            if not more[at] or left <= 0:
                continue
            seconds = math.inf if more[at] > most and what == "octets" else self._room_in(window, at, left)
            if worst is None or seconds > worst.seconds:
                worst = Full(f"{what}_per_{window}", most, seconds)
        return worst

    def _room_in(self, window: str, at: int, excess: int) -> float:
        length, slots = LENGTHS[window]
        for slot, *counts in self._windows[window]:
            excess -= counts[at]
            if excess <= 0:
                return max((slot + slots + 1) * (length / slots) - self.now, 1.0)
        return length

    def add(self, sent: Sent) -> None:
        for window, (length, slots) in LENGTHS.items():
            current, there = int(self.now // (length / slots)), self._windows[window]
            for at, (slot, *counts) in enumerate(there):
                if slot == current:
                    messages, recipients, octets = counts
                    new = messages + sent[0], recipients + sent[1], octets + sent[2]
                    there[at] = (slot, max(new[0], 0), max(new[1], 0), max(new[2], 0))
                    break
            else:
                there.append((current, max(sent[0], 0), max(sent[1], 0), max(sent[2], 0)))

    def levels(self, rails: Rails) -> Iterator[Level]:
        for (what, window), most in rails.quotas.items():
            at = COUNTED.index(what)
            yield Level(f"{what}_per_{window}", sum(each[1 + at] for each in self._windows[window]), most)

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self._windows)


class Quotas:
    """The quotas. `pages` is made when the first user with quotas comes. `near` hears of each quota that is
    nearly used up, with the user: once, until there is room again.
    """

    def __init__(
        self, pages: Callable[[], BookStore], clock: Clock, near: Callable[[str, Level], None]
    ) -> None:
        self._make_pages = pages
        self._clock = clock
        self._near = near
        self.problem = ""
        """In words, while usage cannot be counted."""
        self._pages: BookStore | None = None
        self._open = False
        self._opening = asyncio.Lock()
        self._locks: dict[str, asyncio.Lock] = {}
        self._seen: OrderedDict[str, tuple[Rails, Usage]] = OrderedDict()

    async def usage(self, user: str) -> Usage:
        """Raises AuthorityError."""
        pages = await self._opened()
        page = await self._asked(pages.read(_name(user)))
        return self._usage(page.data, page.now)

    async def take(self, user: str, rails: Rails, sent: Sent, *, force: bool = False) -> Full | None:
        """Count what is about to be accepted, or return the quota that has no room. Raises AuthorityError."""
        pages, name = await self._opened(), _name(user)
        for _ in range(MAX_TRIES):
            async with self._locks.setdefault(user, asyncio.Lock()):
                page = await self._asked(pages.read(name))
                usage = self._usage(page.data, page.now)
                full = None if force else usage.full(rails, sent)
                before = {each.limit: each.used for each in usage.levels(rails)}
                if full is None:
                    usage.add(sent)
                    written = pages.replace(name, page, usage.encode(), keep=_KEEP, words=())
                    if not await self._asked(written):
                        continue
            self._saw(user, rails, usage, before)
            return full
        raise AuthorityError(f"{pages.name}: others were faster {MAX_TRIES} times")

    async def give_back(self, user: str, rails: Rails, sent: Sent) -> None:
        """What was counted was not accepted. Raises AuthorityError."""
        await self.take(user, rails, (-sent[0], -sent[1], -sent[2]), force=True)

    def seen(self) -> Iterator[tuple[str, Level]]:
        """The levels of users who have sent lately, as this worker has seen them."""
        now = self._clock.now()
        for user, (rails, usage) in self._seen.items():
            usage.slide(max(now, usage.now))
            for level in usage.levels(rails):
                yield user, level

    async def close(self) -> None:
        if self._pages is not None:
            self._open = False
            await self._pages.close()

    def _saw(self, user: str, rails: Rails, usage: Usage, before: dict[str, int]) -> None:
        self._seen.pop(user, None)
        self._seen[user] = (rails, usage)
        if len(self._seen) > MAX_SEEN:
            self._seen.popitem(last=False)
        for level in usage.levels(rails):
            if before[level.limit] < NEAR * level.most <= level.used:
                self._near(user, level)

    def _usage(self, data: bytes | None, now: float) -> Usage:
        try:
            return Usage(data, now)
        except ValueError as error:
            raise AuthorityError(f"the usage of a user makes no sense: {error}") from error

    async def _opened(self) -> BookStore:
        async with self._opening:
            if self._pages is None:
                self._pages = self._make_pages()
            if not self._open:
                await self._asked(self._pages.open(_hear_nothing))
                self._open = True
            return self._pages

    async def _asked(self, question: Awaitable[T]) -> T:
        try:
            found = await question
        except AuthorityError as error:
            self.problem = f"usage is not counted, and users with quotas are refused temporarily: {error}"
            self._open = False
            raise
        self.problem = ""
        return found


async def used_by(pages: BookStore, user: str, rails: Rails) -> list[Level]:
    """For a command beside the relay. Raises AuthorityError."""
    quotas = Quotas(lambda: pages, SystemClock(), lambda _user, _level: None)
    try:
        return list((await quotas.usage(user)).levels(rails))
    finally:
        await quotas.close()


def _name(user: str) -> str:
    """No zone is called so: a space is in no zone's name."""
    return f"user {user}"


def _hear_nothing(_word: str) -> None:
    return


def _in_words(seconds: float) -> str:
    if seconds < 120:
        return f"{math.ceil(seconds)} seconds"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} minutes" if minutes < 120 else f"{math.ceil(minutes / 60)} hours"
