"""Collectors of figures that other parts keep: a scrape reads them, so that no part keeps gauges in step.

Each collector is given a `read` that must answer from memory. Labels are from the configuration; a family
has at most `MAX_LABEL_VALUES` samples of a label whose values grow with the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import ClassVar, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from zonerelay.telemetry.metrics.instruments import MAX_LABEL_VALUES


class ZoneQueue(NamedTuple):
    """One zone at the time of a scrape; `oldest` is an age in seconds, `connections` are those to peers."""

    zone: str
    ready: int
    active: int
    deferred: int
    held: int
    oldest: float
    connections: int = 0
    overdue: float = 0.0
    """Seconds for which the deferred delivery that is due first has been due."""


class QueueCollector(Collector):
    """Before the queue is counted there are no samples of it: a figure that is too low reads as a queue that
    has emptied.
    """

    def __init__(self, read: Callable[[], Iterable[ZoneQueue]], is_counted: Callable[[], bool]) -> None:
        self._read = read
        self._is_counted = is_counted

    def collect(self) -> Iterator[Metric]:
        deliveries = GaugeMetricFamily(
            "zonerelay_queue_deliveries", "Deliveries in the queue.", labels=("zone", "state")
        )
        oldest = GaugeMetricFamily(
            "zonerelay_queue_oldest_seconds", "Age of the oldest delivery in the queue.", labels=("zone",)
        )
        overdue = GaugeMetricFamily(
            "zonerelay_queue_overdue_seconds",
            "How long the deferred delivery that was due first has been due.",
            labels=("zone",),
        )
        outbound = GaugeMetricFamily(
            "zonerelay_outbound_connections", "Open connections to peers.", labels=("zone",)
        )
        counting = GaugeMetricFamily(
            "zonerelay_queue_counting", "Workers that are still counting what they found in the queue."
        )
        is_counted = self._is_counted()
        for queue in self._read():
            outbound.add_metric((queue.zone,), queue.connections)
            if is_counted:
                deliveries.add_metric((queue.zone, "ready"), queue.ready)
                deliveries.add_metric((queue.zone, "active"), queue.active)
                deliveries.add_metric((queue.zone, "deferred"), queue.deferred)
                deliveries.add_metric((queue.zone, "held"), queue.held)
                oldest.add_metric((queue.zone,), queue.oldest)
                overdue.add_metric((queue.zone,), queue.overdue)
        counting.add_metric((), int(not is_counted))
        yield deliveries
        yield oldest
        yield overdue
        yield counting
        yield outbound


Readings = Iterable[tuple[tuple[str, ...], float]]
"""Label values, in the order of the labels, and a number for each."""


class ReadGauge(Collector):
    """One family; `read` is called at each scrape. What it yields beyond `MAX_LABEL_VALUES` is left out."""

    _family: ClassVar[type[GaugeMetricFamily] | type[CounterMetricFamily]] = GaugeMetricFamily

    def __init__(self, name: str, help_text: str, read: Callable[[], Readings], *labels: str) -> None:
        self._name = name
        self._help = help_text
        self._read = read
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        family = self._family(self._name, self._help, labels=self._labels)
        for values, number in islice(self._read(), MAX_LABEL_VALUES):
            family.add_metric(values, number)
        yield family


class ReadCounter(ReadGauge):
    """A family of numbers that only grow."""

    _family = CounterMetricFamily


class ReloadCollector(Collector):
    """When the configuration in force was taken up, and whether the last reload was. The names are those that
    Prometheus has for the same of itself.
    """

    def __init__(self, read: Callable[[], tuple[float, bool]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        since, is_good = self._read()
        yield GaugeMetricFamily(
            "zonerelay_config_last_reload_success_timestamp_seconds",
            "When the configuration in force was taken up, Unix time.",
            since,
        )
        yield GaugeMetricFamily(
            "zonerelay_config_last_reload_successful",
            "1, or 0 while the configuration on disk was refused.",
            float(is_good),
        )
