"""Counters, gauges and histograms of one worker, and their text for Prometheus.

The only module that knows prometheus-client. Every method is cheap (children are looked up once and
kept) and none raises. Labels come from our own lists and the configuration: zones, outcomes, reasons;
each is capped by `MAX_LABEL_VALUES`, what comes after is counted as `other`, so that no mistake
elsewhere can grow the exposition without end.

Outcomes: a result that ends a delivery counts once as `delivered`, `bounced` or `expired`; one that
does not, as `deferred`. A connection lost after the final dot counts as `in_doubt` instead of
`deferred`; when such a result ends the delivery (`in_doubt = "bounce"`, or too old), it counts as
`in_doubt` and as its end. So `delivered + bounced + expired` is what left the queue by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from zonerelay import __version__

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_LABEL_VALUES = 200
OTHER = "other"

# From a local next hop (milliseconds) to the last retry (days): one histogram has to show both.
DELIVERY_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600, 24 * 3600,
)  # fmt: skip
COMMIT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class ZoneQueue(NamedTuple):
    """One zone's queue at the time of a scrape; `oldest` is the age in seconds, 0 when empty."""

    zone: str
    ready: int
    active: int
    deferred: int
    held: int
    oldest: float


class _QueueCollector(Collector):
    """Asks the queue when Prometheus asks us, so that nothing has to keep gauges in step."""

    def __init__(self, read: Callable[[], Iterable[ZoneQueue]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        deliveries = GaugeMetricFamily(
            "zonerelay_queue_deliveries", "Deliveries in the queue.", labels=("zone", "state")
        )
        oldest = GaugeMetricFamily(
            "zonerelay_queue_oldest_seconds", "Age of the oldest delivery in the queue.", labels=("zone",)
        )
        for queue in self._read():
            deliveries.add_metric((queue.zone, "ready"), queue.ready)
            deliveries.add_metric((queue.zone, "active"), queue.active)
            deliveries.add_metric((queue.zone, "deferred"), queue.deferred)
            deliveries.add_metric((queue.zone, "held"), queue.held)
            oldest.add_metric((queue.zone,), queue.oldest)
        yield deliveries
        yield oldest


class _Labelled:
    """The `inc` methods of a one-label counter by label value: bound once, a dict look-up afterwards."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._bound: dict[str, Callable[[], None]] = {}

    def inc(self, value: str) -> None:
        bound = self._bound.get(value)
        if bound is None:
            bound = self._bind(value)
        bound()

    def _bind(self, value: str) -> Callable[[], None]:
        name = value if len(self._bound) < MAX_LABEL_VALUES else OTHER
        bound = self._counter.labels(name).inc
        if name is value:
            self._bound[value] = bound
        return bound


class Metrics:
    """One per worker, on a registry of its own: two relays in one process (tests) do not mix."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # the library left it untyped
        self._registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        Info("zonerelay", "This relay.", registry=registry).info({"version": __version__})

        self._inc_accepted = Counter(
            "zonerelay_messages_accepted_total", "Messages answered with 250.", registry=registry
        ).inc
        self._inc_recipients = Counter(
            "zonerelay_recipients_accepted_total", "Recipients of accepted messages.", registry=registry
        ).inc
        self._inc_octets = Counter(
            "zonerelay_accepted_bytes_total", "Stored size of accepted messages.", registry=registry
        ).inc
        self._inc_bare = Counter(
            "zonerelay_bare_line_ends_total", "Bare CR and LF found inside messages.", registry=registry
        ).inc
        self._refused = self._labelled(
            "zonerelay_inbound_refused_total", "Connections and commands refused.", "reason"
        )
        self._dsn = self._labelled("zonerelay_dsn_total", "Reports queued to senders.", "kind")
        self._suspended = self._labelled(
            "zonerelay_destinations_suspended_total", "Times a destination was suspended.", "zone"
        )
        self._trouble = self._labelled(
            "zonerelay_trouble_total", "Unexpected errors, by the place that met them.", "where"
        )
        self._deliveries = Counter(
            "zonerelay_deliveries_total",
            "Results of delivery attempts.",
            ("zone", "outcome"),
            registry=registry,
        )
        self._outcomes: dict[tuple[str, str], Callable[[], None]] = {}
        self._zones: set[str] = set()
        self._observe_delivery = Histogram(
            "zonerelay_delivery_seconds",
            "From acceptance to delivery.",
            buckets=DELIVERY_BUCKETS,
            registry=registry,
        ).observe
        self._observe_commit = Histogram(
            "zonerelay_store_commit_seconds",
            "Durable writes of the store.",
            buckets=COMMIT_BUCKETS,
            registry=registry,
        ).observe
        self._inbound = Gauge(
            "zonerelay_inbound_connections", "Open connections of clients.", registry=registry
        )
        self._outbound = Gauge(
            "zonerelay_outbound_connections", "Open connections to peers.", ("zone",), registry=registry
        )

    def _labelled(self, name: str, help_text: str, label: str) -> _Labelled:
        return _Labelled(Counter(name, help_text, (label,), registry=self._registry))

    # ---- what telemetry.events counts -------------------------------------------------------

    def accepted(self, size: int, recipients: int) -> None:
        self._inc_accepted()
        self._inc_recipients(recipients)
        self._inc_octets(size)

    def bare_line_ends(self, count: int) -> None:
        self._inc_bare(count)

    def refused(self, reason: str) -> None:
        self._refused.inc(reason)

    def dsn(self, kind: str) -> None:
        self._dsn.inc(kind)

    def suspended(self, zone: str) -> None:
        self._suspended.inc(zone)

    def trouble(self, where: str) -> None:
        self._trouble.inc(where)

    def settled(self, zone: str, verdict: str, age: float, *, in_doubt: bool = False) -> None:
        """One recipient's result; `age` is the seconds since acceptance."""
        if in_doubt:
            self._count(zone, "in_doubt")
            if verdict == "deferred":
                return
        self._count(zone, verdict)
        if verdict == "delivered":
            self._observe_delivery(max(age, 0.0))

    def _count(self, zone: str, outcome: str) -> None:
        bound = self._outcomes.get((zone, outcome))
        if bound is None:
            bound = self._bind_outcome(zone, outcome)
        bound()

    def _bind_outcome(self, zone: str, outcome: str) -> Callable[[], None]:
        bound = self._deliveries.labels(self._zone_label(zone), outcome).inc
        if zone in self._zones:
            self._outcomes[zone, outcome] = bound
        return bound

    def _zone_label(self, zone: str) -> str:
        if zone not in self._zones:
            if len(self._zones) >= MAX_LABEL_VALUES:
                return OTHER
            self._zones.add(zone)
        return zone

    # ---- what others measure ----------------------------------------------------------------

    def store_commit(self, seconds: float) -> None:
        """One durable (synced) write of the store took this long."""
        self._observe_commit(seconds)

    def inbound_opened(self) -> None:
        self._inbound.inc()

    def inbound_closed(self) -> None:
        self._inbound.dec()

    def outbound_opened(self, zone: str) -> None:
        self._outbound.labels(self._zone_label(zone)).inc()

    def outbound_closed(self, zone: str) -> None:
        self._outbound.labels(self._zone_label(zone)).dec()

    def declare_zones(self, zones: Iterable[str]) -> None:
        """Show every zone's counters from the start: one that appears late hides its first increase."""
        for zone in zones:
            label = self._zone_label(zone)
            for outcome in ("delivered", "deferred", "bounced", "expired", "in_doubt"):
                self._deliveries.labels(label, outcome)
            self._outbound.labels(label)

    def attach_queue(self, read: Callable[[], Iterable[ZoneQueue]]) -> None:
        """`read` is called at every scrape and must answer from memory. Attach once."""
        self._registry.register(_QueueCollector(read))

    def exposition(self) -> bytes:
        """The Prometheus text format; serve it as `CONTENT_TYPE`."""
        return generate_latest(self._registry)
