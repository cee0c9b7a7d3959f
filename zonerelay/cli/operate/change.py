"""`queue retry|hold|release|reroute|bounce|drop`: changes single messages immediately, and many only after a
preview. `acts` and `undo` list the changes that operators have made, and revert them.

A bulk change shows how many deliveries match and the oldest of them, and then asks for confirmation. Without
a terminal it cannot ask, so it is refused unless `--yes` is given. An empty filter does not match the whole
queue; that requires `--all`.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace
from rich.table import Table

from zonerelay.cli.arguments import request_of
from zonerelay.cli.operate.read import delivery_table
from zonerelay.cli.relay import connect
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED, OK, USAGE, CliError
from zonerelay.control.client import ControlClient
from zonerelay.operations.answers import ActRow, ChangeResult, Count
from zonerelay.operations.requests import CHANGES, Acts, Bounce, Drop, QueueChange, Undo

SAMPLE = 5


def change(arguments: Namespace) -> int:
    request = request_of(arguments, CHANGES[arguments.verb])
    in_bulk = not request.message_ids
    client = connect(arguments)
    if arguments.dry_run:
        return _dry_run(client, request, as_json=arguments.json)
    if in_bulk and not arguments.yes and not _confirmed(client, request):
        return FAILED
    changed, status = output.answered(client, request, ChangeResult, arguments.verb.capitalize())
    output.print_one(changed, partial(_tell, request), as_json=arguments.json)
    missing = not in_bulk and changed.matched == 0
    if missing:
        output.chatter().print("No such message in the queue: delivered, given up, or never here.")
    return FAILED if missing or changed.busy else status


def _is_final(request: QueueChange) -> bool:
    return isinstance(request, Bounce) or (isinstance(request, Drop) and request.purge)


def _preview(client: ControlClient, request: QueueChange) -> Count:
    asked = replace(request, dry_run=True, sample=SAMPLE)
    return output.answered(client, asked, Count, "Counting")[0]


def _confirmed(client: ControlClient, request: QueueChange) -> bool:
    """Show what a change selects, and ask. Raise CliError if there is no terminal, or nothing is selected."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise CliError(
            "standard input is not a terminal: add --yes to confirm, or --dry-run to preview", USAGE
        )
    found = _preview(client, request)
    chatter = output.chatter()
    if not found.matched:
        chatter.print("No delivery matches.")
        raise CliError("", OK)
    chatter.print(delivery_table(found.sample, now=time.time(), wide=chatter.width >= output.WIDE))
    if found.matched > len(found.sample):
        chatter.print(f"… and {found.matched - len(found.sample):,} more")
    final = " This cannot be undone." if _is_final(request) else ""
    chatter.print(f"\n{request.action.capitalize()} {text.deliveries(found.matched)}?{final} [y/N] ", end="")
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    chatter.print("Nothing was changed.")
    return False


def _dry_run(client: ControlClient, request: QueueChange, *, as_json: bool) -> int:
    found = _preview(client, request)
    if as_json:
        output.print_document(found)
        return OK
    console = output.console()
    if found.sample:
        console.print(delivery_table(found.sample, now=time.time(), wide=console.width >= output.WIDE))
    final = ", which could not be restored" if _is_final(request) else ""
    what = f"{request.action} would change {text.deliveries(found.matched)}{final}"
    console.print(f"{what}; nothing was changed.")
    return OK


def _tell(request: QueueChange, total: ChangeResult) -> None:
    if (at := getattr(request, "at", None)) is not None:
        # Round to minutes: the time that the command itself takes would turn "+2h" into "in 1h59m".
        done = f"will be retried at {text.when(at)} ({text.until(at + 30, time.time())})"
    else:
        done = " ".join(filter(None, (request.done, total.note)))
    output.console().print(f"{text.deliveries(total.changed)} {done}.")
    _tell_act(total)
    if total.busy:
        output.chatter().print(
            f"{text.deliveries(total.busy)} being attempted at this moment and left alone: try again."
        )


def _tell_act(changed: ChangeResult) -> None:
    """Print how to undo the change, or why that is not possible."""
    if changed.no_undo:
        output.chatter().print(f"Change {changed.act} cannot be undone: {changed.no_undo}.")
    elif changed.changed:
        output.chatter().print(f"zonerelay undo {changed.act} reverts this, within 24 hours.")


def acts(arguments: Namespace) -> int:
    rows, end = connect(arguments).all(request_of(arguments, Acts), ActRow)
    nothing = "No changes by operators in the last 24 hours."
    output.print_rows(rows, _act_table, nothing, as_json=arguments.json)
    return output.completeness(end)


def _act_table(rows: Sequence[ActRow]) -> Table:
    columns = ("act", "time", "by", "verb", "changed", "undo", "which")
    return output.table(columns, map(_act_cells, rows), cut=("by", "which"))


def _act_cells(row: ActRow) -> tuple[str, ...]:
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
    request = request_of(arguments, Undo)
    changed, status = output.answered(connect(arguments), request, ChangeResult, "Undo")
    output.print_one(changed, _tell_undone, as_json=arguments.json)
    return FAILED if changed.busy else status


def _tell_undone(changed: ChangeResult) -> None:
    were = "was restored" if changed.changed == 1 else "were restored"
    before = f"to the state before change {changed.undoes}"
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
    _tell_act(changed)
