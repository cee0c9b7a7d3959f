"""The metrics of one subsystem each: shared limits, MTA-STS, DNS, the outbox, smarthosts, replies.

Labels are zones, credentials and fixed words of ours. The metrics of a subsystem that is not configured are
not exposed.
"""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from zonerelay.model.queue_name import queue_of
from zonerelay.telemetry.metrics.instruments import OTHER, Instruments

WAIT_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 300)


class LimitMetrics(Instruments):
    """Silent until `attach`: a worker that shares no limits has none of these."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = self.counter(
            "zonerelay_limits_lost_total", "Times that the authority of shared limits was out of reach."
        )
        self.reachable = self.gauge(
            "zonerelay_limits_reachable", "1 while the authority of shared limits answers, else 0."
        )
        self.reachable.value = 1
        self.waits = self.histogram(
            "zonerelay_limits_wait_seconds",
            "From wishing for a connection to its grant.",
            WAIT_BUCKETS,
        )
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
            for state, number in zip(("held", "used", "wanted"), figures, strict=True):
                numbers[queue_of(zone).label, state] += number
        for labels, number in numbers.items():
            family.add_metric(labels, number)
        yield family


LOOK_UPS = ("enforce", "testing", "none", "absent", "failed")


FETCHES = ("fetched", "failed")


MISMATCHES = ("enforce", "testing")


class StsCounters(Instruments):
    def __init__(self) -> None:
        super().__init__()
        self.look_ups = self.labelled(
            "zonerelay_mta_sts_lookups_total",
            "MTA-STS policies looked up for a route.",
            "result",
            declared=LOOK_UPS,
        )
        self.fetches = self.labelled(
            "zonerelay_mta_sts_fetches_total",
            "MTA-STS policies fetched over HTTPS.",
            "result",
            declared=FETCHES,
        )
        self.mismatches = self.labelled(
            "zonerelay_mta_sts_mismatches_total",
            "Routes with MX hosts that the domain's MTA-STS policy does not name.",
            "mode",
            declared=MISMATCHES,
        )


DNS_RESULTS = ("ok", "nxdomain", "nodata", "servfail", "timeout", "no_tcp", "bad")


class NameServerMetrics(Instruments):
    def __init__(self) -> None:
        super().__init__()
        self.look_ups = self.labelled(
            "zonerelay_dns_lookups_total",
            "Questions to name servers, by what came of them.",
            "result",
            declared=DNS_RESULTS,
        )
        self.lost = self.counter("zonerelay_name_servers_lost_total", "Times that no name server answered.")
        self.reachable = self.gauge(
            "zonerelay_name_servers_reachable", "1 while name servers answer, else 0."
        )
        self.reachable.value = 1


STATUSES = ("queued", "processing", "failed")


ENDS = ("sent", "failed", "queued")


class OutboxFigures(NamedTuple):
    """`rows` by status and `lag` as of the last count of the table; the rest since the start."""

    rows: dict[str, int]
    lag: float
    claims: int
    reaped: int
    usable: bool


class OutboxMetrics(Instruments):
    """`attach` the function that reads the figures."""

    def __init__(self) -> None:
        super().__init__()
        self._read: Callable[[], OutboxFigures] | None = None
        self._finished = self.labelled(
            "zonerelay_outbox_finished_total", "Rows that this relay has let go of.", "status", declared=ENDS
        )

    def attach(self, read: Callable[[], OutboxFigures]) -> None:
        self._read = read

    def finished(self, status: str) -> None:
        """A row was let go of as `sent`, as `failed`, or as `queued` to be tried again."""
        self._finished.add((status,))

    def collect(self) -> Iterator[Metric]:
        if self._read is None:
            return
        figures = self._read()
        rows = GaugeMetricFamily("zonerelay_outbox_rows", "Rows of the outbox.", labels=("status",))
        for status in STATUSES:
            rows.add_metric((status,), figures.rows.get(status, 0))
        yield rows
        yield from super().collect()
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


RESULTS = ("ok", "refused", "failed", "broken")


class SmarthostMetrics(Instruments):
    """`attach` a function that reads zone, credential and whether it can log in, of the credentials that were
    tried.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logins = self.labelled(
            "zonerelay_smarthost_logins_total", "Log-ins at smarthosts.", "zone", "result"
        )
        self._read: Callable[[], Iterable[tuple[str, str, bool]]] = tuple

    def attach(self, read: Callable[[], Iterable[tuple[str, str, bool]]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        family = GaugeMetricFamily(
            "zonerelay_smarthost_login",
            "1 while a credential can log in, 0 while it cannot.",
            labels=("zone", "credential"),
        )
        for zone, credential, works in self._read():
            family.add_metric((zone, credential), float(works))
        yield family


TOLD = ("delivered", "failed", "lost")


class WebhookMetrics(Instruments):
    """`attach` a function that reads how many events wait for each webhook. Silent without a webhook."""

    def __init__(self) -> None:
        super().__init__()
        self.told = self.labelled(
            "zonerelay_webhook_events_total",
            "Events that a webhook has taken, posts that failed, events that were lost.",
            "webhook",
            "result",
        )
        self._read: Callable[[], Mapping[str, int]] | None = None

    def attach(self, read: Callable[[], Mapping[str, int]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        if self._read is None:
            return
        yield from super().collect()
        queued = GaugeMetricFamily(
            "zonerelay_webhook_queued", "Events that wait for a webhook.", labels=("webhook",)
        )
        for webhook, count in self._read().items():
            queued.add_metric((webhook,), count)
        yield queued


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


class ReplyMetrics(Instruments):
    def __init__(self) -> None:
        super().__init__()
        self._replies = self.labelled(
            "zonerelay_replies_total",
            "Last replies to recipients, by receiver and first digit.",
            "site",
            "class",
        )
        self._replies.declare(
            (site, kind) for site in (*dict.fromkeys(SITES.values()), OTHER) for kind in REPLY_CLASSES
        )

    def received(self, host: str, code: int) -> None:
        """The last reply to one recipient's attempt; 0: the host gave none."""
        self._replies.add(_labels_of(host, code))


@lru_cache(maxsize=1024)
def _labels_of(host: str, code: int) -> tuple[str, str]:
    """Few hosts take most mail, and every recipient is counted."""
    site = SITES.get(".".join(host.rsplit(".", 2)[-2:]), OTHER)
    return site, f"{code // 100}xx" if code else "none"
