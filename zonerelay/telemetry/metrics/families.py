"""Metric families as plain values that travel between processes, and their totals over all workers.

Counters and histograms add up. A worker that starts again counts from 0, so the last values of the one before
are kept: `MetricTotals` never goes backwards. Gauges add up too, but for those that are ages, times or
answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

SHARED_QUEUE = "zonerelay_queue_deliveries"

# The oldest, the first to expire, and "no" when one says no.
_GREATEST = frozenset(
    {
        "zonerelay_queue_oldest_seconds",
        "zonerelay_queue_overdue_seconds",
        "zonerelay_last_delivered_timestamp_seconds",
        "zonerelay_loop_lag_longest_seconds",
        "zonerelay",
        # All workers have the same orders, and count the same table and the same captured mail.
        "zonerelay_orders",
        "zonerelay_captured_messages",
        "zonerelay_captured_bytes",
        "zonerelay_outbox_rows",
        "zonerelay_user_quota_used_ratio",
        "zonerelay_outbox_lag_seconds",
    }
)
_LEAST = frozenset(
    {
        "zonerelay_certificate_expiry_timestamp_seconds",
        "zonerelay_config_last_reload_success_timestamp_seconds",
        "zonerelay_config_last_reload_successful",
        "zonerelay_name_servers_reachable",
        "zonerelay_smarthost_login",
        "zonerelay_outbox_up",
        "process_start_time_seconds",
        "process_max_fds",
    }
)
# What a worker's spool holds does not go away with its process.
_LASTING = frozenset({SHARED_QUEUE, "zonerelay_queue_oldest_seconds"})
_GROWING = frozenset({"counter", "histogram"})

Labels = tuple[tuple[str, str], ...]
Key = tuple[str, Labels]


class Family(msgspec.Struct, frozen=True, array_like=True):
    """`samples` are names, labels and numbers in the order in which they are exposed."""

    name: str
    kind: str
    help: str
    samples: tuple[tuple[str, Labels, float], ...]


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


def exposition(families: Iterable[Family]) -> bytes:
    """Return the Prometheus text format."""
    # Commands know the frames of answers, which have families, and load no HTTP server for them.
    from prometheus_client import generate_latest  # noqa: PLC0415
    from prometheus_client.metrics_core import Metric  # noqa: PLC0415
    from prometheus_client.registry import Collector  # noqa: PLC0415

    class Given(Collector):
        def collect(self) -> Iterator[Metric]:
            for family in families:
                metric = Metric(family.name, family.help, family.kind)
                for name, labels, value in family.samples:
                    metric.add_sample(name, dict(labels), value)
                yield metric

    return generate_latest(Given())


class MetricTotals:
    """The latest metrics of each worker, and the final counts of its former processes."""

    def __init__(self) -> None:
        self._latest: dict[int, tuple[Family, ...]] = {}
        self._lives: dict[int, int] = {}
        self._former: dict[str, Family] = {}
        self._left: dict[int, tuple[Family, ...]] = {}

    def take(self, worker: int, life: int, families: tuple[Family, ...]) -> None:
        """`life` counts the starts of this worker. What comes late from an earlier life is passed over."""
        known = self._lives.get(worker, life)
        if life < known:
            return
        if life > known:
            self.bury(worker, known)
        self._lives[worker] = life
        self._latest[worker] = families
        self._leave(worker, self._left.pop(worker, ()), unless_in=families)

    def bury(self, worker: int, life: int) -> None:
        """This life of the worker has ended, or said its last. What it counted stays; so does its queue,
        until the next one says what that is now; other gauges go. What is still heard of this life has been
        counted.
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
        """Keeps an earlier life's figures of its queue until a later life has counted it."""
        said = {family.name for family in unless_in if family.samples}
        left = tuple(family for family in before if family.name not in said)
        if left:
            self._left[worker] = left

    def forget(self, worker: int) -> None:
        """There is no such worker any more, and no queue of it."""
        self.bury(worker, self._lives.get(worker, 0))
        self._left.pop(worker, None)
        self._lives.pop(worker, None)  # another one's lives are counted anew

    def families(self, others: tuple[Family, ...] = (), *, shared: bool = False) -> tuple[Family, ...]:
        """Returns the relay's families. `shared`: all workers count one queue. `others` stay as they are."""
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
    if family in _GREATEST or (shared and family == SHARED_QUEUE and ("state", "active") not in labels):
        return max(one, other)
    return min(one, other) if family in _LEAST else one + other
