"""Counters, gauges and histograms as plain numbers; a scrape makes Prometheus families of them.

prometheus-client's own instruments lock and check at every step, which costs more than all other work of the
metrics for a message. These change on the event loop alone, so they need no lock. No method raises. A label
has at most `MAX_LABEL_VALUES` values; further values are counted as `other`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

MAX_LABEL_VALUES = 200
OTHER = "other"


class Counter:
    """`value` only grows."""

    __slots__ = ("_help", "_name", "value")

    def __init__(self, name: str, help_text: str) -> None:
        self._name = name
        self._help = help_text
        self.value = 0

    def family(self) -> Metric:
        return CounterMetricFamily(self._name, self._help, self.value)


class Gauge(Counter):
    """`value` goes up and down."""

    __slots__ = ()

    def family(self) -> Metric:
        return GaugeMetricFamily(self._name, self._help, self.value)


class LabelledCounter:
    """One number per combination of label values; the first label is the one that may have many."""

    __slots__ = ("_first_values", "_help", "_labels", "_name", "_numbers")

    def __init__(self, name: str, help_text: str, labels: Sequence[str]) -> None:
        self._name = name
        self._help = help_text
        self._labels = labels
        self._numbers: dict[tuple[str, ...], int] = {}
        self._first_values: set[str] = set()

    def add(self, values: tuple[str, ...], amount: int = 1) -> None:
        """`values` in the order of the labels."""
        numbers = self._numbers
        if values in numbers:
            numbers[values] += amount
            return
        values = self._admitted(values)
        numbers[values] = numbers.get(values, 0) + amount

    def declare(self, combinations: Iterable[tuple[str, ...]]) -> None:
        """Show these from the start, with 0: of one that appears late `increase()` misses the first event."""
        for values in combinations:
            self.add(values, 0)

    def _admitted(self, values: tuple[str, ...]) -> tuple[str, ...]:
        first = values[0]
        if first not in self._first_values:
            if len(self._first_values) >= MAX_LABEL_VALUES:
                return (OTHER, *values[1:])
            self._first_values.add(first)
        return values

    def family(self) -> Metric:
        family = CounterMetricFamily(self._name, self._help, labels=self._labels)
        for values, number in self._numbers.items():
            family.add_metric(values, number)
        return family


class Histogram:
    """The number of observations up to each bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "_help", "_name", "_sum")

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._help = help_text
        self._bounds = (*bounds, float("inf"))
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self) -> Metric:
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip(self._bounds, self._counts, strict=True):
            total += count
            label = floatToGoString(bound)  # type: ignore[no-untyped-call]  # the library left it untyped
            buckets.append((label, total))
        return HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._sum)


Made = TypeVar("Made", Counter, Gauge, LabelledCounter, Histogram)


class Instruments(Collector):
    """Makes instruments, and hands them to prometheus-client in the order in which they were made."""

    def __init__(self) -> None:
        self._made: list[Counter | LabelledCounter | Histogram] = []

    def counter(self, name: str, help_text: str) -> Counter:
        return self._kept(Counter(name, help_text))

    def gauge(self, name: str, help_text: str) -> Gauge:
        return self._kept(Gauge(name, help_text))

    def labelled(
        self, name: str, help_text: str, *labels: str, declared: Iterable[str] = ()
    ) -> LabelledCounter:
        """`declared` are values of the one label, which show from the start."""
        made = self._kept(LabelledCounter(name, help_text, labels))
        made.declare((value,) for value in declared)
        return made

    def histogram(self, name: str, help_text: str, bounds: Sequence[float]) -> Histogram:
        return self._kept(Histogram(name, help_text, bounds))

    def _kept(self, instrument: Made) -> Made:
        self._made.append(instrument)
        return instrument

    def collect(self) -> Iterator[Metric]:
        for instrument in self._made:
            yield instrument.family()
