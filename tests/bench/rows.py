"""What is measured: the rows of the table, and the goals that each has.

A row is one shape of load, the same for both relays. Goals are ratios zonerelay/Postfix unless they
say otherwise; they come from the project's plan and are judged in `report`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

KIB = 1024
MIB = 1024 * KIB
SESSIONS = 50
CONNECTIONS_OUT = 50
DOMAINS = 10


class Source(enum.StrEnum):
    """Who sends and who receives."""

    POSTFIX = "smtp-source to smtp-sink"
    OWN = "own pipelining driver to own sink"
    PROBE = "own one-at-a-time probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """`metric` is a property of `results.Result`. A ratio to Postfix, or with `absolute` a plain figure."""

    metric: str
    limit: float
    at_least: bool
    absolute: bool = False

    def reached(self, value: float) -> bool:
        return value >= self.limit if self.at_least else value <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    key: str
    shape: str
    source: Source
    messages: int
    size: int
    sessions: int = SESSIONS
    recipients: int = 1
    domains: int = 1
    reuse: bool = False
    spread: bool = False  # every domain has a next hop of its own
    goals: tuple[Goal, ...] = ()

    def scaled(self, factor: float) -> Row:
        """The same shape with fewer messages, for warm-ups and traced runs; never less than one a session."""
        return replace(self, messages=max(min(self.messages, self.sessions), round(self.messages * factor)))

    @property
    def title(self) -> str:
        return f"{self.messages:,} × {self.shape} ({self.source})"

    @property
    def connections_out(self) -> int:
        """Per destination; spread over ten next hops, the total stays comparable."""
        return CONNECTIONS_OUT // 5 if self.spread else CONNECTIONS_OUT


_SMALL = (
    Goal(metric="delivered_rate", limit=3.0, at_least=True),
    Goal(metric="cpu_ms", limit=0.3, at_least=False),
    Goal(metric="memory_mb", limit=0.5, at_least=False),
    Goal(metric="cpu_ms", limit=0.8, at_least=False, absolute=True),
)

ROWS: tuple[Row, ...] = (
    Row(
        key="new",
        shape="4 KiB, a new session each",
        source=Source.POSTFIX,
        messages=5000,
        size=4 * KIB,
        goals=_SMALL,
    ),
    Row(
        key="reused",
        shape="4 KiB, sessions reused",
        source=Source.POSTFIX,
        messages=5000,
        size=4 * KIB,
        reuse=True,
        goals=_SMALL,
    ),
    Row(
        key="large",
        shape="2 MiB",
        source=Source.POSTFIX,
        messages=200,
        size=2 * MIB,
        goals=(Goal(metric="delivered_mb", limit=1.0, at_least=True),),
    ),
    Row(
        key="fanout",
        shape="50 recipients in 10 domains, one next hop",
        source=Source.OWN,
        messages=500,
        size=4 * KIB,
        recipients=50,
        domains=DOMAINS,
        goals=(Goal(metric="recipient_rate", limit=1.0, at_least=True),),
    ),
    Row(
        key="spread",
        shape="50 recipients in 10 domains, a next hop per domain",
        source=Source.OWN,
        messages=500,
        size=4 * KIB,
        recipients=50,
        domains=DOMAINS,
        spread=True,
        goals=(Goal(metric="recipient_rate", limit=1.0, at_least=True),),
    ),
    Row(
        key="latency",
        shape="4 KiB, one at a time",
        source=Source.PROBE,
        messages=300,
        size=4 * KIB,
        sessions=1,
        goals=(
            Goal(metric="accept_p50", limit=1.0, at_least=False),
            Goal(metric="accept_p99", limit=1.0, at_least=False),
            Goal(metric="arrive_p50", limit=1.0, at_least=False),
            Goal(metric="arrive_p99", limit=1.0, at_least=False),
        ),
    ),
)


def rows_named(names: str) -> list[Row]:
    """The rows of a comma-separated list, in the table's order; ValueError names an unknown one."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    known = [row.key for row in ROWS]
    if unknown := sorted(set(wanted) - set(known)):
        raise ValueError(f"no row named {', '.join(unknown)}; there are: {', '.join(known)}")
    return [row for row in ROWS if not wanted or row.key in wanted]


def domain(number: int) -> str:
    return f"d{number}.example.com"


def sink_address(number: int) -> str:
    """The loopback address that domain's sink is reached at in a spread row."""
    return f"127.0.0.{10 + number}"
