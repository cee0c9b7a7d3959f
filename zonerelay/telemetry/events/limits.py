"""What is told about limits that several workers share: log lines, a counter, gauges and a histogram.

Labels are zones, from the configuration.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from zonerelay.model.outbox import MAILBOXES, is_mailbox_zone
from zonerelay.telemetry.metrics.instruments import Counter, Gauge, Histogram, Instruments

WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300)

Field = str | int | float | bool | None


class LimitMetrics(Instruments):
    """Silent until `attach`: a worker that shares no limits has none of these."""

    def __init__(self) -> None:
        self.lost = Counter(
            "zonerelay_limits_lost_total", "Times that whoever leases shared limits was out of reach."
        )
        self.reachable = Gauge(
            "zonerelay_limits_reachable", "1 while whoever leases shared limits answers, else 0."
        )
        self.reachable.value = 1
        self.waits = Histogram(
            "zonerelay_limits_wait_seconds",
            "From wishing for a connection to its grant.",
            WAIT_BUCKETS,
        )
        super().__init__(self.lost, self.reachable, self.waits)
        self._read: Callable[[], Mapping[str, tuple[int, int, int]]] | None = None

    def attach(self, read: Callable[[], Mapping[str, tuple[int, int, int]]]) -> None:
        """By zone: places held, connections open, places wished for."""
        self._read = read

    def collect(self) -> Iterator[Metric]:
        if self._read is None:
            return
        yield from super().collect()
        family = GaugeMetricFamily(
            "zonerelay_limits_places",
            "Connections that this worker may have of limits it shares, has, and would like.",
            labels=("zone", "state"),
        )
        numbers: Counts[tuple[str, str]] = Counts()
        for zone, figures in self._read().items():
            label = MAILBOXES if is_mailbox_zone(zone) else zone
            for state, number in zip(("held", "used", "wanted"), figures, strict=True):
                numbers[label, state] += number
        for labels, number in numbers.items():
            family.add_metric(labels, number)
        yield family


class LimitEvents:
    """One per worker. Never raises."""

    def __init__(self, emit: Callable[[str, str, dict[str, Field]], None], metrics: LimitMetrics) -> None:
        self._emit = emit
        self._metrics = metrics

    def read(self, figures: Callable[[], Mapping[str, tuple[int, int, int]]]) -> None:
        """By zone: places held, connections open, places wished for."""
        self._metrics.attach(figures)

    def waited(self, seconds: float) -> None:
        self._metrics.waits.observe(seconds)

    def lost(self, authority: str, reason: str) -> None:
        self._metrics.lost.value += 1
        self._metrics.reachable.value = 0
        self._emit("warning", "limits-lost", {"from": authority, "reason": reason})

    def restored(self, authority: str) -> None:
        self._metrics.reachable.value = 1
        self._emit("info", "limits-restored", {"from": authority})
