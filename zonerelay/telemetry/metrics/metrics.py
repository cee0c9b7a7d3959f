"""Defines the metrics of one worker, and writes them in the Prometheus text format.

Every method is cheap and none raises: numbers are kept by `instruments.py`, those of other objects are read
at each scrape (`READ`), and prometheus-client is only used for the text format. Labels come from our own
lists and the configuration: zones, outcomes, reasons.

Outcomes: a result that ends a delivery counts once as `delivered`, `bounced` or `expired`; one that
does not, as `deferred`. A connection lost after the final dot counts as `in_doubt` instead of
`deferred`; when such a result ends the delivery (`in_doubt = "bounce"`, or too old), it counts as
`in_doubt` and as its end. So `delivered + bounced + expired` is what left the queue by itself.

The metrics of one subsystem each: shared limits, MTA-STS, DNS, the outbox, smarthosts, replies.

Labels are zones, credentials and fixed words of ours. The metrics of a subsystem that is not configured are
not exposed.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

from prometheus_client import CollectorRegistry, Info, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from zonerelay import __version__
from zonerelay.telemetry.metrics import instruments
from zonerelay.telemetry.metrics.families import READ, Family
from zonerelay.telemetry.metrics.instruments import ReadFigures, collect

WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300)


DNS_RESULTS = ("ok", "nxdomain", "nodata", "servfail", "timeout", "no_tcp", "bad")
ROW_STATUSES = ("sent", "failed", "queued")
RESULTS = ("ok", "refused", "failed", "broken")
SITES = {
    "google.com": "google",
    "googlemail.com": "google",
    "smtp.goog": "google",
    "outlook.com": "microsoft",
    "hotmail.com": "microsoft",
    "mx.microsoft": "microsoft",
    "yahoodns.net": "yahoo",
    "icloud.com": "apple",
    "gmx.net": "gmx",
    "web.de": "gmx",
    "pphosted.com": "proofpoint",
    "ppe-hosted.com": "proofpoint",
    "mimecast.com": "mimecast",
}
"""The large receivers by the last two labels of their MX hosts' names; every other host is `other`."""
REPLY_CLASSES = ("2xx", "4xx", "5xx", "none")


@lru_cache(maxsize=1024)
def _labels_of(host: str, code: int) -> tuple[str, str]:
    """Return the metric labels of a reply: the mail provider and the class of the code. The result is cached,
    because few hosts receive most mail.
    """
    site = SITES.get(".".join(host.rsplit(".", 2)[-2:]), instruments.OTHER)
    return site, f"{code // 100}xx" if code else "none"


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
DKIM_RESULTS = ("signed", "no_key", "failed")
LOGIN_RESULTS = ("ok", "wrong", "locked", "broken", "barred")
QUOTAS = tuple(
    f"{what}_per_{window}"
    for what in ("messages", "recipients", "octets")
    for window in ("minute", "hour", "day")
)
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
    "auth", "identities", "inbound", "loop", "outbox.claim", "outbox.connect", "outbox.write", "policy",
    "queue.background", "queue.bin", "queue.clock", "queue.courier", "queue.errand", "queue.journal",
    "queue.lane", "queue.orders", "queue.read_message", "queue.report", "queue.report_header",
    "queue.router", "queue.settle", "queue.settled", "queue.stored", "quotas", "reload", "report",
    "retry.backoff", "store.claim", "store.probe", "store.settle", "submission", "systemd", "webhook",
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
    """The metrics of a worker, on its own registry, so that two relays in one process (tests) do not mix.

    The instruments are public: the parts that observe an event update them.
    """

    def __init__(self) -> None:
        made = instruments.Instruments()
        self._accepted = made.counter("zonerelay_messages_accepted_total", "Messages answered with 250.")
        self._recipients = made.counter(
            "zonerelay_recipients_accepted_total", "Recipients of accepted messages."
        )
        self._octets = made.counter("zonerelay_accepted_bytes_total", "Stored size of accepted messages.")
        self.bare_line_ends = made.counter(
            "zonerelay_bare_line_ends_total", "Bare CR and LF found inside messages."
        )
        self.refused = made.labelled(
            "zonerelay_inbound_refused_total", "Connections and commands rejected.", "reason"
        )
        self.quota_refused = made.labelled(
            "zonerelay_quota_refused_total", "Mail rejected because of a user's quota.", quota=QUOTAS
        )
        self.logins = made.labelled(
            "zonerelay_inbound_logins_total", "Replies to AUTH commands.", result=LOGIN_RESULTS
        )
        self.dsn = made.labelled(
            "zonerelay_dsn_total", "Bounces and reports queued to senders.", kind=DSN_KINDS
        )
        self.no_dsn = made.labelled(
            "zonerelay_dsn_withheld_total",
            "Final outcomes that are not reported to any sender.",
            reason=NO_DSN_REASONS,
        )
        self.history_dropped = made.counter(
            "zonerelay_history_dropped_total", "Events missing from the history."
        )
        self.dkim = made.labelled(
            "zonerelay_dkim_signatures_total",
            "Messages sent through zones that sign, by result.",
            result=DKIM_RESULTS,
        )
        self.destinations_suspended = made.labelled(
            "zonerelay_destinations_suspended_total",
            "Number of times that a destination was suspended.",
            "zone",
        )
        self.source_refusals = made.labelled(
            "zonerelay_source_refusals_total",
            "Replies that reject a source because of its reputation.",
            "source",
        )
        self.errors = made.labelled(
            "zonerelay_trouble_total", "Unexpected errors by location.", where=TROUBLES
        )
        self._deliveries = made.labelled(
            "zonerelay_deliveries_total", "Results of delivery attempts.", "zone", "outcome"
        )
        self._seconds = made.histogram(
            "zonerelay_delivery_seconds", "Time from acceptance to delivery.", DELIVERY_BUCKETS
        )
        self.commits = made.histogram(
            "zonerelay_store_commit_seconds", "Duration of durable writes to the spool.", COMMIT_BUCKETS
        )
        self.damage = made.counter(
            "zonerelay_store_damage_total", "Kinds of spool damage found since the start."
        )
        lag = made.histogram("zonerelay_loop_lag_seconds", "Delay of event loop timers.", LAG_BUCKETS)
        self.last_delivered = made.gauge(
            "zonerelay_last_delivered_timestamp_seconds",
            "Unix time of the most recent delivery; 0 before the first.",
        )
        self.inbound = made.gauge("zonerelay_inbound_connections", "Open connections from clients.")
        self.policy_failures = made.labelled(
            "zonerelay_policy_failures_total", "Policy calls without a usable result.", "event", "kind"
        )
        self.policy = made.histogram("zonerelay_policy_seconds", "Duration of policy calls.", POLICY_BUCKETS)
        self.tls_sessions = made.labelled(
            "zonerelay_inbound_tls_sessions_total",
            "Completed TLS handshakes with clients.",
            version=TLS_VERSIONS,
        )
        self.tls_connections = made.labelled(
            "zonerelay_outbound_tls_sessions_total",
            "Outbound connections for which TLS was attempted.",
            "zone",
            "level",
            "result",
        )
        self.sts_look_ups = made.labelled(
            "zonerelay_mta_sts_lookups_total",
            "Lookups of MTA-STS policies for a route, by result.",
            result=("enforce", "testing", "none", "absent", "failed"),
        )
        self.sts_fetches = made.labelled(
            "zonerelay_mta_sts_fetches_total",
            "Fetches of MTA-STS policies over HTTPS, by result.",
            result=("fetched", "failed"),
        )
        self.sts_mismatches = made.labelled(
            "zonerelay_mta_sts_mismatches_total",
            "Routes with MX hosts that are not in the domain's MTA-STS policy.",
            mode=("enforce", "testing"),
        )
        self.dns_look_ups = made.labelled(
            "zonerelay_dns_lookups_total", "Queries to name servers, by result.", result=DNS_RESULTS
        )
        self.name_servers_lost = made.counter(
            "zonerelay_name_servers_lost_total", "Number of times that no name server responded."
        )
        self.name_servers_reachable = made.gauge(
            "zonerelay_name_servers_reachable", "1 if name servers respond, otherwise 0.", value=1
        )
        self._replies = made.labelled(
            "zonerelay_replies_total",
            "Final replies to recipients, by receiver and first digit.",
            "site",
            "class",
        )
        self._replies.declare(
            (site, kind)
            for site in (*dict.fromkeys(SITES.values()), instruments.OTHER)
            for kind in REPLY_CLASSES
        )
        self.per_minute = instruments.PerMinute(lambda: self._accepted.value, self._seconds.count)
        """Messages accepted, and deliveries."""
        self.loop_lag = instruments.LoopLag(lag.observe, self.per_minute.mark)
        self.smarthosts, self.limits, self.outbox, self.webhooks = (Subsystem() for _ in range(4))
        self.smarthost_logins = self.smarthosts.labelled(
            "zonerelay_smarthost_logins_total", "Logins at smarthosts.", "zone", "result"
        )
        self.limits_lost = self.limits.counter(
            "zonerelay_limits_lost_total", "Number of times that the limit authority became unreachable."
        )
        self.limits_reachable = self.limits.gauge(
            "zonerelay_limits_reachable", "1 if the limit authority is reachable, otherwise 0.", value=1
        )
        self.limit_waits = self.limits.histogram(
            "zonerelay_limits_wait_seconds", "Time from requesting a connection to its grant.", WAIT_BUCKETS
        )
        self.outbox_finished = self.outbox.labelled(
            "zonerelay_outbox_finished_total",
            "Outbox rows released by this relay, by reason.",
            status=ROW_STATUSES,
        )
        self.webhook_events = self.webhooks.labelled(
            "zonerelay_webhook_events_total",
            "Webhook events by result: accepted by the endpoint, failed posts, and lost events.",
            "webhook",
            "result",
        )
        registry = self._registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        Info("zonerelay", "The version of this relay.", registry=registry).info({"version": __version__})
        lags = ReadMetrics(lambda: {"zonerelay_loop_lag_longest_seconds": self.loop_lag.longest})
        for each in (self.smarthosts, self.limits, self.outbox, self.webhooks, made, lags):
            registry.register(each)

    # ---- updates of more than one instrument ------------------------------------------------

    def accepted(self, size: int, recipients: int) -> None:
        self._accepted.value += 1
        self._recipients.value += recipients
        self._octets.value += size

    def settled(self, zone: str, verdict: str, age: float, count: int = 1, *, in_doubt: bool = False) -> None:
        """Count the result of an attempt for `count` recipients of a zone; `age` is the time since acceptance
        in seconds.
        """
        if in_doubt:
            self._deliveries.add((zone, "in_doubt"), count)
            if verdict == "deferred":
                return
        self._deliveries.add((zone, verdict), count)
        if verdict == "delivered":
            self._seconds.observe(age if age > 0.0 else 0.0, count)

    def replied(self, host: str, code: int, count: int = 1) -> None:
        """Count the last reply to an attempt, for `count` recipients; code 0 means that the host sent
        none.
        """
        self._replies.add(_labels_of(host, code), count)

    def declare_zones(self, zones: Iterable[str]) -> None:
        """Initialize the counters of every zone, because `increase()` misses the first event of a series that
        appears late.
        """
        for zone in zones:
            self._deliveries.declare((zone, outcome) for outcome in OUTCOMES)
            self.destinations_suspended.declare([(zone,)])
            self.tls_connections.declare((zone, *words) for words in TLS_RESULTS)

    def read(self, read: ReadFigures) -> None:
        """Register a function that returns metrics listed in `READ`, which is called at every scrape."""
        self._registry.register(ReadMetrics(read))

    def families(self) -> tuple[Family, ...]:
        """Return the metrics as plain values, for a supervisor that sums them."""
        return collect(self._registry)

    def exposition(self) -> bytes:
        """Return the metrics in the Prometheus text format, whose media type is `CONTENT_TYPE`."""
        return generate_latest(self._registry)


class ReadMetrics(Collector):
    """Collects the metrics listed in `READ` at each scrape. Samples beyond `MAX_LABEL_VALUES` are omitted."""

    def __init__(self, read: ReadFigures) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        for name, figures in self._read().items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            family = kind(name, READ[name].help, labels=READ[name].labels)
            alone: Mapping[Any, float] = {} if figures is None else {(): figures}  # type: ignore[dict-item]
            numbers = figures if isinstance(figures, Mapping) else alone
            for values, number in islice(numbers.items(), instruments.MAX_LABEL_VALUES):
                family.add_metric((values,) if isinstance(values, str) else values, number)
            yield family


class Subsystem(instruments.Instruments):
    """The metrics of a subsystem, which may not be configured. They are not exposed until `attach` is
    called.
    """

    _read: ReadFigures | None = None

    def attach(self, read: ReadFigures) -> None:
        """Set the function that reads metrics of this subsystem at every scrape."""
        self._read = read

    def collect(self) -> Iterator[Metric]:
        if self._read is not None:
            yield from super().collect()
            yield from ReadMetrics(self._read).collect()
