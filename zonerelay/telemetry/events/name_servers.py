"""What is told about name servers that do not answer: log lines, a counter and a gauge."""

from __future__ import annotations

from collections.abc import Callable

from zonerelay.telemetry.metrics.instruments import Counter, Gauge, Instruments

Field = str | int | float | bool | None


class NameServerMetrics(Instruments):
    def __init__(self) -> None:
        self.lost = Counter("zonerelay_name_servers_lost_total", "Times that no name server answered.")
        self.reachable = Gauge("zonerelay_name_servers_reachable", "1 while name servers answer, else 0.")
        self.reachable.value = 1
        super().__init__(self.lost, self.reachable)


class NameServerEvents:
    """One per worker. Never raises."""

    def __init__(
        self, emit: Callable[[str, str, dict[str, Field]], None], metrics: NameServerMetrics
    ) -> None:
        self._emit = emit
        self._metrics = metrics

    def lost(self, servers: str, reason: str) -> None:
        """Mail that has to look up a domain waits."""
        self._metrics.lost.value += 1
        self._metrics.reachable.value = 0
        self._emit("error", "name-servers-lost", {"servers": servers, "reason": reason})

    def restored(self, servers: str, seconds: float) -> None:
        self._metrics.reachable.value = 1
        self._emit("info", "name-servers-restored", {"servers": servers, "seconds": round(seconds, 1)})
