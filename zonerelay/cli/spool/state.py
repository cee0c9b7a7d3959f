"""`zonerelay spool check` and `spool repair`: read everything in the spool and its directory. `spool repair`:
makes a valid spool from a damaged one, while the relay is stopped. `spool acknowledge`, `accept-empty` and
`is-empty`: operators' decisions about a spool, and a check whether it is empty.

The exit status of a check is 0 for a clean spool, 1 for a damaged one, and 2 if a spool cannot be checked.
Without `--yes`, a repair reports what it would do, and changes nothing. Its exit status is 0 if nothing was
lost, 1 if something could not be saved (or would not be), and 2 if the repair is not possible.

Messages that cannot be restored are written to the salvage directory. A complete message is stored there in
the format of `spool export`, with those recipients whose delivery no record confirms, so that `spool import`
accepts it. An incomplete message is in its subdirectory `incomplete/`: an `.eml` with the remaining bytes and
a `.json` with the known data.

`acknowledge` ends the warning about lost mail. `accept-empty` makes the relay accept a store that has lost
the known queue; a relay that refuses the store checks for this decision every few seconds. `is-empty` prints
the directories of a stopped relay that may be removed, and then exits with 0. Otherwise it prints the
remaining contents and exits with 1, or with 2 if they cannot be determined. Empty spools of surplus workers
are removed, as by a relay with fewer workers.
"""

import asyncio
import contextlib
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import msgspec
from rich.text import Text

from zonerelay import durable
from zonerelay.cli.arguments import request_of
from zonerelay.cli.relay import connect, load_settings
from zonerelay.cli.spool import home_files
from zonerelay.cli.spool.stopped import give_to_owner, opened, spools, stopped
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED, OK, USAGE, CliError, refused
from zonerelay.config.settings import Backend, Settings, SpoolSettings
from zonerelay.model.delivery import Delivery, QueueKind, queue_of
from zonerelay.model.envelope import Mailbox, MessageId
from zonerelay.operations.answers import LossDismissal
from zonerelay.operations.errors import NotRunningError
from zonerelay.operations.requests import SpoolAcknowledge
from zonerelay.store import check as checks
from zonerelay.store.contract import StoreError
from zonerelay.store.offline import acknowledge_loss, check_spool, forget_queue, repair_spool
from zonerelay.store.open import place_of_queue
from zonerelay.store.spool_paths import directories_of, remove_spool, spool_of, spools_of
from zonerelay.transfer import files
from zonerelay.worker.worker import IN_BIN, until_empty

MAX_SHOWN = 40
"""Findings of each kind that are printed; `--json` has a thousand of them."""
_ZONE = "default"


@contextlib.contextmanager
def _working(settings: Settings, worker: int, title: str, done: str) -> Iterator[output.Reach]:
    """Show the progress of checking or repairing the spool of one worker. Raise CliError if it fails."""
    place = place_of_queue(settings) or spool_of(settings.spool, worker).path
    failed = refused(StoreError, OSError, before=f"{place} cannot be {done}: ", status=USAGE)
    with output.progress(title, octets=True) as reach, failed:
        yield reach


# --- check --------------------------------------------------------------------------------------------------


class SpoolReport(msgspec.Struct, kw_only=True):
    """The result of checking all spools of a configuration. Sizes are in bytes. `findings` has at most a
    thousand of each kind; `counts` counts all of them by kind. `path` is the location of a shared queue.
    """

    backend: str
    path: str
    spools: int
    clean: bool
    messages: int
    deliveries: int
    octets: int
    seconds: float
    counts: dict[str, int]
    findings: list[checks.Finding]


def check(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    started = time.monotonic()
    with refused(OSError, status=USAGE):
        workers = spools_of(settings.spool)
    findings = checks.Findings()
    with output.without_log():
        parts = [_check_one(settings, worker, arguments.tmp, findings) for worker in workers]
    contents = checks.SpoolContents(*map(sum, zip(*parts, strict=True)))
    home_files.check(settings, findings)
    report = SpoolReport(
        backend=settings.spool.backend.value,
        path=place_of_queue(settings) or str(settings.spool.path),
        spools=len(workers),
        clean=not findings.is_damaged,
        **contents._asdict(),
        seconds=round(time.monotonic() - started, 3),
        counts={fault.value: count for fault, count in sorted(findings.counts.items())},
        findings=findings.kept,
    )
    output.print_one(report, _print_check, as_json=arguments.json)
    return OK if report.clean else FAILED


def _check_one(
    settings: Settings, worker: int, tmp: Path | None, findings: checks.Findings
) -> checks.SpoolContents:
    spool = spool_of(settings.spool, worker)
    name = f"checking {spool.path.name}" if worker else "checking the spool"

    with _working(settings, worker, name, "checked") as reach:
        place = tmp or _place_for_copy(spool)
        return asyncio.run(
            check_spool(settings, worker, findings, reach, environment=os.environ, place=place)
        )


def _place_for_copy(spool: SpoolSettings) -> Path:
    """Return the directory in which a temporary copy of the spool is made for a check."""
    place = spool.path.parent
    if not os.access(place, os.W_OK | os.X_OK) or os.statvfs(place).f_flag & os.ST_RDONLY:
        return Path(tempfile.gettempdir())
    return place


def _print_check(report: SpoolReport) -> None:
    console = output.console()
    console.print(output.facts(_facts(report)))
    if not report.findings:
        return
    console.print()
    # Damage is listed first.
    shown = sorted(report.findings, key=lambda each: each.fault in checks.HARMLESS)[:MAX_SHOWN]
    console.print(_findings(shown))
    if (more := sum(report.counts.values()) - len(shown)) > 0:
        console.print(f"… and {more:,} more; --json has a thousand of each kind")


@output.tabular(cut=("where", "what"))
def _findings(row: checks.Finding) -> output.Row:
    return {"fault": row.fault.value, "message": row.message_id, "where": row.where, "what": row.what}


def _facts(report: SpoolReport) -> Iterator[tuple[str, output.Fact]]:
    spools = "" if report.spools == 1 else f" and {report.spools - 1} of other workers"
    yield "spool", f"{report.backend}, {report.path}{spools}"
    yield "state", Text("clean", style="green") if report.clean else Text("damaged", style="bold red")
    yield "messages", f"{report.messages:,}"
    yield "deliveries", f"{report.deliveries:,}"
    rate = report.octets / max(report.seconds, 0.001) / 1e6
    yield "read", f"{text.size(report.octets)} in {report.seconds:.1f} s, {rate:,.0f} MB/s"
    for fault, count in report.counts.items():
        yield fault, f"{count:,}" + ("  (no damage)" if fault in checks.HARMLESS else "")


# --- repair -------------------------------------------------------------------------------------------------


class RepairReport(checks.RepairResult, kw_only=True):
    """The result of `spool repair`, for all spools of a relay. If `done` is false, it lists what would be
    done.
    """

    done: bool
    salvage: str


def repair(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    carry_out = arguments.yes and not arguments.dry_run
    beside = settings.spool.path.parent / time.strftime("salvage-%Y%m%dT%H%M%S")
    salvage: Path = arguments.salvage or beside
    with stopped(settings), output.without_log():
        done = [_repair(settings, worker, salvage, carry_out=carry_out) for worker in spools(settings.spool)]
        give_to_owner(settings.spool, [salvage])
    report = RepairReport(done=carry_out, salvage=str(salvage) if carry_out and salvage.exists() else "")
    for each in done:
        for name in each.__struct_fields__:
            setattr(report, name, getattr(report, name) + getattr(each, name))
    output.print_one(report, _print_repair, as_json=arguments.json)
    return FAILED if report.lost or report.more_lost else OK


def _repair(settings: Settings, worker: int, salvage: Path, *, carry_out: bool) -> checks.RepairResult:
    def add(salvaged: checks.SalvagedMessage) -> None:
        """Write one message to the salvage directory, which is created with its first file; every file is
        synced. Raise OSError if that fails. A preview salvages nothing.
        """
        if carry_out:
            place = salvage if salvaged.is_whole else salvage / "incomplete"
            durable.make_directory(place)
            durable.write(place / f"{salvaged.message_id}.eml", salvaged.body())
            durable.write(place / f"{salvaged.message_id}.json", _description(salvaged))

    title = "repairing" if carry_out else "looking"
    with _working(settings, worker, title, "repaired") as reach:
        done = repair_spool(settings, worker, add, reach, carry_out=carry_out, environment=os.environ)
        return asyncio.run(done)


def _description(salvaged: checks.SalvagedMessage) -> bytes:
    """Return what is known about a salvaged message as JSON, which `spool import` reads if the message is
    complete.
    """
    message = salvaged.message
    if message is None or not salvaged.is_whole:
        known = {
            "id": salvaged.message_id,
            "why": salvaged.why,
            "message": message,
            "deliveries": salvaged.deliveries,
            "recipients_unknown": salvaged.unknown,
        }
        return msgspec.json.format(msgspec.json.encode(known), indent=2) + b"\n"
    unknown = [
        Delivery(
            queue=queue_of(_ZONE),
            message_id=MessageId(salvaged.message_id),
            recipient=Mailbox(recipient),
            created=message.envelope.created,
        )
        for recipient in salvaged.unknown
    ]
    return files.encode(message, [*salvaged.deliveries, *unknown])


def _print_repair(report: RepairReport) -> None:
    console = output.console()
    for title, lines, unnamed in (
        ("damaged without loss", report.noted, 0),
        ("cannot be restored", report.lost, report.more_lost),
        ("may be sent again", report.repeats, 0),
    ):
        for line in lines[:MAX_SHOWN]:
            console.print(f"{title}: {text.clean(line)}")
        if (more := len(lines) - MAX_SHOWN + unnamed) > 0:
            console.print(f"… and {more:,} more{'' if unnamed else ' (--json lists them)'}")
    pairs: list[tuple[str, output.Fact]] = [
        ("deliveries", f"{report.before:,} before, {report.after:,} after"),
        ("salvaged", f"{report.salvaged:,} messages, in {report.salvage}" if report.salvage else ""),
        ("kept", ", ".join(report.kept)),
    ]
    if not report.done:
        pairs[1:] = [("state", Text("nothing was changed; use --yes to repair", style="yellow"))]
    console.print(output.facts(pairs))
    if report.salvage:
        console.print("To send the complete messages in it (recipients may get them twice), run:")
        console.print(f"zonerelay spool import {report.salvage}", soft_wrap=True)


# --- decisions ----------------------------------------------------------------------------------------------

PROOF_TIMEOUT = 10.0
"""Seconds in which what a crash has left half done is swept."""


def acknowledge(arguments: Namespace) -> int:
    try:
        done = connect(arguments).ask(request_of(arguments, SpoolAcknowledge), LossDismissal)
    except NotRunningError:
        settings = load_settings(arguments.config)
        with refused(StoreError, OSError):
            if not acknowledge_loss(settings.spool, arguments.loss):
                raise CliError(
                    f"the spool in {settings.spool.path} has no unacknowledged loss {arguments.loss}"
                ) from None
        done = LossDismissal(loss=arguments.loss)
    output.print_answer(done, f"{done.loss}: acknowledged", as_json=arguments.json)
    return OK


def accept_empty(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    spool = settings.spool
    place = place_of_queue(settings)
    if not place:
        raise CliError(
            f'backend = "{spool.backend.value}" stores its queue in {spool.path} and does not compare it '
            "with an earlier state, so there is nothing to accept",
            USAGE,
        )
    with refused(StoreError, OSError):
        forgotten = forget_queue(settings)
    if not forgotten:
        raise CliError(
            f"this machine has no recorded state of the queue in {place}: the store is already accepted as "
            "it is"
        )
    print(
        f"The recorded state of queue {forgotten!r} in {place} was removed from this machine. At its next "
        "start the relay accepts the store as it is. Run this command on each machine that shares the store."
    )
    return OK


def is_empty(arguments: Namespace) -> int:
    """Print the directories of the spools if no spool contains mail. Raise CliError with what is left in
    them.
    """
    settings = load_settings(arguments.config)
    spool = settings.spool
    if spool.backend not in (Backend.LEVELDB, Backend.DISK):
        raise CliError(
            f'backend = "{spool.backend.value}": only leveldb and disk spools can be checked for emptiness'
        )
    found = [path for path in directories_of(spool) if path.is_dir()]
    if spool.path in found:
        with stopped(settings):
            for worker in reversed(spools(spool)):
                if left := asyncio.run(_left_in(settings, worker)):
                    raise CliError(f"not empty: {left}")
                if worker:
                    remove_spool(spool, worker)
    for path in found:
        print(path)
    return OK


async def _left_in(settings: Settings, worker: int) -> str:
    """Return a description of the mail in a worker's spool, or "" if it is empty."""
    async with opened(settings, worker) as store:
        reasons = ["reading it timed out"]
        try:
            if queues := await store.queues():
                path = spool_of(settings.spool, worker).path
                if zones := sorted(str(each) for each in queues if each.kind is not QueueKind.BIN):
                    return f"mail is queued in the zones {', '.join(zones)} of {path}"
                return f"{path}: {IN_BIN} (`zonerelay queue drop --purge --state dropped` destroys it)"
            await asyncio.wait_for(until_empty(store, reasons.append), PROOF_TIMEOUT)
        except TimeoutError:
            return reasons[-1] or reasons[0]
        except StoreError as error:
            return str(error)
        return ""
