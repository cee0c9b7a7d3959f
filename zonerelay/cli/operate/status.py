"""`status`: the running relay at a glance, what needs attention first."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from zonerelay.cli.relay import connect
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import OK
from zonerelay.control.messages.answers import (
    DestinationStatus,
    RelayStatus,
    SourcePenalty,
    WorkerStatus,
    ZoneStatus,
)
from zonerelay.control.messages.requests import Status

MAX_SHOWN = 20
"""Destinations in the table; `--json` has them all."""


def status(arguments: Namespace) -> int:
    found = connect(arguments.config).ask(Status(), RelayStatus)
    if arguments.json:
        output.print_document(found)
        return OK
    console = output.console()
    console.print(output.facts(_facts(found)))
    console.print()
    console.print(_zones(found.zones))
    if found.workers:
        console.print()
        console.print(_workers(found.workers))
    if found.destinations:
        # Stable: among the suspended and among the others, the relay's own order stays.
        shown = sorted(found.destinations, key=lambda each: each.suspended_until is None)[:MAX_SHOWN]
        console.print()
        console.print(_destinations(shown, time.time()))
        if found.destinations_total > len(shown):
            console.print(f"… and {found.destinations_total - len(shown):,} more destinations")
    if found.source_penalties:
        console.print()
        console.print(_penalties(found.source_penalties[:MAX_SHOWN], time.time()))
        if len(found.source_penalties) > MAX_SHOWN:
            console.print(f"… and {len(found.source_penalties) - MAX_SHOWN:,} more refusals of sources")
    return OK


def _facts(found: RelayStatus) -> Iterator[tuple[str, output.Cell]]:
    for problem in found.problems:
        yield "problem", Text(text.clean(problem), style="bold red")
    yield "relay", f"{found.hostname}, zonerelay {found.software}, process {found.pid}"
    yield "state", f"{found.state} for {text.span(found.uptime)}"
    yield "spool", found.backend
    if found.guard:
        yield "free space", text.clean(found.guard)
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


def _destinations(destinations: Sequence[DestinationStatus], now: float) -> Table:
    rows = [
        (
            each.destination,
            each.zone,
            str(each.active),
            str(each.waiting),
            ""
            if each.suspended_until is None
            else Text(text.until(each.suspended_until, now), style="yellow"),
            _why(each, now),
        )
        for each in destinations
    ]
    columns = ["destination", "zone", "active", "waiting", "suspended", "last reply"]
    return output.table(columns, rows, cut=("destination", "zone", "last reply"))
