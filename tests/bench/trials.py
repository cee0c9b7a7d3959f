"""Trials: rows that are no load of messages but a question about the listener.

Each is asked of a relay that has just been started, once a repetition, the relays in turn; the figure is
the median of the repetitions. A relay that fails keeps the figures it has and gets a note.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from tests.bench import load
from tests.bench.relays import Subject
from tests.bench.results import percentile
from tests.bench.rows import Row
from tests.bench.runner import Plan, noting, started
from tests.support.meters import Memory, read_memory, settle

Values = Mapping[str, float]
Trial = Callable[[Row, Subject], Values]

FEW = 20  # sessions
WARM_UP_MESSAGES = 50
DRIPPING = 2.0  # seconds until the slow ones drip as they should


@dataclass(slots=True)
class Finding:
    """What was found of one relay, by figure: each repetition's value."""

    row: Row
    relay: str
    values: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def figure(self, metric: str) -> float | None:
        values = self.values.get(metric)
        return statistics.median(values) if values else None

    def add(self, values: Values) -> None:
        for metric, value in values.items():
            self.values.setdefault(metric, []).append(value)

    def as_json(self) -> dict[str, object]:
        return {
            "row": self.row.key,
            "relay": self.relay,
            "figures": {metric: self.figure(metric) for metric in self.values},
            "repetitions": self.values,
            "notes": self.notes,
        }


def run_trial(plan: Plan, row: Row) -> list[Finding]:
    findings = [Finding(row, name) for name in plan.relays(row)]
    for repetition in range(plan.repetitions):
        for finding in findings:
            if finding.notes:
                continue
            plan.say(f"{row.key}: {finding.relay}: {repetition + 1} of {plan.repetitions}")
            with (
                noting(finding.notes),
                started(plan, row, finding.relay, f"trial-{repetition}") as subject,
            ):
                finding.add(TRIALS[row.key](row, subject))
    return findings


def idle(row: Row, subject: Subject) -> Values:
    """PSS of all processes of the relay with few sessions and with many.

    Never without the holder: it shares libraries with the relay, which changes the relay's PSS.
    """
    sessions = row.sessions_of(subject.name)
    before = _memory_with(row, subject, FEW)
    during = _memory_with(row, subject, sessions)
    return {
        "sessions": sessions,
        "session_kb": (during.pss - before.pss) / (sessions - FEW) / 1024,
        "session_rss_kb": (during.rss - before.rss) / (sessions - FEW) / 1024,
        "base_mb": before.pss / 1024 / 1024,
    }


def _memory_with(row: Row, subject: Subject, sessions: int) -> Memory:
    with load.held_sessions(row, subject.port, sessions):
        settle(subject.group.cpu_seconds)
        return read_memory(subject.group.pids())


def slow(row: Row, subject: Subject) -> Values:
    """One session, one message after the other: with every other place taken, and alone before and after."""
    others = row.sessions_of(subject.name) - 1
    one = replace(row, sessions=1)
    load.send_with_driver(replace(one, messages=WARM_UP_MESSAGES), subject.port)
    alone = load.send_with_driver(one, subject.port).transactions
    with load.held_sessions(row, subject.port, others, slow=True):
        time.sleep(DRIPPING)
        cpu, began = subject.group.cpu_seconds(), time.monotonic()
        time.sleep(DRIPPING)
        busy = (subject.group.cpu_seconds() - cpu) / (time.monotonic() - began)
        among = load.send_with_driver(one, subject.port).transactions
    alone += load.send_with_driver(one, subject.port).transactions
    return {
        "sessions": others,
        "alone_p50": percentile(alone, 0.50) * 1000,
        "among_p50": percentile(among, 0.50) * 1000,
        "slowdown": percentile(among, 0.50) / percentile(alone, 0.50),
        "alone_p99": percentile(alone, 0.99) * 1000,
        "among_p99": percentile(among, 0.99) * 1000,
        "dripping_share": busy * 100,
    }


def logins(row: Row, subject: Subject) -> Values:
    """Sessions that log in and leave. The second time the relay remembers that the password was right."""
    # Without it the first handshake would pay for what TLS needs once.
    with load.held_sessions(replace(row, users=0), subject.port, 1):
        pass
    values: dict[str, float] = {}
    for which in ("first", "again"):
        settle(subject.group.cpu_seconds)
        cpu = subject.group.cpu_seconds()
        report = load.send_with_driver(row, subject.port, greet_only=True)
        settle(subject.group.cpu_seconds)
        values[f"{which}_rate"] = row.messages / (report.ended - report.began)
        values[f"{which}_cpu_ms"] = (subject.group.cpu_seconds() - cpu) / row.messages * 1000
    return values


TRIALS: Mapping[str, Trial] = {"idle": idle, "idle-tls": idle, "slow": slow, "logins": logins}
