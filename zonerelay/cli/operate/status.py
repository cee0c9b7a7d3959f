"""`status`: the running relay at a glance, what needs attention first."""

from __future__ import annotations

import contextlib
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Table
from rich.text import Text

from zonerelay.cli.operate.orders import orders_table
from zonerelay.cli.relay import config_path, connect
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import OK, USAGE, CliError
from zonerelay.cli.terminal.watch import watch
from zonerelay.control.messages.answers import (
    DestinationStatus,
    RelayStatus,
    SourcePenalty,
    WorkerStatus,
    ZoneStatus,
)
from zonerelay.control.messages.requests import Status
from zonerelay.control.socket.client import ControlClient
from zonerelay.control.socket.errors import ControlError

MAX_SHOWN = 20
"""Destinations in the table; `--json` has them all."""


def status(arguments: Namespace) -> int:
    client, config = connect(arguments.config), config_path(arguments.config)
    if arguments.watch:
        if arguments.json:
            raise CliError("--watch is for a terminal, --json for scripts: leave one of the two out", USAGE)
        return watch(lambda: _watched(client, config, is_all=arguments.all))
    found = client.ask(Status(), RelayStatus)
    if arguments.json:
        output.print_document(found)
        return OK
    console = output.console()
    for part in _parts(found, config, is_all=arguments.all, wide=console.width >= output.WIDE):
        console.print(part)
    return OK


def _watched(client: ControlClient, config: Path, *, is_all: bool) -> Group:
    wide = output.console().width >= output.WIDE
    head = Text(f"{text.when(time.time())}, q ends", style="dim")
    try:
        found = client.ask(Status(), RelayStatus)
    except ControlError as error:
        return Group(head, Text(text.clean_lines(str(error)), style="bold red"))
    return Group(head, *_parts(found, config, is_all=is_all, wide=wide))


def _parts(found: RelayStatus, config: Path, *, is_all: bool, wide: bool) -> Iterator[Table | Text]:
    now = time.time()
    yield output.facts(_facts(found, config, now))
    if found.orders:
        yield Text()
        yield orders_table(found.orders[:MAX_SHOWN], now)
        if len(found.orders) > MAX_SHOWN:
            yield Text(f"… and {len(found.orders) - MAX_SHOWN:,} more orders (zonerelay suspend --list)")
    yield Text()
    yield _zones(found.zones)
    if found.workers:
        yield Text()
        yield _workers(found.workers)
    shown = found.destinations
    if not is_all:
        shown = tuple(filter(_matters, shown))[:MAX_SHOWN]
    if shown:
        yield Text()
        yield _destinations(shown, now, found.every, wide=wide)
    if found.destinations_total > len(shown):
        more = f"… and {found.destinations_total - len(shown):,} more destinations"
        yield Text(more if is_all else f"{more} (--all)")
    if found.every > 1:
        yield Text(f"Estimated from one delivery in {found.every}: `queue summary --exact` counts all.")
    elif not found.every:
        yield Text("What waits for each destination is still being counted.")
    if found.source_penalties:
        yield Text()
        yield _penalties(found.source_penalties[:MAX_SHOWN], now)
        if len(found.source_penalties) > MAX_SHOWN:
            yield Text(f"… and {len(found.source_penalties) - MAX_SHOWN:,} more refusals of sources")


def _matters(each: DestinationStatus) -> bool:
    waits = each.ready or each.active or each.waiting or each.deferred or each.held
    return bool(waits) or each.suspended_until is not None


def _configuration(found: RelayStatus, config: Path, now: float) -> Iterator[str]:
    yield f"in force for {text.span(now - found.taken_up)}"
    if found.refused is not None:
        yield f"a reload was refused {text.span(now - found.refused)} ago"
    with contextlib.suppress(OSError):
        changed = config.stat().st_mtime
        if changed > found.taken_up:
            yield f"the file was changed {text.span(now - changed)} ago: reload to put it in force"


def _facts(found: RelayStatus, config: Path, now: float) -> Iterator[tuple[str, output.Cell]]:
    for problem in found.problems:
        yield "problem", Text(text.clean(problem), style="bold red")
    yield "relay", f"{found.hostname}, zonerelay {found.software}, process {found.pid}"
    yield "state", f"{found.state} for {text.span(found.uptime)}"
    if found.taken_up:
        yield "configuration", ", ".join(_configuration(found, config, now))
    free = "" if found.free_space is None else f", {text.size(found.free_space)} free"
    yield "spool", found.backend + free
    if found.guard:
        yield "free space", text.clean(found.guard)
    yield "dns", text.clean(found.name_servers)
    if not found.counted:
        yield "queue", Text("still being counted: there is more than the figures say", style="yellow")
    if found.limits:
        yield "limits", text.clean(found.limits)
    yield "listeners", ", ".join(found.listeners)
    yield "clients", f"{text.plural(found.inbound_connections, 'connection')} open"


def _zones(zones: tuple[ZoneStatus, ...]) -> Table:
    columns = ["zone", "ready", "active", "deferred", "held", "oldest"]
    rows = [
        (
            zone.name,
            f"{zone.ready:,}",
            f"{zone.active:,}",
            f"{zone.deferred:,}",
            f"{zone.held:,}",
            text.span(zone.oldest_seconds) if zone.oldest_seconds else "–",
        )
        for zone in zones
    ]
    return output.table(columns, rows)


def _workers(workers: Sequence[WorkerStatus]) -> Table:
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


def _penalties(penalties: Sequence[SourcePenalty], now: float) -> Table:
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


def _why(each: DestinationStatus, now: float) -> str:
    if each.reply or each.next_turn is None:
        return text.clean(each.reply)
    return f"waits for its turn at a rate: {text.until(each.next_turn, now)}"


def _destinations(destinations: Sequence[DestinationStatus], now: float, every: int, *, wide: bool) -> Table:
    def count(deliveries: int) -> str:
        """Where only a sample was looked at, none found is not none."""
        if deliveries or every == 1:
            return text.short(deliveries)
        return f"<{every}" if every else "?"

    rows: list[Sequence[output.Cell]] = []
    for each in destinations:
        zone = f" ({each.zone})" if each.zone != "default" else ""
        suspended = "" if each.suspended_until is None else text.until(each.suspended_until, now)
        rows.append(
            [
                text.clean(each.destination) + ("" if wide else zone),
                *([each.zone] if wide else []),
                text.short(each.active),
                count(each.ready),
                count(each.deferred),
                count(each.held),
                text.span(each.oldest_seconds) if each.oldest_seconds else "–",
                Text(suspended, style="yellow"),
                _why(each, now),
            ]
        )
    columns = ["destination", "zone", "active", "ready", "deferred", "held", "oldest"]
    if not wide:
        columns.remove("zone")
    columns += ["suspended", "last reply"]
    return output.table(columns, rows, cut=("destination", "zone", "last reply"), gap=2 if wide else 1)
