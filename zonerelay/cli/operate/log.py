"""`zonerelay log find`, `log show` and `log forget`: what became of mail, from the histories of all workers.

The commands read the files beside the spool, whether the relay runs or not. Whatever a search does not cover
is said with its answer; nothing found is never said without what was searched.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from zonerelay.cli.relay import load_settings
from zonerelay.cli.terminal import output, text
from zonerelay.cli.terminal.exits import FAILED, OK, USAGE, CliError
from zonerelay.control.messages.answers import TraceStep
from zonerelay.history.database import CLEAR, forget, open_for_writing
from zonerelay.history.reader import Entry, Gap, Histories, Query, Step, steps
from zonerelay.history.writer import DIRECTORY
from zonerelay.model.address import Mailbox
from zonerelay.process.setup import redact_key_of
from zonerelay.store.spool_paths import is_shared
from zonerelay.telemetry.logs.address_forms import Form, SearchError, form_of
from zonerelay.telemetry.logs.redact import RedactKeyError, Redactor, load_key

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from zonerelay.config.settings import Settings

MAX_GAPS = 5
"""Told one by one."""
FORGOTTEN = "forgotten"


def find(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    now = time.time()
    with _histories(settings, now) as histories:
        query = _query(arguments, settings, histories.redactor, now)
        found, more = histories.find(query, arguments.limit)
        since = query.since if found or arguments.since is not None else 0.0
        gaps = _of_interest(histories.gaps(since, min(query.until, now)), found, arguments.since is not None)
        counted = histories.refused_more(query)
        workers = histories.workers
    if arguments.json:
        for each in (*found, *gaps):
            output.print_line(each)
    elif found:
        console = output.console()
        wide = console.width >= output.WIDE
        console.print(_table(found, _asked_about(arguments, histories.redactor), wide=wide))
    if more:
        output.chatter().print(
            f"The newest {arguments.limit}; there are more (--limit, or a narrower search)."
        )
    if not found:
        _tell_nothing(settings, workers)
    if not arguments.json:
        _tell_gaps(gaps, len(workers) + len({gap.worker for gap in gaps} - set(workers)) > 1)
    if counted and (not found or arguments.outcome == "refused"):
        output.chatter().print(f"{counted:,} more refusals were counted, by client, and not kept one by one.")
    if is_shared(settings.spool):
        output.chatter().print(
            "Other machines with the same queue were not asked: they have their own history."
        )
    return OK if found else FAILED


def show(arguments: Namespace) -> int:
    settings = load_settings(arguments.config)
    now = time.time()
    with _histories(settings, now) as histories:
        told = steps(histories.records(arguments.message_id), arguments.message_id)
        accepted = int(arguments.message_id[:11], 16) / 1000
        gaps = histories.gaps(accepted, now)
        workers = histories.workers
    print_steps([_frame(each) for each in told], as_json=arguments.json)
    if not told:
        _tell_nothing(settings, workers)
    _tell_gaps(gaps, len(workers) > 1)
    return OK if told else FAILED


def history_of(config: Path | None, message_id: str, queued: Sequence[TraceStep]) -> list[TraceStep]:
    """The time line of a message; what its queue still says comes behind. Addresses that the queue shows are
    shown in what the history has, too.
    """
    with contextlib.suppress(CliError), _histories(load_settings(config), time.time()) as histories:
        records = histories.records(message_id)
        if not any(record.name in ("accepted", "dsn") for record in records):
            return list(queued)  # a gap: the queue knows the acceptance and the last attempt
        told = [_frame(each) for each in steps(records, message_id)]
        names: dict[str, str] = {}
        if histories.redactor is not None:
            names = {histories.redactor.mailbox(Mailbox(each.recipient)): each.recipient for each in queued}
        shown = [
            TraceStep(
                at=each.at,
                event=each.event,
                recipient=names.get(each.recipient, each.recipient),
                text=each.text,
            )
            for each in told
        ]
        return shown + [each for each in queued if each.event not in ("accepted", "settled", "attempt")]
    return list(queued)


def print_steps(found: Sequence[TraceStep], *, as_json: bool) -> None:
    from zonerelay.cli.operate.read import trace_table

    if as_json:
        for step in found:
            output.print_line(step)
    elif found:
        console = output.console()
        console.print(trace_table(found, wide=console.width >= output.WIDE))


def forget_address(arguments: Namespace) -> int:
    """`log forget ADDRESS`."""
    settings = load_settings(arguments.config)
    form = _form(arguments.address, settings, _redactor(settings))
    if not form.exact:
        raise CliError("give one whole address, or its pseudonym", USAGE)
    count = 0
    directory = settings.spool.path.parent / DIRECTORY
    for path in sorted(directory.glob("[0-9][0-9]*.db")):
        try:
            with contextlib.closing(open_for_writing(path)) as database:
                count += forget(database, sorted(form.exact), FORGOTTEN)
        except (sqlite3.Error, OSError) as error:
            raise CliError(f"{path}: {error}; what was forgotten until then stays so") from error
    print(f"Written over in {text.plural(count, 'place')} of the history.")
    if aside := sorted(directory.glob("*.aside")):
        output.chatter().print(f"It may still be in {' '.join(map(str, aside))}: remove that.")
    output.chatter().print("Mail in the queue, log lines and backups are as before.")
    return OK


def pseudonym_of(settings: Settings, address: str) -> str:
    """Of an address, or of a domain as `@example.com`. Raises CliError where there is none."""
    wanted = address.strip().strip("<>")
    if "*" in wanted:
        raise CliError(
            f"{address}: a pseudonym stands for one whole address; no part of one has any. Give an address,"
            " or a domain as @example.com",
            USAGE,
        )
    redactor = _redactor(settings)
    if redactor is None:
        raise CliError(f"there is no key of pseudonyms at {redact_key_of(settings)}: the log has none")
    domain = wanted.startswith("@")
    pseudonym = redactor.mailbox(Mailbox(f"x{wanted}" if domain else wanted))
    return pseudonym.partition("@")[2] if domain else pseudonym


def _frame(step: Step) -> TraceStep:
    return TraceStep(at=step.at, event=step.event, recipient=step.recipient, text=step.text)


@contextlib.contextmanager
def _histories(settings: Settings, now: float) -> Iterator[Histories]:
    with Histories(settings.spool.path.parent / DIRECTORY, _redactor(settings), now) as histories:
        yield histories


def _redactor(settings: Settings) -> Redactor | None:
    """`None` when there is no key, and so no pseudonym."""
    try:
        key = load_key(redact_key_of(settings))
    except RedactKeyError as error:
        raise CliError(str(error), USAGE) from error
    return None if key is None else Redactor(key, enabled=True)


def _query(arguments: Namespace, settings: Settings, redactor: Redactor | None, now: float) -> Query:
    def form(value: str | None) -> Form | None:
        return None if value is None else _form(value, settings, redactor)

    return Query(
        any=form(arguments.value),
        sender=form(arguments.sender),
        recipient=form(arguments.recipient),
        client=form(arguments.client),
        user=form(arguments.user),
        zone=arguments.zone or "",
        destination=arguments.destination or "",
        reply=arguments.reply or "",
        outcome=arguments.outcome or "",
        since=0.0 if arguments.since is None else now - arguments.since,
        until=float("inf") if arguments.until is None else now - arguments.until,
    )


def _form(value: str, settings: Settings, redactor: Redactor | None) -> Form:
    try:
        return form_of(value, redactor, clear=settings.history.addresses == CLEAR)
    except SearchError as error:
        raise CliError(str(error), USAGE) from error


def _asked_about(arguments: Namespace, redactor: Redactor | None) -> dict[str, str]:
    """The addresses that the operator knows, by their pseudonyms: they are shown as given."""
    given = [each for each in (arguments.value, arguments.sender, arguments.recipient) if each]
    return {} if redactor is None else {redactor.mailbox(Mailbox(each)): each for each in given}


def _table(found: Sequence[Entry], known: Mapping[str, str], *, wide: bool) -> Table:
    columns = ["time", "id", "outcome", "from", "to", "host", "reply"]
    if not wide:
        columns = [name for name in columns if name not in ("from", "host")]
    rows = []
    for each in found:
        tries = f" ×{each.attempts}" if each.attempts > 1 else ""
        cells: dict[str, output.Cell] = {
            "time": text.when(each.at)[: 19 if wide else 16],
            "id": each.message_id or "-",
            "outcome": Text(each.outcome + tries, style=_STYLES.get(each.outcome, "")),
            "from": text.clean(known.get(each.sender, each.sender)),
            "to": text.clean(known.get(each.recipient, each.recipient)),
            "host": text.clean(each.host),
            "reply": text.clean(each.reply),
        }
        rows.append([cells[name] for name in columns])
    return output.table(columns, rows, cut=("from", "to", "host", "reply"))


_STYLES = {
    "delivered": "green",
    "deferred": "yellow",
    "waiting": "yellow",
    "bounced": "red",
    "expired": "red",
}


def _of_interest(gaps: Sequence[Gap], found: Sequence[Entry], asked: bool) -> list[Gap]:
    """That nothing is kept from before is news where nothing was found, or that time was asked for."""
    return [gap for gap in gaps if gap.began is not None or gap.ended is None or asked or not found]


def _tell_nothing(settings: Settings, workers: Sequence[int]) -> None:
    place = settings.spool.path.parent / DIRECTORY
    if not settings.history.enabled:
        output.chatter().print("The history is off: [history] enabled = false.")
    if workers:
        named = ", ".join(map(str, workers))
        asked = f"worker {named}" if len(workers) == 1 else f"workers {named}"
        output.chatter().print(f"Nothing is found in the history of {asked} in {place}.")
    else:
        output.chatter().print(f"There is no history that can be read in {place}.")


def _tell_gaps(gaps: Sequence[Gap], several: bool) -> None:
    chatter = output.chatter()
    if gaps:
        chatter.print("The history is not whole:")
    for gap in gaps[:MAX_GAPS]:
        chatter.print(f"  {_told(gap, several)}")
    if len(gaps) > MAX_GAPS:
        chatter.print(f"  and {len(gaps) - MAX_GAPS} more times (--json has them all)")


def _told(gap: Gap, several: bool) -> str:
    worker = f"worker {gap.worker}: " if several else ""
    if gap.began is None and gap.ended is None:
        return f"{worker}{gap.why}"
    began = "the beginning" if gap.began is None else text.when(gap.began)
    ended = "now" if gap.ended is None else text.when(gap.ended)
    return f"{worker}from {began} to {ended}: {gap.why}"
