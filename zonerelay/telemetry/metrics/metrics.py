"""Counters, gauges and histograms of one worker, and their text for Prometheus.

Every method is cheap and none raises: numbers are kept by `instruments.py`, those that others keep are read
by `collectors.py`, and prometheus-client is only asked to write them down. Labels come from our own lists and
the configuration: zones, outcomes, reasons.

Outcomes: a result that ends a delivery counts once as `delivered`, `bounced` or `expired`; one that
does not, as `deferred`. A connection lost after the final dot counts as `in_doubt` instead of
`deferred`; when such a result ends the delivery (`in_doubt = "bounce"`, or too old), it counts as
`in_doubt` and as its end. So `delivered + bounced + expired` is what left the queue by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import product

from prometheus_client import CollectorRegistry, Info, ProcessCollector, generate_latest

from zonerelay import __version__
from zonerelay.model.outbox import zone_label
from zonerelay.telemetry.load import LoopLag
from zonerelay.telemetry.metrics.collectors import (
    CertificateCollector,
    QueueCollector,
    ReadCounter,
    ReadGauge,
    SourceCollector,
    StoreCollector,
    ZoneQueue,
)
from zonerelay.telemetry.metrics.families import Family, collect
from zonerelay.telemetry.metrics.instruments import Counter, Gauge, Histogram, Instruments, LabelledCounter
from zonerelay.telemetry.metrics.subsystems import (
    LimitMetrics,
    NameServerMetrics,
    OutboxMetrics,
    SmarthostMetrics,
    StsCounters,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
DKIM_RESULTS = ("signed", "no_key", "failed")
LOGIN_RESULTS = ("ok", "wrong", "locked", "broken")
NO_DSN_REASONS = ("null sender", "notify", "outbox", "stranger", "switched off")
OUTCOMES = ("delivered", "deferred", "bounced", "expired", "in_doubt")
DSN_KINDS = ("failed", "delayed", "relayed")
TLS_VERSIONS = ("TLSv1.2", "TLSv1.3")
TLS_RESULTS = tuple(
    (level, result)
    for level in ("opportunistic", "required", "verify", "dane", "mta-sts")
    for result in ("ok", "failed", "fallback")
    if result != "fallback" or level == "opportunistic"
)
TROUBLES = (
    "auth", "inbound", "loop", "outbox.claim", "outbox.connect", "outbox.write", "policy", "queue.clock",
    "queue.courier", "queue.errand", "queue.journal", "queue.lane", "queue.read_message", "queue.report",
    "queue.report_header", "queue.router", "queue.settle", "queue.settled", "reload", "retry.backoff",
    "store.claim", "store.probe", "store.settle", "systemd",
)  # fmt: skip
"""The places that tell of trouble."""

# From a local next hop (milliseconds) to the last retry (days): one histogram has to show both.
DELIVERY_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 900, 3600, 4 * 3600, 24 * 3600,
)  # fmt: skip
COMMIT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
POLICY_BUCKETS = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60)


class Metrics:
    """One per worker, on a registry of its own: two relays in one process (tests) do not mix."""

    def __init__(self) -> None:
        self._accepted = Counter("zonerelay_messages_accepted_total", "Messages answered with 250.")
        self._recipients = Counter("zonerelay_recipients_accepted_total", "Recipients of accepted messages.")
        self._octets = Counter("zonerelay_accepted_bytes_total", "Stored size of accepted messages.")
        self._bare = Counter("zonerelay_bare_line_ends_total", "Bare CR and LF found inside messages.")
        self._refused = LabelledCounter(
            "zonerelay_inbound_refused_total", "Connections and commands refused.", ("reason",)
        )
        self._logins = LabelledCounter(
            "zonerelay_inbound_logins_total", "Answers to AUTH with credentials.", ("result",)
        )
        self._dsn = LabelledCounter("zonerelay_dsn_total", "Reports queued to senders.", ("kind",))
        self._no_dsn = LabelledCounter(
            "zonerelay_dsn_withheld_total", "Times that a report was owed to nobody.", ("reason",)
        )
        for reason in NO_DSN_REASONS:
            self._no_dsn.add((reason,), 0)
        self._suspended = LabelledCounter(
            "zonerelay_destinations_suspended_total", "Times a destination was suspended.", ("zone",)
        )
        self._source_refusals = LabelledCounter(
            "zonerelay_source_refusals_total", "Replies that refuse a source for its reputation.", ("source",)
        )
        self._dkim = LabelledCounter(
            "zonerelay_dkim_signatures_total", "Messages for zones that sign.", ("result",)
        )
        self._trouble = LabelledCounter(
            "zonerelay_trouble_total", "Unexpected errors, by the place that met them.", ("where",)
        )
        self._deliveries = LabelledCounter(
            "zonerelay_deliveries_total", "Results of delivery attempts.", ("zone", "outcome")
        )
        self._seconds = Histogram(
            "zonerelay_delivery_seconds", "From acceptance to delivery.", DELIVERY_BUCKETS
        )
        self._commits = Histogram(
            "zonerelay_store_commit_seconds", "Durable writes of the store.", COMMIT_BUCKETS
        )
        self._damage = Counter(
            "zonerelay_store_damage_total", "Kinds of damage that the store has met since the start."
        )
        self._tls_sessions = LabelledCounter(
            "zonerelay_inbound_tls_sessions_total", "TLS handshakes with clients completed.", ("version",)
        )
        self._outbound_tls = LabelledCounter(
            "zonerelay_outbound_tls_sessions_total",
            "Connections to peers that were to be encrypted.",
            ("zone", "level", "result"),
        )
        self._inbound = Gauge("zonerelay_inbound_connections", "Open connections of clients.")
        self._policy_failures = LabelledCounter(
            "zonerelay_policy_failures_total", "Policies that gave no usable answer.", ("event", "kind")
        )
        self._policy = Histogram("zonerelay_policy_seconds", "Answers of policies.", POLICY_BUCKETS)
        self._lag = Histogram(
            "zonerelay_loop_lag_seconds",
            "How much later than asked the event loop calls a timer.",
            LAG_BUCKETS,
        )
        for counter, words in (
            (self._logins, LOGIN_RESULTS),
            (self._dkim, DKIM_RESULTS),
            (self._dsn, DSN_KINDS),
            (self._tls_sessions, TLS_VERSIONS),
            (self._trouble, TROUBLES),
        ):
            counter.declare((word,) for word in words)
        self.loop_lag = LoopLag(self._lag.observe)
        self.sts = StsCounters()
        self.smarthosts = SmarthostMetrics()
        self.limits = LimitMetrics()
        self.name_servers = NameServerMetrics()
        self.outbox = OutboxMetrics()
        self._registry = self._build_registry()

        # Called for every connection and write, so without a step in between.
        self.store_commit: Callable[[float], None] = self._commits.observe
        """One durable (synced) write of the store took this many seconds."""
        self.policy_answer: Callable[[float], None] = self._policy.observe
        """A policy took this many seconds for one usable answer."""

    def _build_registry(self) -> CollectorRegistry:
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        Info("zonerelay", "This relay.", registry=registry).info({"version": __version__})
        registry.register(self.sts)
        registry.register(self.smarthosts)
        registry.register(self.limits)
        registry.register(self.name_servers)
        registry.register(self.outbox)
        registry.register(
            ReadGauge(
                "zonerelay_loop_lag_longest_seconds",
                "The longest such lag of the last one to two minutes.",
                lambda: self.loop_lag.longest,
            )
        )
        registry.register(
            Instruments(
                self._accepted,
                self._recipients,
                self._octets,
                self._bare,
                self._refused,
                self._logins,
                self._dsn,
                self._no_dsn,
                self._dkim,
                self._suspended,
                self._source_refusals,
                self._trouble,
                self._deliveries,
                self._seconds,
                self._commits,
                self._damage,
                self._lag,
                self._inbound,
                self._policy_failures,
                self._policy,
                self._tls_sessions,
                self._outbound_tls,
            )
        )
        return registry

    # ---- what telemetry.events counts -------------------------------------------------------

    def accepted(self, size: int, recipients: int) -> None:
        self._accepted.value += 1
        self._recipients.value += recipients
        self._octets.value += size

    def bare_line_ends(self, count: int) -> None:
        self._bare.value += count

    def refused(self, reason: str) -> None:
        self._refused.add((reason,))

    def login(self, result: str) -> None:
        self._logins.add((result,))

    def dsn(self, kind: str) -> None:
        self._dsn.add((kind,))

    def no_dsn(self, reason: str) -> None:
        self._no_dsn.add((reason,))

    def dkim_signature(self, result: str) -> None:
        """`signed`, `no_key` or `failed`."""
        self._dkim.add((result,))

    def suspended(self, zone: str) -> None:
        self._suspended.add((zone_label(zone),))

    def source_refused(self, source: str) -> None:
        self._source_refusals.add((source,))

    def trouble(self, where: str) -> None:
        self._trouble.add((where,))

    def store_damaged(self) -> None:
        self._damage.value += 1

    def policy_failed(self, step: str, kind: str) -> None:
        self._policy_failures.add((step, kind))

    def settled(self, zone: str, verdict: str, age: float, *, in_doubt: bool = False) -> None:
        """One recipient's result; `age` is the seconds since acceptance."""
        if "/" in zone:
            zone = zone_label(zone)
        if in_doubt:
            self._deliveries.add((zone, "in_doubt"))
            if verdict == "deferred":
                return
        self._deliveries.add((zone, verdict))
        if verdict == "delivered":
            self._seconds.observe(age if age > 0.0 else 0.0)

    # ---- what others measure ----------------------------------------------------------------

    def inbound_opened(self) -> None:
        self._inbound.value += 1

    def inbound_closed(self) -> None:
        self._inbound.value -= 1

    def inbound_tls(self, version: str) -> None:
        """A client's handshake is complete; `version` is OpenSSL's word, as TLSv1.3."""
        self._tls_sessions.add((version,))

    def outbound_tls(self, zone: str, level: str, result: str) -> None:
        """`level`: what was demanded in the end; `result`: ok, failed, or fallback to clear text."""
        self._outbound_tls.add((zone_label(zone), level, result))

    def declare_zones(self, zones: Iterable[str]) -> None:
        """Show every zone's counters from the start: one that appears late hides its first increase."""
        for zone in zones:
            self._deliveries.declare((zone, outcome) for outcome in OUTCOMES)
            self._suspended.declare([(zone,)])
            self._outbound_tls.declare((zone, *words) for words in TLS_RESULTS)

    def declare_sources(self, sources: Iterable[str]) -> None:
        self._source_refusals.declare((source,) for source in sources)

    def declare_refusals(self, reasons: Iterable[str]) -> None:
        self._refused.declare((reason,) for reason in reasons)

    def declare_policy(self, steps: Iterable[str], kinds: Iterable[str]) -> None:
        """The steps that a policy is asked at, and how it may fail."""
        self._policy_failures.declare(product(steps, kinds))

    def attach_queue(
        self, read: Callable[[], Iterable[ZoneQueue]], is_counted: Callable[[], bool] = lambda: True
    ) -> None:
        """Both are called at every scrape and must answer from memory. Attach once."""
        self._registry.register(QueueCollector(read, is_counted))

    def attach_certificates(self, read: Callable[[], Iterable[tuple[str, float]]]) -> None:
        """`read` is called at every scrape: the first name and the expiry of each certificate in use. Attach
        once, for all listeners; of several for one name the one that expires first is shown.
        """
        self._registry.register(CertificateCollector(read))

    def attach_sources(self, read: Callable[[], Mapping[str, int]]) -> None:
        """`read` says at how many destinations each source is passed over. Attach once."""
        self._registry.register(SourceCollector(read))

    def attach_store(self, worker: int, unhealthy: Callable[[], str | None]) -> None:
        """`unhealthy` says why the worker's store takes no mail. Attach once."""
        self._registry.register(StoreCollector(worker, unhealthy))

    def attach_restraint(self, read: Callable[[], float]) -> None:
        """`read` says for how many seconds mail that has waited was held back so far. Attach once."""
        self._registry.register(
            ReadCounter(
                "zonerelay_restrained_seconds_total",
                "Seconds in which backlog and deferred mail left at a limited rate, for new mail.",
                read,
            )
        )

    def attach_inbound_memory(self, read: Callable[[], int]) -> None:
        """`read` says how many octets all client connections hold. Attach once."""
        self._registry.register(
            ReadGauge("zonerelay_inbound_memory_bytes", "Memory that client connections hold.", read)
        )

    def families(self) -> tuple[Family, ...]:
        """The same as plain values, for a supervisor that adds up."""
        return collect(self._registry)

    def exposition(self) -> bytes:
        """The Prometheus text format; serve it as `CONTENT_TYPE`."""
        return generate_latest(self._registry)
