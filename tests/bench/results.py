"""What a run of one row on one relay found, and the figures derived from it.

Every repetition is kept, the figures are medians, and nothing is dropped: a spread of more than
`NOISY` between repetitions is reported beside the figure.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.bench.rows import MIB, Row
from tests.support.meters import Memory

NOISY = 0.15
METRICS = (
    "accepted_rate",
    "delivered_rate",
    "recipient_rate",
    "delivered_mb",
    "cpu_ms",
    "cpu_ms_least",
    "memory_mb",
    "rss_mb",
    "fsyncs",
    "accept_p50",
    "accept_p99",
    "arrive_p50",
    "arrive_p99",
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One timed repetition: seconds until all was accepted, until all had arrived, and CPU seconds."""

    accepted: float
    delivered: float
    cpu: float


@dataclass(slots=True)
class Result:
    """Figures are None when that part was not run."""

    row: Row
    relay: str
    samples: list[Sample] = field(default_factory=list)
    memory: Memory | None = None
    accept: list[float] = field(default_factory=list)  # seconds from final dot to 250
    arrive: list[float] = field(default_factory=list)  # seconds from final dot to the sink's final dot
    fsyncs: float | None = None
    source_busy: float = 0.0  # of one core, for our own driver
    notes: list[str] = field(default_factory=list)

    def _rate(self, seconds: Sequence[float], amount: float) -> float | None:
        return statistics.median(amount / one for one in seconds) if seconds else None

    @property
    def accepted_rate(self) -> float | None:
        return self._rate([sample.accepted for sample in self.samples], self.row.messages)

    @property
    def delivered_rate(self) -> float | None:
        return self._rate([sample.delivered for sample in self.samples], self.row.messages)

    @property
    def recipient_rate(self) -> float | None:
        amount = self.row.messages * self.row.recipients
        return self._rate([sample.delivered for sample in self.samples], amount)

    @property
    def delivered_mb(self) -> float | None:
        amount = self.row.messages * self.row.size / MIB
        return self._rate([sample.delivered for sample in self.samples], amount)

    @property
    def cpu_ms(self) -> float | None:
        if not self.samples:
            return None
        return statistics.median(sample.cpu for sample in self.samples) / self.row.messages * 1000

    @property
    def cpu_ms_least(self) -> float | None:
        """What others on the machine have disturbed least."""
        return min((sample.cpu for sample in self.samples), default=0.0) / self.row.messages * 1000 or None

    @property
    def memory_mb(self) -> float | None:
        return self.memory.pss / MIB if self.memory else None

    @property
    def rss_mb(self) -> float | None:
        return self.memory.rss / MIB if self.memory else None

    @property
    def accept_p50(self) -> float | None:
        return milliseconds(self.accept, 0.50)

    @property
    def accept_p99(self) -> float | None:
        return milliseconds(self.accept, 0.99)

    @property
    def arrive_p50(self) -> float | None:
        return milliseconds(self.arrive, 0.50)

    @property
    def arrive_p99(self) -> float | None:
        return milliseconds(self.arrive, 0.99)

    def figure(self, metric: str) -> float | None:
        if metric not in METRICS:
            raise KeyError(metric)
        value: float | None = getattr(self, metric)
        return value

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median of the delivery times."""
        times = [sample.delivered for sample in self.samples]
        return (max(times) - min(times)) / statistics.median(times) if len(times) > 1 else 0.0

    def as_json(self) -> dict[str, object]:
        return {
            "row": self.row.key,
            "relay": self.relay,
            "figures": {metric: self.figure(metric) for metric in METRICS},
            "repetitions": [
                {"accepted_s": one.accepted, "delivered_s": one.delivered, "cpu_s": one.cpu}
                for one in self.samples
            ],
            "spread": self.spread,
            "source_busy": self.source_busy,
            "processes": self.memory.processes if self.memory else None,
            "notes": self.notes,
        }


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that at least `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(share * 1e6) * len(ordered) // 1_000_000) - 1)]


def milliseconds(seconds: Sequence[float], share: float) -> float | None:
    return percentile(seconds, share) * 1000 if seconds else None


def ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None
