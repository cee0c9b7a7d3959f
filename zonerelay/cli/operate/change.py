"""`queue retry|hold|release|reroute|bounce|drop`: change named messages at once, many only after a preview.

A bulk verb shows how many deliveries match and the oldest of them, then asks. Without a terminal it cannot
ask, so the command is refused unless `--yes` is given. An empty filter does not match the whole queue: that
takes `--all`.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace

import msgspec

from zonerelay.cli.arguments import filter_of, given
from zonerelay.cli.operate.read import delivery_table
from zonerelay.cli.relay import connect
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED, OK, USAGE, CliError
from zonerelay.control.socket.client import ControlClient
from zonerelay.operations.answers import Changed, Count, DeliveryRow
from zonerelay.operations.requests import CHANGES, Filter, QueueChange, QueueCount, Undo

SAMPLE = 5
FINAL = ("bounce", "drop")

_DONE = {
    "retry": "will be tried now",
    "hold": "held",
    "release": "released",
    "reroute": "rerouted",
    "bounce": "bounced",
    "drop": "dropped",
}


def change(arguments: Namespace) -> int:
    filters = [filter_of(arguments, message_id) for message_id in arguments.message_ids]
    in_bulk = not filters
    if in_bulk:
        filters = [filter_of(arguments)]
        _check_bulk(arguments, filters[0])
    client = connect(arguments)
    if arguments.dry_run:
        return _dry_run(client, arguments, filters)
    if in_bulk and not arguments.yes and not _confirmed(client, arguments.verb, filters[0]):
        return FAILED
    results: list[Changed] = []
    for wanted in filters:  # what one command changes is one act
        results.append(_change(client, arguments, wanted, act=results[0].act if results else ""))
    return _report(arguments, _total(results), named=not in_bulk)


def _check_bulk(arguments: Namespace, wanted: Filter) -> None:
    if wanted.is_everything and not arguments.all:
        raise CliError(
            f"which deliveries? Give message ids or a filter such as --domain; --all is the whole queue "
            f"(see zonerelay queue {arguments.verb} --help)",
            USAGE,
        )
    if not (arguments.yes or arguments.dry_run or _can_ask()):
        raise CliError(
            "there is no person to ask on this input: add --yes to go ahead, or --dry-run to look first",
            USAGE,
        )


def _can_ask() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _preview(client: ControlClient, wanted: Filter) -> tuple[int, list[DeliveryRow]]:
    with output.progress("Counting") as reach:
        request = QueueCount(filter=wanted, sample=SAMPLE)
        found, _ = client.answered(request, Count, output.frames_seen(reach))
    return found.matched, list(found.sample)


def _confirmed(client: ControlClient, verb: str, wanted: Filter) -> bool:
    matched, sample = _preview(client, wanted)
    chatter = output.chatter()
    if not matched:
        chatter.print("The queue holds no such delivery.")
        raise CliError("", OK)
    chatter.print(delivery_table(sample, now=time.time(), wide=chatter.width >= output.WIDE))
    if matched > len(sample):
        chatter.print(f"… and {matched - len(sample):,} more")
    final = " This cannot be undone." if verb in FINAL else ""
    chatter.print(f"\n{verb.capitalize()} {text.deliveries(matched)}?{final} [y/N] ", end="")
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    chatter.print("Nothing was changed.")
    return False


def _dry_run(client: ControlClient, arguments: Namespace, filters: list[Filter]) -> int:
    found = [_preview(client, wanted) for wanted in filters]
    matched = sum(count for count, _ in found)
    if arguments.json:
        output.print_document(Count(matched=matched))
        return OK
    console = output.console()
    rows = [row for _, sample in found for row in sample]
    if rows:
        console.print(delivery_table(rows, now=time.time(), wide=console.width >= output.WIDE))
    final = ", which could not be undone" if arguments.verb in FINAL else ""
    console.print(f"{arguments.verb} would change {text.deliveries(matched)}{final}; nothing was changed.")
    return OK


def _change(client: ControlClient, arguments: Namespace, wanted: Filter, act: str) -> Changed:
    request = given(arguments, CHANGES[arguments.verb], filter=wanted, everything=arguments.all, act=act)
    return changed_by(client, request, arguments)


def changed_by(client: ControlClient, request: QueueChange | Undo, arguments: Namespace) -> Changed:
    """Sends a changing request and shows how far it is. `arguments.incomplete` is set when a part of the
    relay did not answer.
    """
    with output.progress("Undo" if isinstance(request, Undo) else request.action.capitalize()) as reach:
        changed, end = client.answered(request, Changed, output.frames_seen(reach))
    if output.completeness(end) != OK:
        arguments.incomplete = True
    return changed


def _total(results: list[Changed]) -> Changed:
    return msgspec.structs.replace(
        results[0],
        matched=sum(result.matched for result in results),
        changed=sum(result.changed for result in results),
        busy=sum(result.busy for result in results),
        no_undo="; ".join(dict.fromkeys(result.no_undo for result in results if result.no_undo)),
        note="; ".join(dict.fromkeys(result.note for result in results if result.note)),
    )


def _done(arguments: Namespace, total: Changed) -> str:
    if (at := getattr(arguments, "at", None)) is not None:
        # To the minute: the seconds of the command itself would make "+2h" an "in 1h59m".
        return f"will be tried at {text.when(at)} ({text.until(at + 30, time.time())})"
    return " ".join(filter(None, (_DONE[arguments.verb], total.note)))


def tell_act(changed: Changed) -> None:
    """Says how to undo it, or why that is not possible."""
    if changed.no_undo:
        output.chatter().print(f"Act {changed.act} cannot be undone: {changed.no_undo}.")
    elif changed.changed:
        output.chatter().print(f"zonerelay undo {changed.act} reverts this, within 24 hours.")


def _report(arguments: Namespace, total: Changed, *, named: bool) -> int:
    """Not done is a failure when something was named and is not there, or when some were on their way."""
    if arguments.json:
        output.print_document(total)
    else:
        output.console().print(f"{text.deliveries(total.changed)} {_done(arguments, total)}.")
        tell_act(total)
        if total.busy:
            output.chatter().print(
                f"{text.deliveries(total.busy)} being attempted at this moment and left alone: try again."
            )
    missing = named and total.matched == 0
    if missing:
        output.chatter().print("No such message in the queue: delivered, given up, or never here.")
    return FAILED if missing or total.busy or getattr(arguments, "incomplete", False) else OK
