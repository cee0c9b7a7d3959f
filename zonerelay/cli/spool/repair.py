"""`zonerelay spool repair`: makes a valid spool from a damaged one, while the relay is stopped.

Without `--yes` it reports what it would do, and changes nothing. The exit status is 0 if nothing was lost, 1
if something could not be saved (or would not be), and 2 if the repair is not possible.

Messages that cannot be restored are written to the salvage directory. A complete message is stored there in
the format of `spool export`, with the recipients of whom no record tells whether they have received it, so
that `spool import` accepts it. An incomplete message is in its subdirectory `incomplete/`: an `.eml` with the
remaining bytes and a `.json` with the known data.
"""

from __future__ import annotations

import asyncio
import os
import time
from argparse import Namespace
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
from rich.text import Text

from zonerelay import durable
from zonerelay.cli.relay import load_settings
from zonerelay.cli.spool.stopped import give_to_owner, spools, stopped
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED, OK, USAGE, CliError
from zonerelay.config.settings import Settings
from zonerelay.model.address import Mailbox
from zonerelay.model.delivery import Delivery
from zonerelay.model.message_id import MessageId
from zonerelay.model.queue_name import queue_of
from zonerelay.store.check import RepairResult, SalvagedMessage
from zonerelay.store.contract import StoreError
from zonerelay.store.offline import repair_spool
from zonerelay.store.open import place_of_queue
from zonerelay.store.spool_paths import spool_of
from zonerelay.transfer import files
from zonerelay.transfer.stored import StoredMessage

MAX_SHOWN = 50
_ZONE = "default"


class RepairReport(msgspec.Struct, kw_only=True):
    """The result of `spool repair`. If `done` is false, it lists what would be done. Deliveries are counted
    over all spools.
    """

    done: bool
    before: int
    after: int
    salvaged: int
    salvage: str
    kept: list[str]
    lost: list[str]
    more_lost: int
    repeats: list[str]
    noted: list[str]


def repair(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    carry_out = arguments.yes and not arguments.dry_run
    beside = settings.spool.path.parent / time.strftime("salvage-%Y%m%dT%H%M%S")
    salvage: Path = arguments.salvage or beside
    with stopped(settings), output.without_log():
        done = [_repair(settings, worker, salvage, carry_out=carry_out) for worker in spools(settings.spool)]
        give_to_owner(settings.spool, [salvage])
    report = RepairReport(
        done=carry_out,
        before=sum(each.before for each in done),
        after=sum(each.after for each in done),
        salvaged=sum(each.salvaged for each in done),
        salvage=str(salvage) if carry_out and salvage.exists() else "",
        kept=[each.kept for each in done if each.kept],
        lost=[line for each in done for line in each.lost],
        more_lost=sum(each.more_lost for each in done),
        repeats=[line for each in done for line in each.repeats],
        noted=[line for each in done for line in each.noted],
    )
    output.print_one(report, _print, as_json=arguments.json)
    return FAILED if report.lost or report.more_lost else OK


def _repair(settings: Settings, worker: int, salvage: Path, *, carry_out: bool) -> RepairResult:
    def add(salvaged: SalvagedMessage) -> None:
        """Write one message to the salvage directory, which is created with its first file; every file is
        synced. Raise OSError if that fails. A preview salvages nothing.
        """
        if carry_out:
            place = salvage if salvaged.is_whole else salvage / "incomplete"
            durable.make_directory(place)
            durable.write(place / f"{salvaged.message_id}.eml", salvaged.body())
            durable.write(place / f"{salvaged.message_id}.json", _description(salvaged))

    with output.progress("repairing" if carry_out else "looking", octets=True) as reach:
        try:
            return asyncio.run(
                repair_spool(settings, worker, add, reach, carry_out=carry_out, environment=os.environ)
            )
        except (StoreError, OSError) as error:
            place = place_of_queue(settings) or spool_of(settings.spool, worker).path
            raise CliError(f"{place} cannot be repaired: {error}", USAGE) from error


class _IncompleteMessage(msgspec.Struct, omit_defaults=True):
    """The known data of an incomplete message, for the salvage."""

    id: str
    why: str
    message: msgspec.Raw
    deliveries: tuple[Delivery, ...]
    recipients_unknown: tuple[str, ...]


def _description(salvaged: SalvagedMessage) -> bytes:
    message = salvaged.message
    if message is None or not salvaged.is_whole:
        rest = _IncompleteMessage(
            id=salvaged.message_id,
            why=salvaged.why,
            message=msgspec.Raw(msgspec.json.encode(message)),
            deliveries=salvaged.deliveries,
            recipients_unknown=salvaged.unknown,
        )
        return msgspec.json.format(msgspec.json.encode(rest), indent=2) + b"\n"
    unknown = tuple(
        Delivery(
            queue=queue_of(_ZONE),
            message_id=MessageId(salvaged.message_id),
            recipient=Mailbox(recipient),
            created=message.envelope.created,
        )
        for recipient in salvaged.unknown
    )

    async def body() -> AsyncIterator[bytes]:
        for piece in salvaged.body():
            yield piece

    return files.encode(
        StoredMessage(key="", message=message, deliveries=salvaged.deliveries + unknown, body=body)
    )


def _print(report: RepairReport) -> None:
    console = output.console()
    for line in report.noted:
        console.print(f"damaged, and nothing of it is missing: {text.clean(line)}")
    for line in report.lost[:MAX_SHOWN]:
        console.print(f"cannot be restored: {text.clean(line)}")
    if (more := len(report.lost) - MAX_SHOWN + report.more_lost) > 0:
        console.print(
            f"… and {more:,} more, which --json has" if not report.more_lost else f"… and {more:,} more"
        )
    for line in report.repeats[:MAX_SHOWN]:
        console.print(f"may be sent again: {text.clean(line)}")
    if (more := len(report.repeats) - MAX_SHOWN) > 0:
        console.print(f"… and {more:,} more, which --json has")
    pairs: list[tuple[str, output.Cell]] = [
        ("deliveries", f"{report.before:,} before, {report.after:,} after"),
        ("salvaged", f"{report.salvaged:,} messages, in {report.salvage}" if report.salvage else ""),
        ("kept", ", ".join(report.kept)),
    ]
    if not report.done:
        pairs[1:] = [("state", Text("nothing was changed; use --yes to repair", style="yellow"))]
    console.print(output.facts(pairs))
    if report.salvage:
        console.print("What is whole in it is sent, to those too who may have it, once you import it:")
        console.print(f"zonerelay spool import {report.salvage}", soft_wrap=True)
