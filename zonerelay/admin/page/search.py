"""Searches the history for the page, and describes its gaps."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

import msgspec

from zonerelay.admin.page.text import when
from zonerelay.admin.page.visitor import Visitor
from zonerelay.config.units import parse_duration
from zonerelay.control import history
from zonerelay.operations.answers import TraceStep
from zonerelay.operations.requests import HistoryFind
from zonerelay.process.threads import LOOKUPS
from zonerelay.telemetry.logs.redact import RedactKeyError
from zonerelay.telemetry.logs.redact import SearchError as NoFormError

FOUND = 200


class SearchError(Exception):
    """The search is invalid. The text is for the operator."""


async def find(visitor: Visitor, given: Mapping[str, str]) -> dict[str, object]:
    """Return the values for the template `history`. Raise SearchError if the search is invalid."""
    settings, now = visitor.operators.settings(), visitor.now
    value, outcome = given["value"], given["outcome"]
    try:
        since = now - parse_duration(given["since"]) if given["since"] else 0.0
        wanted = {"about": value or None, "outcome": outcome or None, "reply": given["reply"]}
        query = msgspec.convert({**wanted, "since": since, "limit": FOUND}, HistoryFind)
        answer = await history.ask(history.search, settings, query, now)
        clear = [value] if value else []
        if visitor.operates:
            clear += await visitor.operators.addresses(history.questions(answer.found))
        known = await LOOKUPS.run(history.pseudonyms, settings, clear)
    except (ValueError, RedactKeyError, NoFormError) as error:
        raise SearchError(str(error)) from error
    gaps = history.of_interest(answer, asked=bool(since))
    gap_texts = history.in_words(gaps, when, several=settings.workers > 1)
    if answer.other_machines:
        gap_texts.append("other machines with the same queue were not asked: they have their own history")
    options = [f"--{name}={given[name]}" for name in ("since", "outcome", "reply") if given[name]]
    return {
        "found": answer.found[::-1],
        "more": answer.more,
        "counted": answer.refused_more if not answer.found or outcome == "refused" else 0,
        "known": known,
        "gaps": gap_texts,
        "command": shlex.join(["zonerelay", "log", "find", *([value] if value else []), *options]),
    }


async def time_line(
    visitor: Visitor, message_id: str, queued: Sequence[TraceStep], known: Sequence[str]
) -> tuple[list[TraceStep], list[str]]:
    """Return the whole time line of a message, and a description of the gaps in the history."""
    settings, now = visitor.operators.settings(), visitor.now
    try:
        if visitor.operates:
            found = await history.ask(history.entries, settings, message_id, None, now)
            known = [*known, *await visitor.operators.addresses(history.questions(found))]
        line, gaps = await history.ask(history.whole_line, settings, message_id, queued, known, now)
    except RedactKeyError as error:
        return list(queued), [str(error)]
    return line, history.in_words(gaps, when, several=settings.workers > 1)
