"""`zonerelay acts` and `zonerelay undo`: list the changes that operators have made, and revert them."""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence

from rich.table import Table

from zonerelay.cli.arguments import request_of
from zonerelay.cli.operate.change import changed_by, tell_act
from zonerelay.cli.relay import connect
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED
from zonerelay.operations.answers import ActRow, Changed
from zonerelay.operations.requests import Acts, Undo


def acts(arguments: Namespace) -> int:
    rows, end = connect(arguments).all(request_of(arguments, Acts), ActRow)
    nothing = "No changes by operators in the last 24 hours."
    output.print_rows(rows, _table, nothing, as_json=arguments.json)
    return output.completeness(end)


def _table(rows: Sequence[ActRow]) -> Table:
    columns = ("act", "time", "by", "verb", "changed", "undo", "which")
    return output.table(columns, map(_cells, rows), cut=("by", "which"))


def _cells(row: ActRow) -> tuple[str, ...]:
    if row.undone_by:
        undo = f"by {row.undone_by}"
    else:
        undo = "no" if row.no_undo else text.span(row.until - time.time())
    reason = f" ({row.reason})" if row.reason else ""
    which = f"{row.what}{reason}" if row.finished else f"{row.what}{reason}, not finished"
    at = text.when(row.at)[5:16]
    changed = f"{row.changed:,}" if row.finished else f"up to {row.changed:,}"
    return row.act, at, text.clean(row.who), row.action, changed, undo, text.clean(which)


def undo(arguments: Namespace) -> int:
    changed, status = changed_by(connect(arguments), request_of(arguments, Undo), "Undo")
    if arguments.json:
        output.print_document(changed)
    else:
        _tell(changed)
    return FAILED if changed.busy else status


def _tell(changed: Changed) -> None:
    were = "was restored" if changed.changed == 1 else "were restored"
    before = f"before change {changed.undoes}"
    output.console().print(f"{text.deliveries(changed.changed)} {were} {before}.")
    chatter = output.chatter()
    for count, what in (
        (changed.gone, "has left the queue since"),
        (changed.altered, "changed since by other means and not restored"),
        (changed.busy, "being attempted now and not changed; run the command again"),
    ):
        if count:
            chatter.print(f"{text.deliveries(count)} {what}.")
    if changed.note:
        chatter.print(f"Note: {changed.note}.")
    tell_act(changed)
