"""The tables of a run."""

from rich.console import Console
from rich.table import Table

from tests.bench.simulate.figures import Figures, Spread
from tests.bench.simulate.run import Result
from zonerelay.model.envelope import Priority

MOST_KINDS = 4


def seconds(value: float) -> str:
    if value < 10:
        return f"{value:.2f} s"
    if value < 600:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 3 * 3600 else f"{value / 3600:.1f} h"


def print_result(console: Console, result: Result) -> None:
    scenario = result.scenario
    console.print(f"{scenario.name}: {scenario.about}; {scenario.nodes} node(s), seed {result.seed}")
    console.print(_classes(result))
    if result.figures.by_priority:
        console.print(_priorities(result))
    for line in summary(result):
        console.print("  " + line)
    for fault in result.faults:
        console.print("! " + fault, markup=False)
    if not result.faults:
        console.print("  nothing lost, nothing twice, no limit or rate exceeded")


def summary(result: Result) -> list[str]:
    figures, samples = result.figures, result.figures.samples
    speed = figures.finished / result.wall if result.wall else 0.0
    active = sum(sample.active for sample in samples) / max(1, len(samples))
    most = max(samples, key=lambda sample: sample.queued)
    startable = sum(sample.startable for sample in samples) / max(1, len(samples))
    total = figures.attempts.total()
    return [
        f"{figures.accepted:,} deliveries and {figures.reports:,} reports in {seconds(result.seconds)} of"
        f" virtual time; the stream ended at {seconds(result.arrived_at)}",
        f"{result.wall:.0f} s of real time, {speed:,.0f} deliveries/s, at most"
        f" {max(sample.rss for sample in samples):.0f} MB",
        f"{total:,} attempts ({total / max(1, figures.finished):.2f} each), {figures.connects:,} connections"
        f" ({figures.failed_connects:,} failed), on average {active:.0f} slots active",
        f"most queued {most.queued:,} at {seconds(most.at)}; on average {startable:.2f} slots idle although"
        " a destination without a transaction had mail in memory",
        f"an attempt waited for the right to connect {seconds(figures.pool.percentile(0.99))} (p99), at most"
        f" {seconds(figures.pool.longest)}",
        *_of_rates(result),
        f"deferred without an attempt {_unattempted(figures):,} times; suspended"
        f" {figures.total('suspended'):,}, resumed {figures.total('resumed'):,}",
    ]


def _of_rates(result: Result) -> list[str]:
    """Where several share them, and what each site with a rate was sent of it while the stream came."""
    figures = result.figures
    found = [
        f"{site} was sent {use.part(until=result.arrived_at):.0%} of its {use.rate} while the stream came"
        for site, use in sorted(figures.rates.items())
    ]
    if figures.leases.count:
        found.insert(
            0,
            f"a node waited for a place that it shares {seconds(figures.leases.percentile(0.99))} (p99), at"
            f" most {seconds(figures.leases.longest)}",
        )
    return found


def _unattempted(figures: Figures) -> int:
    finished = figures.total("delivered") + figures.total("bounced")
    return max(0, figures.total("deferred") + figures.total("expired") + finished - figures.attempts.total())


def _table(*names: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, name in enumerate(names):
        table.add_column(name, justify="right" if number else "left")
    return table


_TIMES = ("wait p50", "p99", "max", "in queue p50", "p90", "p99", "max")


def _priorities(result: Result) -> Table:
    """The kinds of destinations that have most mail; of `mix` too many would be shown otherwise."""
    figures = result.figures
    table = _table("priority", "delivered", *_TIMES)
    kinds = [kind for kind, _ in figures.delivered.most_common(MOST_KINDS)]
    for priority in Priority:
        for kind in kinds:
            found = figures.by_priority.get((priority, kind))
            if found is not None:
                table.add_row(
                    f"{priority}, {kind}",
                    f"{found.queue.count:,}",
                    *_spread(found.wait, (0.5, 0.99)),
                    *_spread(found.queue, (0.5, 0.9, 0.99)),
                )
    return table


def _classes(result: Result) -> Table:
    figures = result.figures
    table = _table("kind", "delivered", "returned", "attempts", "deferrals", *_TIMES)
    for kind in result.world.kinds:
        if not figures.attempts[kind] and not figures.returned[kind]:
            continue
        wait, queue = figures.wait[kind], figures.queue[kind]
        table.add_row(
            kind,
            f"{figures.delivered[kind]:,}",
            f"{figures.returned[kind]:,}",
            f"{figures.attempts[kind]:,}",
            f"{figures.events['deferred', kind]:,}",
            *_spread(wait, (0.5, 0.99)),
            *_spread(queue, (0.5, 0.9, 0.99)),
        )
    return table


def _spread(spread: Spread, parts: tuple[float, ...]) -> list[str]:
    if not spread.count:
        return ["–"] * (len(parts) + 1)
    return [*(seconds(spread.percentile(part)) for part in parts), seconds(spread.longest)]
