"""Searches the history for the page. Blocks: call in a thread. Each answer tells the gaps of the history."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence

from zonerelay.admin.page.text import when
from zonerelay.config.settings import Settings
from zonerelay.config.units import parse_duration
from zonerelay.control.messages.answers import TraceStep
from zonerelay.history.database import CLEAR
from zonerelay.history.reader import (
    OUTCOMES,
    Form,
    Gap,
    Histories,
    Query,
    SearchError,
    form_of,
    steps,
)
from zonerelay.history.writer import DIRECTORY
from zonerelay.model.address import Mailbox
from zonerelay.model.message_id import is_message_id
from zonerelay.process.setup import redact_key_of
from zonerelay.store.spool_paths import is_shared
from zonerelay.telemetry.logs.redact import RedactKeyError, Redactor, load_key

__all__ = ["OUTCOMES", "SearchError", "find", "state", "time_line"]

MAX_GAPS = 5
MAX_KNOWN = 1000

_PSEUDONYM = re.compile(r"u-[a-z2-7]{13}@d-[a-z2-7]{13}")


def find(settings: Settings, now: float, given: Mapping[str, str], limit: int) -> dict[str, object]:
    """What the template `history` shows. Raises SearchError."""
    value, outcome = given["value"], given["outcome"]
    try:
        since = now - parse_duration(given["since"]) if given["since"] else None
    except ValueError as error:
        raise SearchError(f"since: {error}") from error
    if outcome and outcome not in OUTCOMES:
        raise SearchError(f"there is no outcome {outcome}; there are {', '.join(OUTCOMES)}")
    with _histories(settings, now) as histories:
        query = Query(
            any=_form(value, histories.redactor, settings) if value else None,
            reply=given["reply"],
            outcome=outcome,
            since=since or 0.0,
            until=float("inf"),
        )
        found, more = histories.find(query, limit)
        gaps = histories.gaps(query.since, now)
        counted = histories.refused_more(query) if not found or outcome == "refused" else 0
        known = {histories.redactor.mailbox(Mailbox(value)): value} if histories.redactor and value else {}
    # That nothing is kept from before is news where nothing was found, or that time was asked for.
    told = [each for each in gaps if each.began is not None or each.ended is None or since or not found]
    options = [
        f"--{name} {shlex.quote(given[name])}" for name in ("since", "outcome", "reply") if given[name]
    ]
    words = [shlex.quote(value)] if value else []
    return {
        "found": found[::-1],
        "more": more,
        "counted": counted,
        "known": known,
        "gaps": _in_words(told, settings),
        "command": " ".join(["zonerelay log find", *words, *options]),
    }


def time_line(
    settings: Settings, now: float, message_id: str, queued: Sequence[TraceStep], known: Sequence[str]
) -> tuple[list[TraceStep], list[str]]:
    """Everything that is known of one message, the future at the end, which its queue knows; and the gaps. The
    `known` addresses, which the queue shows, are shown in what the history has, too.
    """
    try:
        with _histories(settings, now) as histories:
            records = histories.records(message_id)
            gaps = histories.gaps(int(message_id[:11], 16) / 1000, now)
            redactor = histories.redactor
    except SearchError as error:
        return list(queued), [str(error)]
    told = _in_words(gaps, settings)
    if not any(record.name in ("accepted", "dsn") for record in records):
        return list(queued), told  # a gap: the queue knows the acceptance and the last attempt
    names = {} if redactor is None else {redactor.mailbox(Mailbox(each)): each for each in known[:MAX_KNOWN]}
    line = []
    for each in steps(records, message_id):
        text = _PSEUDONYM.sub(lambda found: names.get(found[0], found[0]), each.text)
        recipient = names.get(each.recipient, each.recipient)
        line.append(TraceStep(at=each.at, event=each.event, recipient=recipient, text=text))
    return line + [each for each in queued if each.event not in ("accepted", "settled", "attempt")], told


def state(settings: Settings, now: float) -> str:
    """One line for the overview."""
    if not settings.history.enabled:
        return "off: [history] enabled = false"
    try:
        with _histories(settings, now) as histories:
            gaps = _in_words([each for each in histories.gaps(now - 86_400, now) if each.began], settings)
            workers = len(histories.workers)
    except SearchError as error:
        return str(error)
    kept = f"kept for {settings.history.keep / 86_400:.0f} days"
    if not workers:
        return f"{kept}; nothing is in it yet"
    return f"{kept}; of the last day, {'; '.join(gaps)}" if gaps else f"{kept}; the last day is whole"


@contextlib.contextmanager
def _histories(settings: Settings, now: float) -> Iterator[Histories]:
    try:
        key = load_key(redact_key_of(settings))
    except RedactKeyError as error:
        raise SearchError(str(error)) from error
    redactor = None if key is None else Redactor(key, enabled=True)
    with Histories(settings.spool.path.parent / DIRECTORY, redactor, now) as histories:
        yield histories


def _form(value: str, redactor: Redactor | None, settings: Settings) -> Form:
    if is_message_id(value):
        return Form(frozenset({value}))
    with contextlib.suppress(ValueError):
        value = str(ipaddress.ip_address(value))
    return form_of(value, redactor, clear=settings.history.addresses == CLEAR)


def _in_words(gaps: Sequence[Gap], settings: Settings) -> list[str]:
    told = []
    for gap in gaps[:MAX_GAPS]:
        where = "" if settings.workers == 1 else f"worker {gap.worker}: "
        began = "the beginning" if gap.began is None else when(gap.began)
        ended = "now" if gap.ended is None else when(gap.ended)
        told.append(
            f"{where}{gap.why}" if gap.began is gap.ended else f"{where}from {began} to {ended}: {gap.why}"
        )
    if len(gaps) > MAX_GAPS:
        told.append(f"and {len(gaps) - MAX_GAPS} more times (zonerelay log find --json has them all)")
    if is_shared(settings.spool):
        told.append("other machines with the same queue were not asked: they have their own history")
    return told
