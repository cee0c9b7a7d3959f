"""What a run of one row on one relay found, and the figures derived from it.

Every repetition is kept, the figures are medians, and nothing is dropped: a spread of more than
`NOISY` between repetitions is reported beside the figure.
"""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tests.bench.rows import MIB, Row
from tests.support.meters import Memory

NOISY = 0.15


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

    def figure(self, metric: str) -> float | None:
        """The metric's value, from the medians of the repetitions."""
        return METRICS[metric].of(self)

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


@dataclass(frozen=True, slots=True)
class Metric:
    label: str
    of: Callable[[Result], float | None]


METRICS = {
    "accepted_rate": Metric("accepted, messages/s", lambda r: _rate(r, "accepted", r.row.messages)),
    "delivered_rate": Metric("delivered, messages/s", lambda r: _rate(r, "delivered", r.row.messages)),
    "recipient_rate": Metric(
        "delivered, recipients/s", lambda r: _rate(r, "delivered", r.row.messages * r.row.recipients)
    ),
    "delivered_mb": Metric(
        "delivered, MiB/s", lambda r: _rate(r, "delivered", r.row.messages * r.row.size / MIB)
    ),
    "cpu_ms": Metric("CPU, ms per message", lambda r: _cpu(r, statistics.median)),
    # What others on the machine have disturbed least.
    "cpu_ms_least": Metric("CPU, ms per message, least", lambda r: _cpu(r, min)),
    "memory_mb": Metric("peak memory (PSS), MiB", lambda r: r.memory.pss / MIB if r.memory else None),
    "rss_mb": Metric("peak memory (RSS summed), MiB", lambda r: r.memory.rss / MIB if r.memory else None),
    "fsyncs": Metric("fsyncs per message", lambda r: r.fsyncs),
    "accept_p50": Metric("final dot to 250, p50 ms", lambda r: milliseconds(r.accept, 0.50)),
    "accept_p99": Metric("final dot to 250, p99 ms", lambda r: milliseconds(r.accept, 0.99)),
    "arrive_p50": Metric("final dot to sink, p50 ms", lambda r: milliseconds(r.arrive, 0.50)),
    "arrive_p99": Metric("final dot to sink, p99 ms", lambda r: milliseconds(r.arrive, 0.99)),
}


def _rate(found: Result, until: Literal["accepted", "delivered"], amount: float) -> float | None:
    times: list[float] = [getattr(sample, until) for sample in found.samples]
    return statistics.median(amount / one for one in times) if times else None


def _cpu(found: Result, of: Callable[[Iterable[float]], float]) -> float | None:
    return of(sample.cpu / found.row.messages * 1000 for sample in found.samples) if found.samples else None


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that at least `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(share * 1e6) * len(ordered) // 1_000_000) - 1)]


def milliseconds(seconds: Sequence[float], share: float) -> float | None:
    return percentile(seconds, share) * 1000 if seconds else None


def ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours is not None and theirs else None
