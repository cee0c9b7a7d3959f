"""What a receiver has seen, to be handed over at the end."""

import time
from collections import Counter, deque

import msgspec

from tests.support.receivers.ledger import Seen

MOST_ERRORS = 20


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A message that was taken. `doubtful`: its sender was not told. `raw` only of some, and of reports.

    `at` is a reading of the monotonic clock, which all processes of a machine share.
    """

    token: str
    recipients: tuple[str, ...]
    host: str
    client: str
    at: float
    encrypted: bool
    doubtful: bool = False
    raw: bytes = b""


class Account(msgspec.Struct, frozen=True):
    """Of one receiver."""

    name: str
    seen: Seen
    counts: dict[str, int]
    errors: list[str]


class Report(msgspec.Struct, frozen=True):
    arrivals: list[Arrival]
    accounts: list[Account]
    lag: float
    """The longest that the receivers themselves were busy with something else."""

    def account(self, name: str) -> Account:
        return next(each for each in self.accounts if each.name == name)


class Journal:
    """One receiver's."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self.errors: list[str] = []
        self.arrivals: list[Arrival] = []
        self.known: set[tuple[str, str]] = set()
        """What has happened once, by what it was and to whom."""
        self.first_clients: dict[str, str] = {}
        """By recipient."""
        self.triples: dict[tuple[str, str, str], float] = {}
        self.mails: deque[float] = deque()

    def error(self, text: str) -> None:
        """The relay did what no client may."""
        self.counts["errors"] += 1
        if len(self.errors) < MOST_ERRORS:
            self.errors.append(text)

    def is_first(self, what: str, whom: str) -> bool:
        first = (what, whom) not in self.known
        self.known.add((what, whom))
        return first

    def is_over(self, rate: tuple[int, float]) -> bool:
        """Whether one more now would exceed a rate; it counts when it does not."""
        now = time.monotonic()
        while self.mails and self.mails[0] <= now - rate[1]:
            self.mails.popleft()
        if len(self.mails) >= rate[0]:
            return True
        self.mails.append(now)
        return False

    def is_greylisted(self, triple: tuple[str, str, str], seconds: float) -> bool:
        now = time.monotonic()
        return now < self.triples.setdefault(triple, now) + seconds
