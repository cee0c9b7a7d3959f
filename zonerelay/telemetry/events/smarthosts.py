"""What is told about log-ins at smarthosts: log lines, a counter and a gauge, as `events.py` has for mail.

A refused log-in is an error: a whole zone's mail waits until somebody corrects it. Labels are zones and
credentials, both from the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from zonerelay.model.outbox import zone_label
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.instruments import Instruments, LabelledCounter

Field = str | int | float | bool | None
RESULTS = ("ok", "refused", "failed", "broken")


class SmarthostMetrics(Instruments):
    """`attach` whoever knows zone, credential and whether it can log in, of those that have tried."""

    def __init__(self) -> None:
        self.logins = LabelledCounter(
            "zonerelay_smarthost_logins_total", "Log-ins at smarthosts.", ("zone", "result")
        )
        super().__init__(self.logins)
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


class SmarthostEvents:
    """One per worker. Never raises."""

    def __init__(
        self,
        emit: Callable[[str, str, dict[str, Field]], None],
        metrics: SmarthostMetrics,
        redactor: Redactor,
    ) -> None:
        self._emit = emit
        self._metrics = metrics
        self._redact = redactor

    def declare(self, zones: Iterable[str]) -> None:
        """Those that log in."""
        self._metrics.logins.declare((zone_label(zone), result) for zone in zones for result in RESULTS)

    def answered(self, zone: str, result: str) -> None:
        """`ok`, `refused` or `failed` (for now); `broken`: it could not even be tried."""
        self._metrics.logins.add((zone_label(zone), result))

    def refused(self, zone: str, credential: str, host: str, reply: str) -> None:
        """Nobody tries again for a while; all mail that needs the credential waits."""
        text = self._redact.text(reply)
        self._emit(
            "error", "login-refused", {"zone": zone, "credential": credential, "host": host, "reply": text}
        )

    def broken(self, zone: str, credential: str, problem: str) -> None:
        """A secret cannot be read, or a token server gives no token."""
        text = self._redact.text(problem)
        self._emit("error", "login-broken", {"zone": zone, "credential": credential, "problem": text})

    def restored(self, zone: str, credential: str, host: str) -> None:
        self._emit("info", "login-restored", {"zone": zone, "credential": credential, "host": host})

    def token_trouble(self, credential: str, problem: str) -> None:
        """While the present token still serves, or a new refresh token could not be written down."""
        text = self._redact.text(problem)
        self._emit("warning", "token-trouble", {"credential": credential, "problem": text})
