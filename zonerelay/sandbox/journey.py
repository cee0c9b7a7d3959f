"""Prints the events of each message in the terminal, grouped by message id.

It is a `LogSink`, so it shows exactly what the log would contain; no part of the relay knows about it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.text import Text

from zonerelay.telemetry.events.events import Field

_STYLES = {
    "accepted": "bold cyan",
    "delivered": "bold green",
    "deferred": "bold yellow",
    "bounced": "bold red",
    "expired": "bold red",
    "refused": "red",
    "dsn": "magenta",
    "suspended": "yellow",
    "resumed": "green",
    "trouble": "bold white on red",
}
_QUIET = frozenset({"starting", "ready", "stopping", "stopped"})


class Journey:
    """Prints the trace of messages in the terminal. `now` returns the Unix time, for the clock column and for
    "again in 5 s".
    """

    def __init__(self, console: Console, now: Callable[[], float]) -> None:
        self._console = console
        self._now = now

    def emit(self, level: str, event: str, fields: Mapping[str, Field]) -> None:
        if event in _QUIET:
            return
        now = self._now()
        stamp = time.strftime("%H:%M:%S", time.localtime(now)) + f".{int(now % 1 * 1000):03d}"
        line = Text.assemble(
            (stamp, "dim"),
            "  ",
            (str(fields.get("id", ""))[:16].ljust(16), "dim cyan"),
            "  ",
            (event.ljust(9), _STYLES.get(event, "bold")),
            "  ",
            self._story(event, fields, now),
        )
        self._console.print(line, soft_wrap=True)

    def _story(self, event: str, fields: Mapping[str, Field], now: float) -> str:
        match event:
            case "accepted":
                recipients = fields.get("recipients")
                who = "1 recipient" if recipients == 1 else f"{recipients} recipients"
                return f"from <{fields.get('sender')}> for {who}, {fields.get('size')} octets, on disk"
            case "delivered" | "deferred" | "bounced" | "expired":
                return _attempt(fields, now)
            case "refused":
                return f"{fields.get('command')}: {fields.get('reply')}"
            case "dsn":
                return f"{fields.get('kind')} report to the sender, about {fields.get('about')}"
            case _:
                return "  ".join(f"{key}={value}" for key, value in fields.items() if key != "id")


def _attempt(fields: Mapping[str, Field], now: float) -> str:
    peer = f" → {fields['peer']}" if fields.get("peer") else ""
    story = f"<{fields.get('recipient')}>{peer}: {fields.get('reply')}"
    due = fields.get("next_attempt")
    if isinstance(due, float):
        story += f" (attempt {fields.get('attempt')}, again in {max(due - now, 0):.0f} s)"
    if fields.get("in_doubt"):
        story += " [in doubt: the peer may have it]"
    return story
