"""What is measured: the rows of the table, and the goals that each has.

A row is one shape of load, the same for every relay of the row. Goals are ratios of the first to the last
relay, zonerelay/Postfix for most, unless they say otherwise; they come from the project's plan and are judged
in `report`.
"""

import enum
from dataclasses import dataclass, replace

KIB = 1024
MIB = 1024 * KIB

ZONERELAY = "zonerelay"
POSTFIX = "postfix"

SESSIONS = 50
CLIENTS = 20
"""Sessions at a time in the rows `line-a` to `line-d`."""
CONNECTIONS_OUT = 50
DOMAINS = 10
SENDER_DOMAIN = "example.org"


class Source(enum.StrEnum):
    """Who sends and who receives."""

    POSTFIX = "smtp-source to smtp-sink"
    OWN = "own pipelining driver to own sink"
    DRIVER = "own driver to smtp-sink"
    SECURE = "own driver to own sink over TLS"
    PROBE = "own one-at-a-time probe"


class Tls(enum.StrEnum):
    """Between the client and the relay."""

    NONE = "none"
    STARTTLS = "starttls"
    IMPLICIT = "implicit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """`metric` is a property of `results.Result`. A ratio, or with `absolute`
    a plain figure.
    """

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
    session_messages: int = 0  # so many at most in a reused session; 0: no limit
    signed: bool = False  # with DKIM and RSA-2048: by zonerelay itself, for Postfix by OpenDKIM
    spread: bool = False  # every domain has a next hop of its own
    tls: Tls = Tls.NONE
    users: int = 0  # so many log in, in turn; with 0 nobody does
    offered: int = 0  # messages a second that begin; 0: as fast as the relay takes them
    relays: tuple[str, ...] = (ZONERELAY, POSTFIX)
    goals: tuple[Goal, ...] = ()

    def scaled(self, factor: float) -> "Row":
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


def _line(*, rate: float, cpu: float) -> tuple[Goal, ...]:
    return (
        Goal(metric="delivered_rate", limit=rate, at_least=True),
        Goal(metric="cpu_ms", limit=cpu, at_least=False),
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
    Row(
        key="auth",
        shape="4 KiB, a new session with implicit TLS and AUTH PLAIN each, one user",
        source=Source.DRIVER,
        messages=2000,
        size=4 * KIB,
        tls=Tls.IMPLICIT,
        users=1,
    ),
    Row(
        key="line-a",
        shape="4 KiB, a new session each with STARTTLS and AUTH, STARTTLS out, DKIM with RSA-2048",
        source=Source.SECURE,
        messages=3000,
        size=4 * KIB,
        sessions=CLIENTS,
        tls=Tls.STARTTLS,
        users=1,
        signed=True,
        goals=_line(rate=3.0, cpu=0.22),
    ),
    Row(
        key="line-b",
        shape="4 KiB, a new session each with STARTTLS and AUTH, STARTTLS out, not signed",
        source=Source.SECURE,
        messages=3000,
        size=4 * KIB,
        sessions=CLIENTS,
        tls=Tls.STARTTLS,
        users=1,
        goals=_line(rate=2.5, cpu=0.30),
    ),
    Row(
        key="line-b-rated",
        shape="4 KiB, as line-b, 100 messages a second",
        source=Source.SECURE,
        messages=1500,
        size=4 * KIB,
        sessions=CLIENTS,
        tls=Tls.STARTTLS,
        users=1,
        offered=100,
        goals=(Goal(metric="accept_p50", limit=1.0, at_least=False),),
    ),
    Row(
        key="line-c",
        shape="4 KiB, 100 messages a session with STARTTLS and AUTH, STARTTLS out, DKIM with RSA-2048",
        source=Source.SECURE,
        messages=4000,
        size=4 * KIB,
        sessions=CLIENTS,
        reuse=True,
        session_messages=100,
        tls=Tls.STARTTLS,
        users=1,
        signed=True,
        goals=_line(rate=4.0, cpu=0.15),
    ),
    Row(
        key="line-d",
        shape="4 KiB, a new session each in clear text",
        source=Source.POSTFIX,
        messages=5000,
        size=4 * KIB,
        sessions=CLIENTS,
        goals=_line(rate=3.0, cpu=0.18),
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
