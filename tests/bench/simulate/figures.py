"""What is measured, and what must never happen: a delivery lost or made twice, a limit or a rate exceeded."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.bench.simulate.world import Site, kind_name
from zonerelay.config.units import Rate
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery, DeliveryKey
from zonerelay.model.envelope import Priority
from zonerelay.model.reply import Outcome, Verdict
from zonerelay.telemetry.events.events import Field

SHARPNESS = 40
"""Buckets for a factor of ten: a percentile is right within 6 %."""
LEAST = 0.001
MOST_FAULTS = 20


class Spread:
    """How long something took, often. `percentile` is the upper end of its bucket; `longest` is exact."""

    __slots__ = ("_buckets", "count", "longest", "total")

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.count = 0
        self.total = 0.0
        self.longest = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        if seconds > self.longest:
            self.longest = seconds
        self._buckets[math.ceil(SHARPNESS * math.log10(seconds / LEAST)) if seconds > LEAST else 0] += 1

    def percentile(self, part: float) -> float:
        left = self.count * part
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return min(self.longest, LEAST * math.pow(10.0, bucket / SHARPNESS))
        return self.longest


@dataclass(slots=True)
class Passage:
    """Through the queue."""

    wait: Spread = field(default_factory=Spread)
    queue: Spread = field(default_factory=Spread)


class RateUse:
    """What was used of a rate."""

    def __init__(self, rate: Rate) -> None:
        self.rate = rate
        self.times: list[float] = []
        self._first = 0

    def spoke(self, now: float) -> int:
        """MAIL commands in the time of the rate that ends now."""
        self.times.append(now)
        while self.times[self._first] <= now - self.rate.seconds:
            self._first += 1
        return len(self.times) - self._first

    def part(self, since: float = 0.0, until: float = float("inf")) -> float:
        """Used between two moments, of what the rate allows."""
        times = [at for at in self.times if since <= at <= until]
        if len(times) < 2:
            return 0.0
        return (len(times) - 1) / (times[-1] - times[0]) * self.rate.seconds / self.rate.count


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment."""

    at: float
    queued: int
    active: int
    startable: int
    rss: float
    wall: float


@dataclass
class Figures:
    """`wait` until the first attempt begins, `queue` until the delivery is taken: by kind of destination.
    `by_priority`: the same, where mail has several.
    """

    clock: Clock
    has_priorities: bool = False
    wait: defaultdict[str, Spread] = field(default_factory=lambda: defaultdict(Spread))
    queue: defaultdict[str, Spread] = field(default_factory=lambda: defaultdict(Spread))
    by_priority: dict[tuple[Priority, str], Passage] = field(default_factory=dict)
    pool: Spread = field(default_factory=Spread)
    """How long an attempt waited until it might open a connection."""
    leases: Spread = field(default_factory=Spread)
    """How long a node waited for a connection's place that it shares with the others."""
    connections: int = 0
    attempts: Counter[str] = field(default_factory=Counter)
    delivered: Counter[str] = field(default_factory=Counter)
    returned: Counter[str] = field(default_factory=Counter)
    events: Counter[tuple[str, str]] = field(default_factory=Counter)
    accepted: int = 0
    reports: int = 0
    finished: int = 0
    transactions: int = 0
    connects: int = 0
    failed_connects: int = 0
    faults: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    _taken: set[DeliveryKey] = field(default_factory=set)
    _running: set[DeliveryKey] = field(default_factory=set)
    rates: dict[str, RateUse] = field(default_factory=dict)
    """By site."""

    def fault(self, text: str) -> None:
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(f"at {self.clock.monotonic():.3f} s: {text}")

    # One delivery's life

    def begun(self, deliveries: Sequence[Delivery]) -> None:
        """An attempt begins."""
        now = self.clock.now()
        for delivery in deliveries:
            key = delivery.key
            if key in self._running or key in self._taken:
                self.fault(f"{key} is attempted again although it is under way or was taken")
            self._running.add(key)
            kind = kind_name(delivery.recipient)
            self.attempts[kind] += 1
            if delivery.last is None:
                self.wait[kind].add(now - delivery.created)
                if self.has_priorities:
                    self._passage(delivery, kind).wait.add(now - delivery.created)

    def ended(self, deliveries: Sequence[Delivery], outcomes: Sequence[Outcome]) -> None:
        """No outcomes: it was cancelled."""
        self._running.difference_update(delivery.key for delivery in deliveries)
        for delivery, outcome in zip(deliveries, outcomes, strict=False):
            if outcome.verdict is Verdict.DELIVERED:
                self._taken.add(delivery.key)

    def left(self, delivery: Delivery) -> None:
        """It is no longer in a store."""
        self.finished += 1
        kind = kind_name(delivery.recipient)
        if delivery.key in self._taken:
            self._taken.discard(delivery.key)
            self.delivered[kind] += 1
            self.queue[kind].add(self.clock.now() - delivery.created)
            if self.has_priorities:
                self._passage(delivery, kind).queue.add(self.clock.now() - delivery.created)
        else:
            self.returned[kind] += 1

    def _passage(self, delivery: Delivery, kind: str) -> Passage:
        key = (delivery.priority, kind)
        found = self.by_priority.get(key)
        if found is None:
            found = self.by_priority[key] = Passage()
        return found

    # Limits

    def opened(self, site: Site, most: int, most_in_zone: int) -> None:
        """A connection, of any node: all count for the limits."""
        site.open += 1
        site.most_open = max(site.most_open, site.open)
        self.connections += 1
        if site.open > most:
            self.fault(f"{site.open} connections to {site.name}, {most} are allowed")
        if self.connections > most_in_zone:
            self.fault(f"{self.connections} connections in the zone, {most_in_zone} are allowed")

    def closed(self, site: Site) -> None:
        site.open -= 1
        self.connections -= 1

    def spoke(self, site: Site, rate: Rate) -> None:
        """A MAIL command where the configuration limits them."""
        used = self.rates.get(site.name)
        if used is None:
            used = self.rates[site.name] = RateUse(rate)
        number = used.spoke(self.clock.monotonic())
        if number > rate.count:
            self.fault(f"{number} transactions with {site.name} in {rate.seconds} s, not {rate.count}")

    # The log

    def emit(self, level: str, event: str, fields: dict[str, Field]) -> None:
        """Events of the relay (`LogSink`). Trouble is a fault: nothing in here is meant to go wrong."""
        recipient = str(fields.get("recipient", ""))
        self.events[event, kind_name(recipient) if recipient else ""] += 1
        if level == "error" or event == "trouble":
            self.fault(f"{event} {fields}")
        if event == "dsn":
            self.reports += 1

    def total(self, event: str) -> int:
        return sum(count for (name, _), count in self.events.items() if name == event)

    def balance(self, queued: int) -> list[str]:
        """The faults, and what does not add up at the end."""
        faults = list(self.faults)
        came = self.accepted + self.reports
        if came != self.finished + queued:
            faults.append(f"{came} deliveries came, {self.finished} left, {queued} are queued")
        if self.total("delivered") != self.delivered.total() + len(self._taken):
            faults.append(f"{self.total('delivered')} were taken, {self.delivered.total()} left as delivered")
        said = self.total("bounced") + self.total("expired")
        if said != self.returned.total():
            faults.append(f"{said} were returned or expired, {self.returned.total()} left so")
        return faults
