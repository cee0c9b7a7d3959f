"""The tables on the terminal, the JSON file, and the verdict on each goal."""

import platform
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from tests.bench.profiling import top_functions
from tests.bench.results import METRICS, NOISY, Result, ratio
from tests.bench.rows import Goal

NOTE_LINES = 5
SATURATED = 0.9
MANY_REPETITIONS = 4


def metrics_of(found: Result) -> list[str]:
    """Rates mean nothing one at a time, recipients not with one each, MiB/s not for small messages."""
    hidden = {"rss_mb"}
    if found.row.sessions == 1:
        hidden |= {"accepted_rate", "delivered_rate"}
    if found.row.recipients == 1:
        hidden.add("recipient_rate")
    if "delivered_mb" not in {goal.metric for goal in found.row.goals}:
        hidden.add("delivered_mb")
    if len(found.samples) < MANY_REPETITIONS:
        hidden.add("cpu_ms_least")
    return [metric for metric in METRICS if metric not in hidden]


def row_table(results: Sequence[Result]) -> Table:
    """One row of the bench: its figures downwards, the relays and their ratio across."""
    row = results[0].row
    ours, theirs = compared(results)
    table = Table(title=f"{row.key}: {row.title}", title_justify="left")
    table.add_column("")
    for result in results:
        table.add_column(result.relay, justify="right")
    if len(row.relays) > 1:
        table.add_column(f"{row.relays[0]} / {row.relays[-1]}", justify="right")
    table.add_column("goal")
    for metric in dict.fromkeys(metric for result in results for metric in metrics_of(result)):
        values = [result.figure(metric) for result in results]
        if any(value is not None for value in values):
            cells = list(map(number, values))
            if len(row.relays) > 1:
                cells.append(number(ratio(_figure(ours, metric), _figure(theirs, metric))))
            goals = [verdict(goal, ours, theirs) for goal in row.goals if goal.metric == metric]
            table.add_row(METRICS[metric].label, *cells, "; ".join(filter(None, goals)))
    return table


def compared(results: Sequence[Result]) -> tuple[Result | None, Result | None]:
    """The relays of the ratio, as far as they are there: the row's first and its last."""
    by_relay = {result.relay: result for result in results}
    relays = results[0].row.relays
    return by_relay.get(relays[0]), by_relay.get(relays[-1]) if len(relays) > 1 else None


def _figure(found: Result | None, metric: str) -> float | None:
    return found.figure(metric) if found else None


def verdict(goal: Goal, ours: Result | None, theirs: Result | None) -> str:
    """`≥ 3 reached (4.2)` or by how much it is missed; empty when it cannot be told."""
    value = _figure(ours, goal.metric)
    if not goal.absolute:
        value = ratio(value, _figure(theirs, goal.metric))
    if value is None:
        return ""
    sign = "≥" if goal.at_least else "≤"
    unit = "" if goal.absolute else " ×"
    if goal.reached(value):
        return f"[green]{sign} {goal.limit:g}{unit} reached[/green]"
    short = abs(value / goal.limit - 1) * 100
    return f"[red]{sign} {goal.limit:g}{unit} missed by {short:.0f} %[/red]"


def remarks(results: Sequence[Result]) -> list[str]:
    """What a reader has to know about the figures: failures, noise, and a source that was too slow."""
    found = []
    for result in results:
        found += [f"{result.row.key}: {result.relay} failed: {ending(note)}" for note in result.notes]
        if result.source_busy > SATURATED:
            found.append(f"{result.row.key}: {result.relay}: rates are those of our driver, which was busy")
        if result.spread > NOISY:
            times = ", ".join(f"{sample.delivered:.2f} s" for sample in result.samples)
            apart = f"{result.spread:.0%} apart; is the machine busy?"
            found.append(f"{result.row.key}: {result.relay} is noisy: {times} ({apart})")
    return found


def rounds(results: Sequence[Result]) -> list[str]:
    """CPU of each relay against the last, round by round: what disturbs one round disturbs both of them."""
    *firsts, last = results
    if len(last.samples) < MANY_REPETITIONS:
        return []
    found = []
    for first in firsts:
        if len(first.samples) == len(last.samples):
            pairs = zip(first.samples, last.samples, strict=True)
            low, middle, high = statistics.quantiles([ours.cpu / theirs.cpu for ours, theirs in pairs], n=4)
            found.append(
                f"{first.row.key}: CPU, {first.relay} / {last.relay}, round by round: median {middle:.3f}, "
                f"quartiles {low:.3f} and {high:.3f}"
            )
    return found


def ending(note: str) -> str:
    """What happened and the last of the log that came with it; the JSON has all."""
    first, *log = note.splitlines()
    return "\n      ".join([first, *log[-NOTE_LINES:]])


def number(value: float | None) -> str:
    """Three significant digits, thousands separated."""
    if value is None:
        return "–"
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def print_row(console: Console, results: Sequence[Result]) -> None:
    console.print(row_table(results))
    for remark in remarks(results) + rounds(results):
        console.print(f"  ! {remark}", markup=False)
    console.print()


def print_profile(console: Console, path: Path) -> None:
    table = Table(title=f"{path.name}: samples by function", title_justify="left")
    table.add_column("function")
    table.add_column("own", justify="right")
    table.add_column("with callees", justify="right")
    for name, own, below in top_functions(path):
        table.add_row(name, f"{own:.1%}", f"{below:.1%}")
    console.print(table)


def write_json(path: Path, results: Sequence[Result], *, machine: dict[str, object]) -> None:
    document = {"machine": machine, "results": [result.as_json() for result in results]}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def describe_machine(
    directory: Path, *, cores: int, busy: float, cpu_meter: str, postfix: str
) -> dict[str, object]:
    return {
        "cores": cores,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "filesystem": filesystem(directory),
        "busy_before": round(busy, 2),
        "cpu_measured_by": cpu_meter,
        "postfix": postfix,
    }


def filesystem(directory: Path) -> str:
    """The kind of file system that holds it: on tmpfs an fsync costs nothing."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, mount, fstype, *_ = line.split()
        if directory.is_relative_to(mount) and len(mount) >= len(best):
            best, kind = mount, fstype
    return kind
