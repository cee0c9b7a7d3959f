"""A run as one picture. matplotlib lives here only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.simulate.figures import Sample, Spread
from tests.bench.simulate.run import Result
from zonerelay.model.envelope import Priority

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HOUR = 3600.0
MOST_POINTS = 300
"""Samples are averaged to so many: a line of thousands is a smear."""

PARTS = ((0.5, "half"), (0.9, "90 %"), (0.99, "99 %"))
TICKS = {
    0.01: "10 ms",
    0.1: "0.1 s",
    1: "1 s",
    10: "10 s",
    60: "1 min",
    600: "10 min",
    3600: "1 h",
    36000: "10 h",
}
LEAST = 0.01


class PlotError(Exception):
    """No picture, and why."""


def plot(result: Result, path: Path, *, dots_per_inch: int = 90) -> None:
    """Write a PNG. Raises PlotError in words."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise PlotError("a picture needs matplotlib: pip install matplotlib") from None
    figures, scenario = result.figures, result.scenario
    rows = 4 if figures.by_priority else 3
    figure, axes = pyplot.subplots(rows, 2, figsize=(13, 3.6 * rows), layout="constrained")
    nodes = "1 node" if scenario.nodes == 1 else f"{scenario.nodes} nodes"
    figure.suptitle(
        f"{scenario.name}: {scenario.about}\n{nodes}, {figures.accepted:,} deliveries, seed {result.seed}"
    )
    throughput, queued, slots, memory, wait, queue, *by_priority = axes.flatten()
    _throughput(throughput, result)
    _lines(
        queued, result, "Queue", "deliveries", {"queued": "queued", "in_memory": "of these in the windows"}
    )
    _lines(
        slots,
        result,
        "Connections",
        "connections",
        {"active": "in a transaction", "connections": "open", "startable": "free although mail could go"},
    )
    _lines(memory, result, "Memory of the process", "MB", {"rss": ""})
    kinds = [kind for kind in result.world.kinds if kind in figures.wait]
    _bars(wait, "Wait for the first attempt", {kind: figures.wait[kind] for kind in kinds})
    _bars(queue, "Time in queue, of what was delivered", {kind: figures.queue[kind] for kind in kinds})
    for place, what in zip(by_priority, ("wait", "queue"), strict=False):
        title = {"wait": "Wait for the first attempt, by priority", "queue": "Time in queue, by priority"}[
            what
        ]
        _bars(place, title, _by_priority(result, what))
    try:
        figure.savefig(path, dpi=dots_per_inch)
    except OSError as error:
        raise PlotError(f"{path}: {error.strerror}") from error
    pyplot.close(figure)


def _by_priority(result: Result, what: str) -> dict[str, Spread]:
    figures = result.figures
    kinds = [kind for kind, _ in figures.delivered.most_common(4)]
    return {
        f"{priority}\n{kind}": getattr(figures.by_priority[priority, kind], what)
        for kind in kinds
        for priority in Priority
        if (priority, kind) in figures.by_priority
    }


def _throughput(axes: Axes, result: Result) -> None:
    samples = [sample for sample in result.figures.samples if sample.at]
    every = result.scenario.every
    names = {"attempts": "attempts", "accepted": "accepted", "finished": "finished"}
    for name, label in names.items():
        values = _thin([getattr(sample, name) / every for sample in samples])
        axes.plot(_thin([sample.at / HOUR for sample in samples]), values, label=label, linewidth=1.2)
    # After the stream a long tail of retries is left, a hundredth of it: both are to be seen.
    axes.set_yscale("symlog", linthresh=1.0)
    _finish(axes, "Throughput", "deliveries per second")


def _lines(axes: Axes, result: Result, title: str, unit: str, names: Mapping[str, str]) -> None:
    samples: Sequence[Sample] = result.figures.samples
    for name, label in names.items():
        values = _thin([getattr(sample, name) for sample in samples])
        axes.plot(_thin([sample.at / HOUR for sample in samples]), values, label=label or None, linewidth=1.2)
    _finish(axes, title, unit)


def _thin(values: list[float]) -> list[float]:
    step = max(1, len(values) // MOST_POINTS)
    return [sum(values[at : at + step]) / len(values[at : at + step]) for at in range(0, len(values), step)]


def _finish(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, fontsize="medium", fontweight="bold")
    axes.set_xlabel("hours since the start")
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize="small")


def _bars(axes: Axes, title: str, spreads: Mapping[str, Spread]) -> None:
    shown = {name: spread for name, spread in spreads.items() if spread.count}
    places = range(len(shown))
    for offset, (part, label) in enumerate(PARTS):
        # What takes no time at all has a stump: a bar that is missing would be a kind without mail.
        values = [max(spread.percentile(part), 1.3 * LEAST) for spread in shown.values()]
        axes.bar([place + 0.27 * (offset - 1) for place in places], values, 0.25, label=label, zorder=2)
    axes.plot(
        list(places),
        [max(spread.longest, 1.3 * LEAST) for spread in shown.values()],
        "k_",
        ms=16,
        label="longest",
    )
    axes.set_yscale("log")
    axes.set_yticks(list(TICKS), list(TICKS.values()))
    axes.set_ylim(LEAST, max([spread.longest for spread in shown.values()] + [10.0]) * 20)
    axes.minorticks_off()
    lines = any("\n" in name for name in shown)
    axes.set_xticks(
        list(places),
        list(shown),
        rotation=0 if lines else 35,
        fontsize="small",
        ha="center" if lines else "right",
    )
    axes.set_title(title, fontsize="medium", fontweight="bold")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize="small", ncols=4, loc="upper left")
