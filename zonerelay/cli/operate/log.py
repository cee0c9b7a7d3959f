"""`zonerelay log find`, `log show`, `log forget` and `report`: search the mail history of all workers.

The commands read the files in the spool's directory, whether or not the relay runs. Each answer names the
times and files that the search does not cover; an empty result always comes with the range that was searched.
"""

from __future__ import annotations

import contextlib
import socket
import sqlite3
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from rich.console import RenderableType
from rich.text import Text

from zonerelay.cli.arguments import request_of
from zonerelay.cli.relay import client_of, load_for_reading, load_settings
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED, OK, USAGE, CliError, refused
from zonerelay.config.settings import resolve_hostname
from zonerelay.control import history
from zonerelay.control.report import report as figures
from zonerelay.history.database import forget, open_for_writing
from zonerelay.history.reader import HistoryEntry, HistoryGap
from zonerelay.history.writer import DIRECTORY
from zonerelay.model.envelope import Mailbox
from zonerelay.operations.answers import RelayStatus, ResolvedAddress, addresses_in
from zonerelay.operations.errors import ControlError, NotFoundError
from zonerelay.operations.requests import HistoryFind, Resolve, Status
from zonerelay.process.setup import redact_key_of
from zonerelay.telemetry.events.records import TraceStep
from zonerelay.telemetry.logs.redact import RedactKeyError, UnsearchableError

if TYPE_CHECKING:
    from pathlib import Path

    from zonerelay.config.settings import Settings

FORGOTTEN = "forgotten"
_searches = partial(refused, UnsearchableError, RedactKeyError, status=USAGE)
"""Errors of the search or of the key of the pseudonyms are usage errors."""


@_searches()
def find(arguments: Namespace) -> int:
    asked = _search(arguments.config)
    settings = asked.settings
    # A relay limits this; a command does not.
    wanted = msgspec.structs.replace(request_of(arguments, HistoryFind), limit=arguments.rows)
    answer = asked.search(wanted)
    gaps = history.of_interest(answer, asked=arguments.since is not None)
    found, workers = answer.found, answer.workers
    addresses = known_addresses(settings, found)
    if not arguments.json:
        addresses += filter(None, [arguments.about, arguments.sender, arguments.recipient])
    found = history.named(found, asked.pseudonyms(addresses))
    output.print_rows(found, _table, as_json=arguments.json)
    for gap in gaps if arguments.json else ():
        output.print_line(gap)
    if answer.more:
        output.tell(f"Only the newest {arguments.rows} are shown (use --limit or a narrower search).")
    if not found:
        _tell_nothing(settings, workers)
    if not arguments.json:
        _tell_gaps(gaps, len(workers) + len({gap.worker for gap in gaps} - set(workers)) > 1)
    if answer.refused_more and (not found or arguments.outcome == "refused"):
        output.tell(f"{answer.refused_more:,} more refusals were only counted, not stored individually.")
    if answer.other_machines:
        output.tell("Other machines that share the queue were not searched: each has its own history.")
    return OK if found else FAILED


@_searches()
def show(arguments: Namespace) -> int:
    asked = _search(arguments.config)
    shown = _time_line(asked, arguments.message_id)
    output.print_rows(shown.steps, trace_table, as_json=arguments.json)
    if not shown.steps:
        _tell_nothing(asked.settings, shown.workers)
    _tell_gaps(shown.gaps, len(shown.workers) > 1)
    return OK if shown.steps else FAILED


def _search(config: Path | None, *, quietly: bool = False) -> history.HistorySearch:
    return history.HistorySearch(load_for_reading(config, quietly=quietly), time.time(), None)


def _time_line(asked: history.HistorySearch, message_id: str) -> history.Timeline:
    return asked.time_line(message_id, known_addresses(asked.settings, asked.entries(message_id)))


def known_addresses(settings: Settings, found: Iterable[HistoryEntry]) -> list[str]:
    """Return the addresses behind pseudonyms in these history entries, if the running relay knows them."""
    known: list[str] = []
    relay = client_of(settings)
    with contextlib.suppress(ControlError):
        for each in history.questions(found):
            with contextlib.suppress(NotFoundError):
                known += [address for frame in relay.stream(each) for address in addresses_in(frame)]
    return known


@contextlib.contextmanager
def left_queue(config: Path | None, message_id: str) -> Iterator[None]:
    """Add the message's outcome from the history to a NotFoundError that the block raises."""
    try:
        yield
    except NotFoundError:
        with contextlib.suppress(CliError, RedactKeyError, UnsearchableError):
            if shown := _search(config, quietly=True).became(message_id):
                raise NotFoundError(
                    f"{shown}. Run zonerelay log show {message_id} for its time line"
                ) from None
        raise


def history_of(config: Path | None, message_id: str, queued: Sequence[TraceStep]) -> list[TraceStep]:
    """Return the recorded events of a message, followed by the next steps that the queue reports."""
    with contextlib.suppress(CliError, RedactKeyError, UnsearchableError):
        return history.continued(_time_line(_search(config, quietly=True), message_id), queued)
    return list(queued)


def trace_table(steps: Sequence[TraceStep]) -> RenderableType:
    """Return the events of a message as a table, one event per row. On a narrow terminal, the recipient is
    part of the details.
    """

    def table(*, wide: bool) -> RenderableType:
        rows = []
        for step in steps:
            row: dict[str, output.Cell] = {"time": text.when(step.at), "event": step.event}
            if wide:
                row["recipient"] = step.recipient
            words = [step.text] if wide else filter(None, [step.recipient, step.text])
            rows.append({**row, "detail": Text(": ".join(words), overflow="fold")})
        return output.table(rows, cut=("recipient", "detail"))

    return output.ByWidth(output.WIDE, *(partial(table, wide=wide) for wide in (True, False)))


@_searches()
def forget_address(arguments: Namespace) -> int:
    """Remove an address from the histories: `log forget ADDRESS`."""
    settings = load_settings(arguments.config)
    form = history.form(arguments.address, settings, history.redactor_of(settings))
    if not any(form.exact):
        raise CliError("specify one complete address or its pseudonym", USAGE)
    count = 0
    directory = settings.spool.path.parent / DIRECTORY
    for path in sorted(directory.glob("[0-9][0-9]*.db")):
        try:
            with contextlib.closing(open_for_writing(path)) as database:
                count += forget(database, sorted(form.exact), FORGOTTEN)
        except (sqlite3.Error, OSError) as error:
            raise CliError(f"{path}: {error}; histories before this file were already changed") from error
    print(f"Overwritten in {text.plural(count, 'place')} of the history.")
    if aside := sorted(directory.glob("*.aside")):
        output.tell(f"The address may still be in {' '.join(map(str, aside))}; remove these files.")
    output.tell("Queued mail, logs and backups were not changed.")
    return OK


def report(arguments: Namespace) -> int:
    """Print the daily report for the period that ends now (`zonerelay report`)."""
    settings = load_for_reading(arguments.config)
    now = time.time()
    hostname = resolve_hostname(settings, socket.getfqdn)
    client = client_of(settings)
    status: RelayStatus | ControlError
    try:
        status = client.ask(Status(), RelayStatus)
    except ControlError as error:
        status = error

    def known(senders: Sequence[str]) -> Mapping[str, str]:
        found: list[ResolvedAddress] = []
        with contextlib.suppress(ControlError):
            for recent in (True, False):
                request = Resolve(pseudonym=" ".join(senders), recent=recent)
                found += client.all(request, ResolvedAddress)[0]
        return history.HistorySearch(settings, now).pseudonyms(each.address for each in found)

    shown = figures(settings, hostname, (now - arguments.since, now), status, known)
    print(text.clean_lines(shown), end="")
    return OK


@_searches()
def pseudonym_of(settings: Settings, address: str) -> str:
    """Return the pseudonym of an address, or of a domain given as `@example.com`. Raise CliError if there is
    none.
    """
    wanted = address.strip().strip("<>")
    if "*" in wanted:
        raise CliError(
            f"{address}: a pseudonym represents one complete address and cannot be searched by parts. "
            "Specify a complete address, or a domain as @example.com",
            USAGE,
        )
    redactor = history.redactor_of(settings)
    if redactor is None:
        raise CliError(
            f"the pseudonym key {redact_key_of(settings)} does not exist, so the log contains no pseudonyms"
        )
    domain = wanted.startswith("@")
    pseudonym = redactor.mailbox(Mailbox(f"x{wanted}" if domain else wanted))
    return pseudonym.partition("@")[2] if domain else pseudonym


@output.tabular(cut=("from", "to", "host", "reply"), wide=("from", "host"))
def _table(row: HistoryEntry) -> output.Row:
    tries = f" ×{row.attempts}" if row.attempts > 1 else ""
    return {
        "time": text.when(row.at)[:19],
        "id": row.message_id or "-",
        "outcome": Text(row.outcome + tries, style=_STYLES.get(row.outcome, "")),
        "from": row.sender,
        "to": row.recipient,
        "host": row.host,
        "reply": row.reply,
    }


_STYLES = {
    "delivered": "green",
    "deferred": "yellow",
    "waiting": "yellow",
    "bounced": "red",
    "expired": "red",
}


def _tell_nothing(settings: Settings, workers: Sequence[int]) -> None:
    place = settings.spool.path.parent / DIRECTORY
    if not settings.history.enabled:
        output.tell("The history is disabled ([history] enabled = false).")
    if workers:
        named = ", ".join(map(str, workers))
        asked = f"worker {named}" if len(workers) == 1 else f"workers {named}"
        output.tell(f"No matching event in the history of {asked} in {place}.")
    elif place.exists():
        output.tell(f"{place} contains no readable history.")
    else:
        output.tell(f"No history is stored in {place} yet. A relay stores events within a second.")


def _tell_gaps(gaps: Sequence[HistoryGap], several: bool) -> None:
    if gaps:
        output.tell("The history is incomplete:")
    for line in history.in_words(gaps, text.when, several=several):
        output.tell(f"  {line}")
