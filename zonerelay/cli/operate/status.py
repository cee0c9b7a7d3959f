"""`status`: prints the state of the running relay on one screen, with problems first."""

import contextlib
import os
import select
import sys
import termios
import time
import tty
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from rich.console import Group, RenderableType
from rich.segment import Segments
from rich.text import Text

from zonerelay.cli.operate.queue import orders_table
from zonerelay.cli.relay import find_relay
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import OK, USAGE, CliError
from zonerelay.control.client import ControlClient
from zonerelay.operations import answers
from zonerelay.operations.errors import ControlError
from zonerelay.operations.requests import Status

R = TypeVar("R")

WIDE = 150
"""Columns of a terminal from which a destination fits on one line."""
MAX_SHOWN = 20
"""Destinations in the table; `--json` has them all."""
INTERVAL = 2.0
"""Seconds between two looks of --watch."""


def status(arguments: Namespace) -> int:
    client, config = find_relay(arguments)
    if arguments.watch:
        if arguments.json:
            raise CliError("--watch and --json cannot be combined", USAGE)
        return _watch(client, config, is_all=arguments.all)
    found = client.ask(Status(), answers.RelayStatus)
    if arguments.json:
        output.print_document(found)
        return OK
    output.console().print(*_parts(found, config, is_all=arguments.all), sep="\n")
    return OK


def _watch(client: ControlClient, config: Path | None, *, is_all: bool) -> int:
    """Print the status every few seconds until the user presses q or Ctrl-C, and restore the screen then.
    Raise CliError if there is no terminal.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise CliError("--watch requires a terminal", USAGE)
    from rich.live import Live

    keys = sys.stdin.fileno()
    before = termios.tcgetattr(keys)
    try:
        tty.setcbreak(keys)
        first = _watched(client, config, is_all=is_all)
        with Live(first, console=output.console(), screen=True, auto_refresh=False) as live:
            while not _left(keys, INTERVAL):
                live.update(_watched(client, config, is_all=is_all), refresh=True)
    except KeyboardInterrupt:
        pass
    finally:
        termios.tcsetattr(keys, termios.TCSADRAIN, before)
    return OK


def _left(keys: int, seconds: float) -> bool:
    """Wait for at most `seconds`, and return whether the user has pressed a key to quit."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([keys], [], [], left)[0] and os.read(keys, 1).lower() in (b"q", b""):
            return True
    return False


def _watched(client: ControlClient, config: Path | None, *, is_all: bool) -> Group:
    head = Text(f"{text.when(time.time())}, q ends", style="dim")
    try:
        found = client.ask(Status(), answers.RelayStatus)
    except ControlError as error:
        return Group(head, Text(text.clean_lines(str(error)), style="bold red"))
    return Group(head, *_parts(found, config, is_all=is_all))


def _parts(found: answers.RelayStatus, config: Path | None, *, is_all: bool) -> Iterator[RenderableType]:
    now = time.time()
    yield output.facts(_facts(found, config, now))
    orders = "orders (zonerelay suspend --list)"
    yield from _section(found.orders, orders_table, MAX_SHOWN, orders)
    yield from _section(sorted(found.quotas, key=lambda row: -row.used / row.most), _quotas, MAX_SHOWN)
    yield from _section(found.zones, _zones)
    yield from _section(found.workers, _workers)
    shown = found.destinations
    if not is_all:
        shown = tuple(each for each in shown if each.matters)[:MAX_SHOWN]
    yield from _section(shown, partial(_destinations, now=now, every=found.every))
    if found.destinations_total > len(shown):
        more = f"… and {found.destinations_total - len(shown):,} more destinations"
        yield Text(more if is_all else f"{more} (--all)")
    if found.every > 1:
        yield Text(f"Estimated from one delivery in {found.every}; `queue summary --exact` counts all.")
    elif not found.every:
        yield Text("The deliveries of each destination are still being counted.")
    penalties = found.source_penalties
    yield from _section(penalties, _penalties, MAX_SHOWN, "refusals of sources")


def _section(
    rows: Sequence[R],
    view: Callable[[Sequence[R]], RenderableType],
    most: int | None = None,
    others: str = "",
) -> Iterator[RenderableType]:
    """Yield an empty line and a table of the first rows, or nothing if there are no rows. `others` is the
    noun for the rows that are not shown.
    """
    if rows:
        yield Text()
        yield view(rows[:most])
    if others and most is not None and len(rows) > most:
        yield Text(f"… and {len(rows) - most:,} more {others}")


@output.tabular(cut=("user",))
def _quotas(row: answers.QuotaStatus) -> output.Row:
    used, most = (text.amount(row.quota, number) for number in (row.used, row.most))
    return {"user": row.user, "quota": row.quota, "used": used, "of": most}


def _configuration(found: answers.RelayStatus, config: Path | None, now: float) -> Iterator[str]:
    yield f"active for {text.span(now - found.taken_up)}"
    if found.refused is not None:
        yield f"a reload was rejected {text.span(now - found.refused)} ago"
    if config is None:
        return
    with contextlib.suppress(OSError):
        changed = config.stat().st_mtime
        if changed > found.taken_up:
            yield f"the file was changed {text.span(now - changed)} ago; reload to activate it"


def _history(found: answers.RelayStatus, now: float) -> str:
    if found.history_size is None:
        return "not available"
    since = "" if found.history_since is None else f" of the last {text.span(now - found.history_since)}"
    return f"{text.size(found.history_size)}{since}"


def _facts(found: answers.RelayStatus, config: Path | None, now: float) -> Iterator[tuple[str, output.Fact]]:
    for problem in found.problems:
        yield "problem", Text(problem, style="bold red")
    yield "relay", f"{found.hostname}, zonerelay {found.software}, process {found.pid}"
    yield "state", f"{found.state} for {text.span(found.uptime)}"
    if found.taken_up:
        yield "configuration", ", ".join(_configuration(found, config, now))
    free = "" if found.free_space is None else f", {text.size(found.free_space)} free"
    yield "spool", found.backend + free
    yield "history", _history(found, now)
    if found.captured_messages is not None:
        size = text.size(found.captured_size or 0)
        yield "captured", f"{text.plural(found.captured_messages, 'message')}, {size}"
    yield "free space", found.guard
    yield "dns", found.name_servers
    if not found.counted:
        yield "queue", Text("still being counted, so the numbers are too low", style="yellow")
    yield "limits", found.limits
    yield "listeners", ", ".join(found.listeners)
    yield "clients", f"{text.plural(found.inbound_connections, 'connection')} open"


@output.tabular()
def _zones(row: answers.ZoneStatus) -> output.Row:
    counts = {state: getattr(row, state) for state in ("ready", "active", "deferred", "held", "suspended")}
    return {"zone": row.name, **counts, "oldest": text.age(row.oldest_seconds)}


@output.tabular(cut=("last end",))
def _workers(row: answers.WorkerStatus) -> output.Row:
    return {
        "worker": row.worker,
        "process": str(row.pid or "–"),
        "state": Text(row.state, style="" if row.state == "running" else "yellow"),
        "for": text.span(row.uptime),
        "restarts": row.restarts,
        "last end": row.problem,
    }


@output.tabular(cut=("refused by", "reply"))
def _penalties(row: answers.SourcePenalty) -> output.Row:
    return {
        "source": f"{row.source} (IPv6)" if row.ipv6_only else row.source,
        "refused by": row.destination,
        "used again": Text(text.until(row.until, time.time()), style="yellow"),
        "reply": row.reply,
    }


def _why(each: answers.DestinationStatus, now: float, reply_class: str = "") -> str:
    said = [f"{reply_class}: {each.reply}" if reply_class and each.reply else each.reply]
    if each.next_turn is not None:
        said.insert(0, text.turn(each.next_turn, each.ready, each.turns_seconds or 0.0, now))
    return "; ".join(filter(None, said))


def _figures(each: answers.DestinationStatus, now: float, every: int) -> dict[str, str]:
    def count(deliveries: int) -> str:
        """Format a number of deliveries, which may be an estimate from a sample. If only a sample was
        counted, 0 is shown as less than the sampling interval.
        """
        if deliveries or every == 1:
            return text.short(deliveries)
        return f"<{every}" if every else "?"

    tried = "" if each.suspended_until is None else text.until(each.suspended_until, now)
    return {
        "conn": f"{each.active}{f'/{each.max_connections}' if each.max_connections else ''}",
        "rate": f"{text.short(each.per_minute)}/m{f' of {each.max_rate}' if each.max_rate else ''}",
        **{state: count(getattr(each, state)) for state in ("ready", "deferred", "held")},
        "oldest": text.age(each.oldest_seconds),
        "suspended": f"{each.suspended:,} suspended by operators" if each.suspended else tried,
    }


def _narrow(destinations: Sequence[answers.DestinationStatus], now: float, every: int) -> Group:
    """Return a table of destinations for a narrow terminal, with the last reply of each on a second line."""
    rows = []
    for each in destinations:
        name = f"{each.destination}{f' ({each.zone})' if each.zone != 'default' else ''}"
        style = "" if each.suspended_until is None else "yellow"
        cells = {"destination": name, **_figures(each, now, every)}.items()
        rows.append({title: Text(cell, style, no_wrap=True, overflow="ellipsis") for title, cell in cells})
    table = output.table(rows, cut=("destination", "rate", "suspended"), gap=1)
    head, *lines = map(Segments, output.console().render_lines(table, new_lines=True))
    parts: list[Segments | Text] = [head]
    for each, line in zip(destinations, lines, strict=True):
        parts.append(line)
        if why := _why(each, now, each.reply_class):
            parts.append(Text(f"  {text.clean(why)}", "dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _wide(destinations: Sequence[answers.DestinationStatus], now: float, every: int) -> RenderableType:
    rows: list[output.Row] = []
    for each in destinations:
        figures = _figures(each, now, every)
        suspended = Text(figures["suspended"], style="yellow")
        ended: output.Row = {"suspended": suspended, "class": each.reply_class, "last reply": _why(each, now)}
        rows.append({"destination": each.destination, "zone": each.zone, **figures, **ended})
    return output.table(rows, cut=("destination", "zone", "last reply"))


def _destinations(
    destinations: Sequence[answers.DestinationStatus], *, now: float, every: int
) -> RenderableType:
    return output.ByWidth(WIDE, *(partial(view, destinations, now, every) for view in (_wide, _narrow)))
