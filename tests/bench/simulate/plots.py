"""A run as one picture. matplotlib lives here only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.simulate.figures import Spread
from tests.bench.simulate.run import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HOUR = 3600.0


class PlotError(Exception):
    """No picture, and why."""


def plot(result: Result, path: Path) -> None:
    """Write a PNG. Raises PlotError in words."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise PlotError("a picture needs matplotlib: pip install 'zonerelay[bench]'") from None
    figure, axes = pyplot.subplots(3, 2, figsize=(13, 11))
    scenario = result.scenario
    figure.suptitle(f"{scenario.name}: {scenario.about} ({scenario.nodes} nodes, seed {result.seed})")
    throughput, queued, slots, memory, queue, wait = axes.flatten()
    _throughput(throughput, result)
    _lines(queued, result, "deliveries", {"queued": "queued", "in_memory": "in the schedulers' windows"})
    _lines(
        slots,
        result,
        "connections",
        {"active": "active", "connections": "open", "startable": "idle, although somebody could start"},
    )
    _lines(memory, result, "MB", {"rss": "memory of the process"})
    _bars(queue, result, "time in queue of what was delivered", result.figures.queue)
    _bars(wait, result, "time until the first attempt", result.figures.wait)
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=70)
    except OSError as error:
        raise PlotError(f"{path}: {error.strerror}") from error
    pyplot.close(figure)


def _hours(result: Result) -> list[float]:
    return [sample.at / HOUR for sample in result.figures.samples]


def _throughput(axes: Axes, result: Result) -> None:
    every = result.scenario.every
    for name in ("accepted", "finished", "attempts"):
        values = [getattr(sample, name) / every for sample in result.figures.samples]
        axes.plot(_hours(result), values, label=name, linewidth=0.8)
    _finish(axes, "per second")


def _lines(axes: Axes, result: Result, unit: str, names: dict[str, str]) -> None:
    for name, label in names.items():
        values = [getattr(sample, name) for sample in result.figures.samples]
        axes.plot(_hours(result), values, label=label, linewidth=0.8)
    _finish(axes, unit)


def _finish(axes: Axes, unit: str) -> None:
    axes.set_xlabel("hours")
    axes.set_ylabel(unit)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")


def _bars(axes: Axes, result: Result, title: str, spreads: Mapping[str, Spread]) -> None:
    kinds = [kind for kind in result.world.kinds if kind in spreads and spreads[kind].count]
    places = list(range(len(kinds)))
    for offset, part in enumerate((0.5, 0.9, 0.99)):
        values = [spreads[kind].percentile(part) for kind in kinds]
        axes.bar([place + 0.25 * offset for place in places], values, 0.25, label=f"p{part * 100:.0f}")
    axes.set_yscale("log")
    axes.set_xticks([place + 0.25 for place in places], kinds, rotation=40, fontsize="small")
    axes.set_title(title, fontsize="medium")
    axes.set_ylabel("seconds")
    axes.legend(fontsize="small")
