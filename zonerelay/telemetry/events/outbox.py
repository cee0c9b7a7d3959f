"""Figures of the outbox. Nothing is shown where there is none; labels are our own words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

STATUSES = ("queued", "processing", "failed")
ENDS = ("sent", "failed", "queued")


class OutboxFigures(NamedTuple):
    """`rows` by status and `lag` as of the last count of the table; the rest since the start."""

    rows: dict[str, int]
    lag: float
    claims: int
    reaped: int
    usable: bool


class OutboxMetrics(Collector):
    """`attach` whoever knows the figures."""

    def __init__(self) -> None:
        self._read: Callable[[], OutboxFigures] | None = None
        self._finished = dict.fromkeys(ENDS, 0)

    def attach(self, read: Callable[[], OutboxFigures]) -> None:
        self._read = read

    def finished(self, status: str) -> None:
        """A row was let go of as `sent`, as `failed`, or as `queued` to be tried again."""
        self._finished[status] += 1

    def collect(self) -> Iterator[Metric]:
        if self._read is None:
            return
        figures = self._read()
        rows = GaugeMetricFamily("zonerelay_outbox_rows", "Rows of the outbox.", labels=("status",))
        for status in STATUSES:
            rows.add_metric((status,), figures.rows.get(status, 0))
        yield rows
        ends = CounterMetricFamily(
            "zonerelay_outbox_finished_total", "Rows that this relay has let go of.", labels=("status",)
        )
        for status, count in self._finished.items():
            ends.add_metric((status,), count)
        yield ends
        yield CounterMetricFamily("zonerelay_outbox_claims_total", "Rows claimed here.", figures.claims)
        yield CounterMetricFamily(
            "zonerelay_outbox_reaped_total", "Rows of dead relays given back to the queue.", figures.reaped
        )
        yield GaugeMetricFamily(
            "zonerelay_outbox_lag_seconds", "How long the first row that is due has waited.", figures.lag
        )
        yield GaugeMetricFamily(
            "zonerelay_outbox_up", "1 while the database can be used.", float(figures.usable)
        )
