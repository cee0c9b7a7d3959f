"""Searches of the history for HTTP: those of `zonerelay log`, in a thread, with what they do not cover."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal

import msgspec

from zonerelay.config.settings import HistoryAddresses, Settings
from zonerelay.control.messages.answers import TraceStep
from zonerelay.history.reader import Entry, Gap, Histories, Query, entries_of, steps
from zonerelay.history.writer import DIRECTORY
from zonerelay.process.setup import redact_key_of
from zonerelay.store.spool_paths import is_shared
from zonerelay.telemetry.logs.address_forms import Form, SearchError, form_of
from zonerelay.telemetry.logs.redact import Redactor, load_key

__all__ = ["Found", "SearchError", "TimeLine", "Wanted", "entries", "search", "time_line"]


class Wanted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything given must match. `about` is a sender, a recipient, a Message-ID, a message id, a user or a
    client; `since` and `until` are Unix seconds. Addresses may be pseudonyms. The newest `limit` are found.
    """

    about: str | None = None
    sender: str | None = None
    recipient: str | None = None
    client: str | None = None
    user: str | None = None
    zone: str = ""
    destination: str = ""
    reply: str = ""
    outcome: (
        Literal["waiting", "delivered", "deferred", "bounced", "expired", "dropped", "refused"] | None
    ) = None
    since: float = 0.0
    until: float | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """In order of time. `more`: there are older ones. `gaps` is time that is not covered; `refused_more` are
    refusals that were counted and not kept. `other_machines`: others share the queue and were not asked.
    """

    found: tuple[Entry, ...]
    more: bool
    gaps: tuple[Gap, ...]
    refused_more: int
    workers: tuple[int, ...]
    other_machines: bool


class TimeLine(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of one message, in order of time; none: it is not in the history, which has `gaps`."""

    steps: tuple[TraceStep, ...]
    gaps: tuple[Gap, ...]


async def search(settings: Settings, wanted: Wanted, now: float) -> Found:
    """Raises SearchError and RedactKeyError."""
    return await asyncio.to_thread(_search, settings, wanted, now)


async def time_line(settings: Settings, message_id: str, now: float) -> TimeLine:
    """Raises RedactKeyError."""
    return await asyncio.to_thread(_time_line, settings, message_id, now)


async def entries(settings: Settings, message_id: str, user: str | None, now: float) -> list[Entry]:
    """Returns what became of one message, for each recipient in the order of its envelope; of a `user` only
    that user's message. Raises SearchError and RedactKeyError.
    """
    return await asyncio.to_thread(_entries, settings, message_id, user, now)


def _entries(settings: Settings, message_id: str, user: str | None, now: float) -> list[Entry]:
    with _histories(settings, now) as histories:
        found = entries_of(message_id, histories.records(message_id))
        clear = settings.history.addresses is HistoryAddresses.CLEAR
        form = None if user is None else form_of(user, histories.redactor, clear=clear)
        return [
            each for each in found if each.outcome != "refused" and (form is None or form.matches(each.user))
        ]


def _histories(settings: Settings, now: float) -> Histories:
    key = load_key(redact_key_of(settings))
    redactor = None if key is None else Redactor(key, enabled=True)
    return Histories(settings.spool.path.parent / DIRECTORY, redactor, now)


def _search(settings: Settings, wanted: Wanted, now: float) -> Found:
    with _histories(settings, now) as histories:
        clear = settings.history.addresses is HistoryAddresses.CLEAR

        def form(value: str | None) -> Form | None:
            return None if value is None else form_of(value, histories.redactor, clear=clear)

        query = Query(
            any=form(wanted.about),
            sender=form(wanted.sender),
            recipient=form(wanted.recipient),
            client=form(wanted.client),
            user=form(wanted.user),
            zone=wanted.zone,
            destination=wanted.destination,
            reply=wanted.reply,
            outcome=wanted.outcome or "",
            since=wanted.since,
            until=float("inf") if wanted.until is None else wanted.until,
        )
        found, more = histories.find(query, wanted.limit)
        return Found(
            found=tuple(found),
            more=more,
            gaps=tuple(histories.gaps(query.since, min(query.until, now))),
            refused_more=histories.refused_more(query),
            workers=tuple(histories.workers),
            other_machines=is_shared(settings.spool),
        )


def _time_line(settings: Settings, message_id: str, now: float) -> TimeLine:
    with _histories(settings, now) as histories:
        told = [
            TraceStep(at=each.at, event=each.event, recipient=each.recipient, text=each.text)
            for each in steps(histories.records(message_id), message_id)
        ]
        accepted = int(message_id[:11], 16) / 1000
        return TimeLine(steps=tuple(told), gaps=tuple(histories.gaps(accepted, now)))
