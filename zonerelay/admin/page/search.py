"""Searches of the history for the page, and its gaps in words."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Mapping, Sequence

import msgspec

from zonerelay.admin import history
from zonerelay.admin.page.text import when
from zonerelay.config.settings import Settings
from zonerelay.config.units import parse_duration
from zonerelay.control.messages.answers import TraceStep
from zonerelay.history.reader import Gap
from zonerelay.model.address import Mailbox
from zonerelay.process.setup import redact_key_of
from zonerelay.telemetry.logs.redact import RedactKeyError, Redactor, load_key

FOUND = 200
MAX_GAPS = 5
MAX_KNOWN = 1000

_PSEUDONYM = re.compile(r"u-[a-z2-7]{13}@d-[a-z2-7]{13}")


class SearchError(Exception):
    """Nothing can be searched for so; the text is for the operator."""


async def find(settings: Settings, now: float, given: Mapping[str, str]) -> dict[str, object]:
    """What the template `history` shows. Raises SearchError."""
    value, outcome = given["value"], given["outcome"]
    try:
        since = now - parse_duration(given["since"]) if given["since"] else 0.0
        wanted = {"about": value or None, "outcome": outcome or None, "reply": given["reply"]}
        query = msgspec.convert({**wanted, "since": since, "limit": FOUND}, history.Wanted)
        answer = await history.search(settings, query, now)
    except (ValueError, RedactKeyError, history.SearchError) as error:
        raise SearchError(str(error)) from error
    found = answer.found[::-1]
    # That nothing is kept from before is news where nothing was found, or that time was asked for.
    gaps = [
        each for each in answer.gaps if each.began is not None or each.ended is None or since or not found
    ]
    options = [f"--{name}={given[name]}" for name in ("since", "outcome", "reply") if given[name]]
    return {
        "found": found,
        "more": answer.more,
        "counted": answer.refused_more if not found or outcome == "refused" else 0,
        "known": await asyncio.to_thread(_pseudonyms, settings, [value] if value else []),
        "gaps": _in_words(gaps, settings, others=answer.other_machines),
        "command": shlex.join(["zonerelay", "log", "find", *([value] if value else []), *options]),
    }


async def time_line(
    settings: Settings, now: float, message_id: str, queued: Sequence[TraceStep], known: Sequence[str]
) -> tuple[list[TraceStep], list[str]]:
    """Everything that is known of one message, the future at the end, which its queue knows; and the gaps.
    The `known` addresses, which the queue shows, are shown in what the history has, too.
    """
    try:
        answer = await history.time_line(settings, message_id, now)
        names = await asyncio.to_thread(_pseudonyms, settings, known[:MAX_KNOWN])
    except RedactKeyError as error:
        return list(queued), [str(error)]
    gaps = _in_words(answer.gaps, settings)
    if not any(each.event in ("accepted", "is a report") for each in answer.steps):
        return list(queued), gaps  # the queue knows the acceptance and the last attempt
    line = [
        msgspec.structs.replace(
            each,
            recipient=names.get(each.recipient, each.recipient),
            text=_PSEUDONYM.sub(lambda found: names.get(found[0], found[0]), each.text),
        )
        for each in answer.steps
    ]
    return line + [each for each in queued if each.event not in ("accepted", "settled", "attempt")], gaps


def _pseudonyms(settings: Settings, addresses: Sequence[str]) -> dict[str, str]:
    """Each address by its pseudonym. Raises RedactKeyError."""
    key = load_key(redact_key_of(settings))
    redactor = None if key is None else Redactor(key, enabled=True)
    return {} if redactor is None else {redactor.mailbox(Mailbox(each)): each for each in addresses}


def _in_words(gaps: Sequence[Gap], settings: Settings, *, others: bool = False) -> list[str]:
    told = []
    for gap in gaps[:MAX_GAPS]:
        where = "" if settings.workers == 1 else f"worker {gap.worker}: "
        began = "the beginning" if gap.began is None else when(gap.began)
        ended = "now" if gap.ended is None else when(gap.ended)
        span = "" if gap.began is gap.ended else f"from {began} to {ended}: "
        told.append(f"{where}{span}{gap.why}")
    if len(gaps) > MAX_GAPS:
        told.append(f"and {len(gaps) - MAX_GAPS} more times (zonerelay log find --json has them all)")
    if others:
        told.append("other machines with the same queue were not asked: they have their own history")
    return told
