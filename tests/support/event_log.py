"""A log sink that keeps what it gets."""

from typing import Any

from zonerelay.model.clock import Clock
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.metrics import Metrics


class EventLog:
    def __init__(self) -> None:
        self.entries: list[tuple[str, str, dict[str, Any]]] = []  # Any: whatever fields an event has

    def emit(self, level: str, event: str, fields: dict[str, Any]) -> None:
        self.entries.append((level, event, fields))

    @property
    def events(self) -> list[tuple[str, dict[str, Any]]]:
        return [(event, fields) for _, event, fields in self.entries]

    def named(self, event: str) -> list[dict[str, Any]]:
        return [fields for name, fields in self.events if name == event]

    def reasons(self) -> list[str]:
        return [str(fields["reason"]) for fields in self.named("refused")]


def events_into(log: EventLog, clock: Clock) -> Events:
    return Events(log, Metrics(), Redactor(b"k" * 32, enabled=False), clock)
