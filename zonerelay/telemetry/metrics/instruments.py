"""Counters, gauges and histograms as plain numbers, which a scrape converts to Prometheus metric families.

prometheus-client's own instruments lock and check at every step, which costs more than all other work of the
metrics for a message. These change on the event loop alone, so they need no lock. No method raises. A label
has at most `MAX_LABEL_VALUES` values; further values are counted as `other`.

Metric families as plain values that travel between processes, and their totals over all workers.

Counters and histograms add up. A worker that starts again counts from 0, so the last values of the one before
are kept: `MetricTotals` never goes backwards. Gauges add up too, but for those that are ages, times or
answers.
"""

import asyncio
import contextlib
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import add
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from zonerelay.telemetry.metrics.families import READ, Family, Labels

SHARED_QUEUE = "zonerelay_queue_deliveries"

# How the numbers of two workers are joined where that is not in `READ` and their sum is wrong.
_OF: Mapping[str, Callable[[float, float], float]] = {
    "zonerelay_last_delivered_timestamp_seconds": max,
    "zonerelay": max,
    "zonerelay_name_servers_reachable": min,
    "process_start_time_seconds": min,
    "process_max_fds": min,
}
# The contents of a worker's spool remain when its process ends.
_LASTING = frozenset({SHARED_QUEUE, "zonerelay_queue_oldest_seconds"})
_GROWING = frozenset({"counter", "histogram"})

Key = tuple[str, Labels]


def collect(registry: CollectorRegistry) -> tuple[Family, ...]:
    return tuple(
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            tuple((each.name, tuple(each.labels.items()), float(each.value)) for each in metric.samples),
        )
        for metric in registry.collect()
    )


class _Families(Collector):
    """Converts metric families to those of the library prometheus-client."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.help, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, dict(labels), value)
            yield metric


def exposition(families: Iterable[Family]) -> bytes:
    """Return metrics in the Prometheus text format."""
    return generate_latest(_Families(families))


class MetricTotals:
    """The totals of all workers' metrics: the latest of each worker, and the final counts of ended
    processes.
    """

    def __init__(self) -> None:
        self._latest: dict[int, tuple[Family, ...]] = {}
        self._lives: dict[int, int] = {}
        self._former: dict[str, Family] = {}
        self._left: dict[int, tuple[Family, ...]] = {}

    def take(self, worker: int, life: int, families: tuple[Family, ...]) -> None:
        """Store the latest metrics of a worker. `life` counts the starts of this worker; late metrics of an
        earlier process are ignored.
        """
        known = self._lives.get(worker, life)
        if life < known:
            return
        if life > known:
            self.bury(worker, known)
        self._lives[worker] = life
        self._latest[worker] = families
        self._leave(worker, self._left.pop(worker, ()), unless_in=families)

    def bury(self, worker: int, life: int) -> None:
        """Record that a worker's process has ended, or has sent its last metrics. Its counters are kept, and
        so are the numbers of its queue until its next process reports them; its other gauges are dropped.
        Later metrics of this process are ignored.
        """
        if life < self._lives.get(worker, life):
            return
        self._lives[worker] = life + 1
        families = self._latest.pop(worker, ())
        before = self._left.pop(worker, ())
        lasting = [family for family in families if family.name in _LASTING and family.samples]
        self._leave(worker, before, unless_in=lasting)
        if lasting:
            self._left[worker] = (*self._left.get(worker, ()), *lasting)
        for family in families:
            if family.kind in _GROWING:
                kept = self._former.get(family.name)
                self._former[family.name] = family if kept is None else _merged([kept, family], shared=False)

    def _leave(self, worker: int, before: Iterable[Family], *, unless_in: Iterable[Family]) -> None:
        """Keep the queue numbers of an ended process until the worker's next process has counted its
        queue.
        """
        said = {family.name for family in unless_in if family.samples}
        left = tuple(family for family in before if family.name not in said)
        if left:
            self._left[worker] = left

    def forget(self, worker: int) -> None:
        """Remove a worker and the numbers of its queue."""
        self.bury(worker, self._lives.get(worker, 0))
        self._left.pop(worker, None)
        self._lives.pop(worker, None)  # another worker's lives are counted from the start

    def families(self, others: tuple[Family, ...] = (), *, shared: bool = False) -> tuple[Family, ...]:
        """Return the metrics of the whole relay. `shared` means that all workers count one queue. `others`
        are added unchanged.
        """
        found: dict[str, list[Family]] = {}
        present = (*self._latest.values(), *self._left.values())
        for family in (*self._former.values(), *(each for part in present for each in part), *others):
            found.setdefault(family.name, []).append(family)
        return tuple(_merged(same, shared=shared) for same in found.values())


def _merged(same: list[Family], *, shared: bool) -> Family:
    first = same[0]
    if len(same) == 1:
        return first
    numbers: dict[Key, float] = {}
    for family in same:
        for name, labels, value in family.samples:
            key = (name, labels)
            before = numbers.get(key)
            numbers[key] = value if before is None else _together(first.name, labels, before, value, shared)
    samples = tuple((name, labels, value) for (name, labels), value in numbers.items())
    return Family(first.name, first.kind, first.help, samples)


def _together(family: str, labels: Labels, one: float, other: float, shared: bool) -> float:
    if shared and family == SHARED_QUEUE and ("state", "active") not in labels:
        return max(one, other)
    return (READ[family].of if family in READ else _OF.get(family, add))(one, other)


# How busy the event loop is: how late its timers run, and which part of the time its thread needs a
# processor.
#
# `LoopLag` measures with one timer how much later than asked it is called, which is how long a client, a
# peer or another timer waits because the relay is busy. A pause of the loop shows as a lag between its
# length and its length less the interval; the interval is longer while the loop is idle. `longest` is the
# worst lag of the last one to two minutes, so that every reader of the metrics sees it, whatever its
# interval.
#
# `CpuDemand` adds the time in the kernel's run queue (/proc/thread-self/schedstat) to the thread's CPU time,
# because CPU time alone would say little where other programs use the machine.

SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Nanoseconds: running, and waiting to run; then a count."""


class CpuDemand:
    """Measures the CPU demand of the calling thread, including the time that it waits for a CPU."""

    def __init__(self, *, schedstat: Path = SCHEDSTAT) -> None:
        self._schedstat = schedstat
        self._at = 0.0
        self._needed = 0.0

    def since_last(self) -> float:
        """Return the CPU demand since the last call, from 0.0 to 1.0; 0.0 at the first call."""
        now, needed = time.monotonic(), time.thread_time() + self._waited()
        passed, more = now - self._at, needed - self._needed
        is_first, self._at, self._needed = self._at == 0.0, now, needed
        if is_first or passed <= 0:
            return 0.0
        return min(1.0, max(0.0, more / passed))

    def _waited(self) -> float:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return int(self._schedstat.read_bytes().split()[1]) / 1e9
        return 0.0


INTERVAL = 0.025
"""Seconds: short against a pause that matters (0.05)."""
IDLE_INTERVAL = 0.1
"""Forty wake-ups a second were more than half of what an idle relay cost."""
IDLE = 0.002
"""CPU seconds since the last look: with less the loop had next to nothing to do."""
SPAN = 60.0
"""Seconds that the worst lag is remembered for, at least."""


class LoopLag:
    """Measures the lag of the event loop on which it is started. `mark` is called every minute."""

    def __init__(self, observe: Callable[[float], None], mark: Callable[[], None] = lambda: None) -> None:
        self._observe, self._mark = observe, mark
        self._used = 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._worst = self._worst_before = 0.0
        self._span_ends = 0.0

    @property
    def longest(self) -> float:
        """The longest recent lag of the event loop in seconds."""
        return max(self._worst, self._worst_before)

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._span_ends = self._loop.time() + SPAN
        self._used = time.thread_time()
        self._arm(self._loop, INTERVAL)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, loop: asyncio.AbstractEventLoop, interval: float) -> None:
        self._due = loop.time() + interval
        self._timer = loop.call_at(self._due, self._look)

    def _look(self) -> None:
        assert self._loop is not None
        now = self._loop.time()
        # Timers have a resolution of a millisecond, and may fire that much too early.
        lag = max(0.0, now - self._due)
        self._observe(lag)
        if now >= self._span_ends:
            self._worst_before, self._worst = self._worst, 0.0
            self._span_ends = max(self._span_ends + SPAN, now)
            self._mark()
        self._worst = max(self._worst, lag)
        before, self._used = self._used, time.thread_time()
        self._arm(self._loop, interval_after(self._used - before, lag))


class PerMinute:
    """Counts per minute for the last hour, computed from totals that only grow. The last count is that of the
    current minute.
    """

    def __init__(self, *totals: Callable[[], int]) -> None:
        self._totals = totals
        self._marks = deque([tuple(0 for _ in totals)], maxlen=60)

    def mark(self) -> None:
        """Record the totals at the end of a minute."""
        self._marks.append(tuple(total() for total in self._totals))

    def counts(self) -> tuple[tuple[int, ...], ...]:
        """Return the counts per minute of each total, at most 60."""
        marks = [*self._marks, tuple(total() for total in self._totals)]
        columns = zip(*marks, strict=True)
        return tuple(tuple(end - begin for begin, end in pairwise(column)) for column in columns)


def interval_after(cpu: float, lag: float) -> float:
    """Return the seconds until the next measurement of CPU demand and lag, after these values."""
    return IDLE_INTERVAL if cpu < IDLE and lag < INTERVAL else INTERVAL


MAX_LABEL_VALUES = 200
OTHER = "other"


class Counter(msgspec.Struct):
    """A counter; its `value` only grows."""

    _name: str
    _help: str
    value: int = 0

    def family(self) -> Metric:
        return CounterMetricFamily(self._name, self._help, self.value)


class Gauge(Counter):
    """A gauge; its `value` goes up and down."""

    def family(self) -> Metric:
        return GaugeMetricFamily(self._name, self._help, self.value)


class LabelledCounter(msgspec.Struct):
    """A counter with a number for each combination of label values; only the first label may have many
    values.
    """

    _name: str
    _help: str
    _labels: Sequence[str]
    _numbers: dict[tuple[str, ...], int] = {}
    _first_values: set[str] = set()

    def add(self, values: tuple[str, ...], amount: int = 1) -> None:
        """Add to the counter with these label values, which are in the order of the labels."""
        numbers = self._numbers
        if values in numbers:
            numbers[values] += amount
            return
        values = self._admitted(values)
        numbers[values] = numbers.get(values, 0) + amount

    def declare(self, combinations: Iterable[tuple[str, ...]]) -> None:
        """Initialize these label values with 0, because `increase()` misses the first event of a series that
        appears late.
        """
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
    """A histogram: the number of observations up to each bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "_help", "_name", "_sum")

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._help = help_text
        self._bounds = (*bounds, float("inf"))
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def count(self) -> int:
        return sum(self._counts)

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

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
    """The instruments of one worker, which are exported in the order in which they were created."""

    def __init__(self) -> None:
        self._made: list[Counter | LabelledCounter | Histogram] = []

    def counter(self, name: str, help_text: str) -> Counter:
        return self._kept(Counter(name, help_text))

    def gauge(self, name: str, help_text: str, value: int = 0) -> Gauge:
        return self._kept(Gauge(name, help_text, value))

    def labelled(self, name: str, help_text: str, *labels: str, **declared: Iterable[str]) -> LabelledCounter:
        """Create a counter with labels. `declared` is its last label, with values that are initialized with
        0.
        """
        made = self._kept(LabelledCounter(name, help_text, (*labels, *declared)))
        made.declare((value,) for values in declared.values() for value in values)
        return made

    def histogram(self, name: str, help_text: str, bounds: Sequence[float]) -> Histogram:
        return self._kept(Histogram(name, help_text, bounds))

    def _kept(self, instrument: Made) -> Made:
        self._made.append(instrument)
        return instrument

    def collect(self) -> Iterator[Metric]:
        for instrument in self._made:
            yield instrument.family()


# Figures that other parts keep: a scrape reads them, so that no part keeps gauges in step.

# Any: the value of the only label, or the values of several in the order of the labels
Figures = float | Mapping[Any, float] | None
"""The numbers of a metric by the values of its labels, or the number of a metric without labels."""
ReadFigures = Callable[[], Mapping[str, Figures]]
"""Returns figures by the names of their metrics (`families.READ`). It must answer from memory."""


def reload_figures(since: float, is_good: bool) -> Mapping[str, Figures]:
    """Return the time at which the active configuration was loaded, and whether the last reload succeeded, as
    metrics. The names follow Prometheus' own metrics for this.
    """
    return {
        "zonerelay_config_last_reload_success_timestamp_seconds": since,
        "zonerelay_config_last_reload_successful": float(is_good),
    }


class ZoneQueue(NamedTuple):
    """The numbers of one zone's queue at a scrape. `oldest` is an age in seconds; `connections` are
    outbound.
    """

    zone: str
    ready: int
    active: int
    deferred: int
    held: int
    oldest: float
    connections: int = 0
    overdue: float = 0.0
    """Seconds for which the deferred delivery that is due first has been due."""


def queue_figures(queues: Sequence[ZoneQueue], *, is_counted: bool) -> Mapping[str, Figures]:
    """Return the samples of the queue gauges. Before the queue is counted there are no samples, because a
    number that is too low looks like a queue that has emptied.
    """
    counted = queues if is_counted else ()
    states = ("ready", "active", "deferred", "held")
    return {
        SHARED_QUEUE: {(each.zone, state): getattr(each, state) for each in counted for state in states},
        "zonerelay_queue_oldest_seconds": {each.zone: each.oldest for each in counted},
        "zonerelay_queue_overdue_seconds": {each.zone: each.overdue for each in counted},
        "zonerelay_queue_counting": int(not is_counted),
        "zonerelay_outbound_connections": {each.zone: each.connections for each in queues},
    }
