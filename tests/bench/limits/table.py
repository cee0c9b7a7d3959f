"""What a run has shown, as a table for people."""

from __future__ import annotations

from collections.abc import Iterator

from tests.bench.limits.ledger import Seen
from tests.bench.limits.run import Run

HEAD = (
    "seen by",
    "connections",
    "in the rate's time",
    "rate",
    "spare",
    "used",
    "recipients",
    "messages",
    "transactions",
)


def lines(run: Run) -> Iterator[str]:
    rows = [HEAD, *_rows(run)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEAD))]
    for row in rows:
        first, *others = zip(row, widths, strict=True)
        yield "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)])
    yield ""
    yield (
        f"{run.seconds:.0f} s, {run.sent:,} messages sent, {run.report.delivered:,} recipients delivered, "
        f"{run.reloads} reloads, the relay used {run.cpu:.0%} of a core"
    )
    for text in (*run.exceeded, *run.idle, *run.faults):
        yield f"BAD: {text}"
    if run.is_good:
        yield "no limit was exceeded"


def _rows(run: Run) -> Iterator[tuple[str, ...]]:
    for observed in run.report.observed:
        for number, seen in enumerate(observed.history):
            name = f"{observed.kind} {observed.name}" if number == 0 else "  … then"
            yield (name, *_row(seen))


def _row(seen: Seen) -> tuple[str, ...]:
    promise = seen.promise
    used = seen.used
    return (
        _of(seen.connections, promise.connections),
        _of(seen.in_window, promise.rate[0]) if promise.rate else "",
        promise.text(),
        "" if seen.spare is None else f"{seen.spare * 1000:+.0f} ms",
        "" if used is None else f"{used:.0%}",
        _of(seen.recipients, promise.recipients) if promise.recipients else "",
        _of(seen.messages, promise.messages) if promise.messages else "",
        f"{seen.transactions:,}",
    )


def _of(seen: int, most: int) -> str:
    return f"{seen} of {most}"
