"""`status`: the state of the running relay at a glance, with problems first."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from rich.console import Group
from rich.segment import Segments
from rich.table import Table
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
Part = Table | Text | Group

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
    console = output.console()
    for part in _parts(found, config, is_all=arguments.all, wide=console.width >= WIDE):
        console.print(part)
    return OK


def _watch(client: ControlClient, config: Path | None, *, is_all: bool) -> int:
    """Draw the status again every few seconds until the user presses q or Ctrl-C; restore the screen then.
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
    """Wait, and return whether the user has pressed a key to leave; other keys are ignored."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if select.select([keys], [], [], left)[0] and os.read(keys, 1).lower() in (b"q", b""):
            return True
    return False


def _watched(client: ControlClient, config: Path | None, *, is_all: bool) -> Group:
    wide = output.console().width >= WIDE
    head = Text(f"{text.when(time.time())}, q ends", style="dim")
    try:
        found = client.ask(Status(), answers.RelayStatus)
    except ControlError as error:
        return Group(head, Text(text.clean_lines(str(error)), style="bold red"))
    return Group(head, *_parts(found, config, is_all=is_all, wide=wide))


def _parts(found: answers.RelayStatus, config: Path | None, *, is_all: bool, wide: bool) -> Iterator[Part]:
    now = time.time()
    yield output.facts(_facts(found, config, now))
    orders = "orders (zonerelay suspend --list)"
    yield from _section(found.orders, lambda rows: orders_table(rows, now), MAX_SHOWN, orders)
    yield from _section(found.quotas, _quotas, MAX_SHOWN)
    yield from _section(found.zones, _zones)
    yield from _section(found.workers, _workers)
    shown = found.destinations
    if not is_all:
        shown = tuple(each for each in shown if each.matters)[:MAX_SHOWN]
    view = _destinations if wide else _narrow
    yield from _section(shown, lambda rows: view(rows, now, found.every))
    if found.destinations_total > len(shown):
        more = f"… and {found.destinations_total - len(shown):,} more destinations"
        yield Text(more if is_all else f"{more} (--all)")
    if found.every > 1:
        yield Text(f"Estimated from one delivery in {found.every}: `queue summary --exact` counts all.")
    elif not found.every:
        yield Text("What waits for each destination is still being counted.")
    penalties = found.source_penalties
    yield from _section(penalties, lambda rows: _penalties(rows, now), MAX_SHOWN, "refusals of sources")


def _section(
    rows: Sequence[R], view: Callable[[Sequence[R]], Part], most: int | None = None, others: str = ""
) -> Iterator[Part]:
    """Yield an empty line and the view of the first rows, if there are any. `others` names the rest."""
    if rows:
        yield Text()
        yield view(rows[:most])
    if others and most is not None and len(rows) > most:
        yield Text(f"… and {len(rows) - most:,} more {others}")


def _quotas(rows: Sequence[answers.QuotaStatus]) -> Table:
    shown = [
        (text.clean(row.user), row.quota, text.amount(row.quota, row.used), text.amount(row.quota, row.most))
        for row in sorted(rows, key=lambda row: -row.used / row.most)
    ]
    return output.table(["user", "quota", "used", "of"], shown, cut=("user",))


def _configuration(found: answers.RelayStatus, config: Path | None, now: float) -> Iterator[str]:
    yield f"in force for {text.span(now - found.taken_up)}"
    if found.refused is not None:
        yield f"a reload was refused {text.span(now - found.refused)} ago"
    if config is None:
        return
    with contextlib.suppress(OSError):
        changed = config.stat().st_mtime
        if changed > found.taken_up:
            yield f"the file was changed {text.span(now - changed)} ago: reload to put it in force"


def _history(found: answers.RelayStatus, now: float) -> str:
    if found.history_size is None:
        return "not available"
    since = "" if found.history_since is None else f" of the last {text.span(now - found.history_since)}"
    return f"{text.size(found.history_size)}{since}"


def _facts(found: answers.RelayStatus, config: Path | None, now: float) -> Iterator[tuple[str, output.Cell]]:
    for problem in found.problems:
        yield "problem", Text(text.clean(problem), style="bold red")
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
    yield "free space", text.clean(found.guard)
    yield "dns", text.clean(found.name_servers)
    if not found.counted:
        yield "queue", Text("still being counted: there is more than the figures say", style="yellow")
    yield "limits", text.clean(found.limits)
    yield "listeners", ", ".join(found.listeners)
    yield "clients", f"{text.plural(found.inbound_connections, 'connection')} open"


def _zones(zones: Sequence[answers.ZoneStatus]) -> Table:
    columns = ["zone", "ready", "active", "deferred", "held", "suspended", "oldest"]
    rows = [
        (
            zone.name,
            *(f"{getattr(zone, state):,}" for state in columns[1:-1]),
            text.span(zone.oldest_seconds) if zone.oldest_seconds else "–",
        )
        for zone in zones
    ]
    return output.table(columns, rows)


def _workers(workers: Sequence[answers.WorkerStatus]) -> Table:
    rows = [
        (
            str(each.worker),
            str(each.pid or "–"),
            Text(each.state, style="" if each.state == "running" else "yellow"),
            text.span(each.uptime),
            str(each.restarts),
            text.clean(each.problem),
        )
        for each in workers
    ]
    return output.table(
        ["worker", "process", "state", "for", "restarts", "last end"], rows, cut=("last end",)
    )


def _penalties(penalties: Sequence[answers.SourcePenalty], now: float) -> Table:
    rows = [
        (
            f"{each.source} (IPv6)" if each.ipv6_only else each.source,
            each.destination,
            Text(text.until(each.until, now), style="yellow"),
            text.clean(each.reply),
        )
        for each in penalties
    ]
    columns = ["source", "refused by", "used again", "reply"]
    return output.table(columns, rows, cut=("refused by", "reply"))


def _why(each: answers.DestinationStatus, now: float, reply_class: str = "") -> str:
    reply = text.clean(each.reply)
    said = [f"{reply_class}: {reply}" if reply_class and reply else reply]
    if each.next_turn is not None:
        said.insert(0, text.turn(each.next_turn, each.ready, each.turns_seconds or 0.0, now))
    return "; ".join(filter(None, said))


_FIGURES = ("conn", "rate", "ready", "deferred", "held", "oldest", "suspended")


def _figures(each: answers.DestinationStatus, now: float, every: int) -> Sequence[str]:
    def count(deliveries: int) -> str:
        """Format a count. Of a sample, a count of 0 does not mean that there are none."""
        if deliveries or every == 1:
            return text.short(deliveries)
        return f"<{every}" if every else "?"

    of = f"/{each.max_connections}" if each.max_connections else ""
    rate = f" of {each.max_rate}" if each.max_rate else ""
    return (
        f"{each.active}{of}",
        f"{text.short(each.per_minute)}/m{rate}",
        count(each.ready),
        count(each.deferred),
        count(each.held),
        text.span(each.oldest_seconds) if each.oldest_seconds else "–",
        _suspended(each, now),
    )


def _suspended(each: answers.DestinationStatus, now: float) -> str:
    tried = "" if each.suspended_until is None else text.until(each.suspended_until, now)
    return f"{each.suspended:,} suspended by operators" if each.suspended else tried


def _narrow(destinations: Sequence[answers.DestinationStatus], now: float, every: int) -> Group:
    """Return two lines per destination: its numbers, and its last reply."""
    rows = []
    for each in destinations:
        zone = f" ({each.zone})" if each.zone != "default" else ""
        cells = (f"{text.clean(each.destination)}{zone}", *_figures(each, now, every))
        style = "" if each.suspended_until is None else "yellow"
        rows.append([Text(cell, style, no_wrap=True, overflow="ellipsis") for cell in cells])
    table = output.table(["destination", *_FIGURES], rows, cut=("destination", "rate", "suspended"), gap=1)
    head, *lines = map(Segments, output.console().render_lines(table, new_lines=True))
    parts: list[Segments | Text] = [head]
    for each, line in zip(destinations, lines, strict=True):
        parts.append(line)
        if why := _why(each, now, each.reply_class):
            parts.append(Text(f"  {why}", "dim", no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def _destinations(destinations: Sequence[answers.DestinationStatus], now: float, every: int) -> Table:
    rows: list[Sequence[output.Cell]] = []
    for each in destinations:
        *figures, suspended = _figures(each, now, every)
        ended = (Text(suspended, style="yellow"), each.reply_class, _why(each, now))
        rows.append([text.clean(each.destination), each.zone, *figures, *ended])
    columns = ["destination", "zone", *_FIGURES, "class", "last reply"]
    return output.table(columns, rows, cut=("destination", "zone", "last reply"))
