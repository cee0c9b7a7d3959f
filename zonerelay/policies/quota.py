"""Quota: how many recipients a user may have per hour and per day.

    policy = "zonerelay.policies.quota:Quota"
    policy_file = "/etc/zonerelay/quota.toml"

    [default]                        # every user, and every client that has not logged in
    recipients_per_hour = 500        # 0 or absent: no limit
    recipients_per_day = 2000

    [user."newsletter"]              # what is not given here is as in [default]
    recipients_per_hour = 0

Who has not logged in is counted by address (an IPv6 /64 is one client). A recipient counts when it is
accepted here, delivered or not; beyond the limit the answer is 452 4.7.1 with the time until there is room.
A changed file is taken up within a second; a wrong one is logged once and the limits stay as they were.

The counts are in memory: each worker process and each listener has its own, and a restart forgets them.
At most `MAX_COUNTED` users and clients are remembered, the longest silent ones are forgotten first.
"""

from __future__ import annotations

import ipaddress
import logging
import math
import tomllib
from collections import OrderedDict, deque
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from pathlib import Path

from zonerelay.inbound.policy import ClientInfo, Decision, Policy, PolicyContext, Rcpt, refuse

SLOTS = 60


class Window:
    """Counts what was added in the last `length` seconds, in `SLOTS` slots; `now` is a monotonic clock in
    seconds.

    The window slides by one slot at a time and always covers its whole length, so that no hour has more than
    the hour's limit; an addition leaves the window up to one slot late.
    """

    __slots__ = ("_counts", "_slot", "total")

    def __init__(self, length: float) -> None:
        self._slot = length / SLOTS
        self._counts: deque[tuple[int, int]] = deque()  # (slot number, count), oldest first
        self.total = 0

    def slide(self, now: float) -> None:
        """Forget what has left the window."""
        first = int(now // self._slot) - SLOTS
        while self._counts and self._counts[0][0] < first:
            self.total -= self._counts.popleft()[1]

    def add(self, now: float) -> None:
        slot = int(now // self._slot)
        count = self._counts.pop()[1] if self._counts and self._counts[-1][0] == slot else 0
        self._counts.append((slot, count + 1))
        self.total += 1

    def room_at(self, limit: int) -> float:
        """When, without further counting, the total will be below `limit` (at least 1)."""
        left = self.total
        for slot, count in self._counts:
            left -= count
            if left < limit:
                return (slot + SLOTS + 1) * self._slot
        return 0.0


HOUR = 3600.0
DAY = 24 * HOUR
LOOK_EVERY = 1.0
MAX_COUNTED = 20_000
MAX_FILE = 1024 * 1024

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """0 is no limit."""

    recipients_per_hour: int = 0
    recipients_per_day: int = 0


class Quota(Policy):
    """`async def`: all events come in one thread, so that counting needs no lock."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        if context.file is None:
            raise ValueError("policy_file has to name the file with the limits")
        self._file = _LimitsFile(context.file)
        self._clock = context.clock
        self._look_next = self._clock.monotonic() + LOOK_EVERY
        self._counted: OrderedDict[str, tuple[Window, Window]] = OrderedDict()

    async def rcpt(self, event: Rcpt) -> Decision | None:
        now = self._clock.monotonic()
        if now >= self._look_next:
            self._look_next = now + LOOK_EVERY
            self._file.look()
        limits = self._file.limits_of(event.client.user)
        hour, day = self._windows(_name(event.client))
        wait = max(_wait(hour, limits.recipients_per_hour, now), _wait(day, limits.recipients_per_day, now))
        if wait > 0:
            return refuse(452, "7.1", f"Recipient limit reached, try again in {_in_words(wait)}")
        hour.add(now)
        day.add(now)
        return None

    def _windows(self, name: str) -> tuple[Window, Window]:
        windows = self._counted.get(name)
        if windows is None:
            while len(self._counted) >= MAX_COUNTED:
                self._counted.popitem(last=False)
            windows = self._counted[name] = Window(HOUR), Window(DAY)
        else:
            self._counted.move_to_end(name)
        return windows


class _LimitsFile:
    """The limits as last read, and the file's looks at that time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen = self._looks()
        self._default, self._users = _read(path)

    def limits_of(self, user: str) -> Limits:
        return self._users.get(user, self._default) if user else self._default

    def look(self) -> None:
        """Read the file again when it has changed; a wrong one changes nothing."""
        looks = self._looks()
        if looks == self._seen:
            return
        self._seen = looks
        try:
            self._default, self._users = _read(self._path)
        except ValueError as error:
            _log.error("quota: the limits stay as they were: %s", error)
        else:
            _log.info("quota: the limits were read again")

    def _looks(self) -> tuple[int, ...]:
        try:
            stat = self._path.stat()
        except OSError:
            return ()
        return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _read(path: Path) -> tuple[Limits, dict[str, Limits]]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    if len(data) > MAX_FILE:
        raise ValueError(f"{path} is longer than {MAX_FILE} bytes")
    try:
        return parse_limits(tomllib.loads(data.decode()))
    except ValueError as error:  # of TOML and UTF-8 too
        raise ValueError(f"{path}: {error}") from error


def parse_limits(tables: dict[str, object]) -> tuple[Limits, dict[str, Limits]]:
    """The default limits, and those of users. ValueError says what is wrong where."""
    for name in tables:
        if name not in ("default", "user"):
            raise ValueError(f"there is no table {name}: write [default] and [user.NAME]")
    default = _limits(tables.get("default", {}), Limits(), "default")
    users = tables.get("user", {})
    if not isinstance(users, dict):
        raise _not_a_table("user")
    return default, {name: _limits(table, default, f"user.{name}") for name, table in users.items()}


def _limits(table: object, default: Limits, where: str) -> Limits:
    if not isinstance(table, dict):
        raise _not_a_table(where)
    known = [field.name for field in fields(Limits)]
    for key, value in table.items():
        if key not in known:
            raise ValueError(f"{where}.{key} is no limit: write {' or '.join(known)}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{where}.{key} is a number, 0 for no limit")
    return replace(default, **table)


def _not_a_table(where: str) -> ValueError:
    return ValueError(f"{where} is a table: write [{where}]")


def _wait(window: Window, limit: int, now: float) -> float:
    """Seconds until one more fits; 0 or less: now."""
    window.slide(now)
    return window.room_at(limit) - now if limit and window.total >= limit else 0.0


def _in_words(seconds: float) -> str:
    minutes = math.ceil(seconds / 60)
    if minutes < 120:
        return f"{minutes} minute{'s' if minutes > 1 else ''}"
    return f"{math.ceil(minutes / 60)} hours"


def _name(client: ClientInfo) -> str:
    """Users and addresses in one table: a user's name may look like an address."""
    return f"user {client.user}" if client.user else f"client {_network(client.address)}"


@lru_cache(4096)
def _network(address: str) -> str:
    if ":" not in address:
        return address
    return str(ipaddress.ip_network((address, 64), strict=False))
