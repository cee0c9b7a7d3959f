"""Determines the state of a message for each recipient, from the queue or from the history. There, addresses
are pseudonyms unless `[history] addresses` is "clear".
"""

import json
import math
from typing import Annotated, Literal

import msgspec

from zonerelay.admin.api.verbs import ApiCall
from zonerelay.admin.problems import wrong
from zonerelay.control.history import ask
from zonerelay.history.reader import HistoryEntry, Query, SentMessage
from zonerelay.operations.answers import DeliveryRow, MessageDetail
from zonerelay.operations.errors import ControlError, NotFoundError
from zonerelay.operations.requests import QueueShow
from zonerelay.telemetry.logs.redact import UnsearchableError


class RecipientState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The state of one recipient of a submitted message. `index` is its position in the answer to the
    submission. `state` is `queued` or `refused` in that answer; later it is the state in the queue, or
    `delivered`, `bounced`, `expired`, `dropped`, or `gone` if the history has no entry. `reply` is the last
    reply of the peer.
    """

    address: str
    index: int
    state: str
    reply: str = ""
    attempts: int = 0
    next_attempt: float | None = None


class MessageState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a message for all of its recipients."""

    id: str
    created: float
    recipients: tuple[RecipientState, ...]


class MessageSearch(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The parameters of a search for messages; all given conditions must match. Times are Unix seconds.
    `state` is the state of at least one recipient. `cursor` is `next` of the previous page.
    """

    tag: str = ""
    recipient: str = ""
    state: Literal["waiting", "delivered", "deferred", "bounced", "expired", "dropped"] | None = None
    since: float = 0.0
    until: float | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100
    cursor: Annotated[str, msgspec.Meta(max_length=100)] = ""


class MessageSummary(MessageState, frozen=True, kw_only=True):
    """One message in the results of a search. `tags` and `metadata` are those of its submission."""

    sender: str
    tags: tuple[str, ...]
    metadata: dict[str, str]


class MessageList(msgspec.Struct, frozen=True, kw_only=True):
    """A page of messages, the newest first. `next` is the cursor of the next page, or null on the last."""

    messages: tuple[MessageSummary, ...]
    next: str | None


async def list_of(call: ApiCall) -> MessageList:
    """Search for messages, and return one page of the results. Raise ApiError if a parameter is invalid, or
    ControlError without a history.
    """
    settings, wanted = call.operators.settings(), call.parameters
    if not settings.history.enabled:
        raise ControlError("finding messages requires the history, which is disabled ([history] enabled)")
    at, _, last = wanted.cursor.partition("_")
    try:
        before = (float(at), last) if wanted.cursor else (math.inf, "")
    except ValueError:
        raise wrong("/cursor", "the value is not the `next` of an earlier page") from None
    until = math.inf if wanted.until is None else wanted.until
    query = Query(since=wanted.since, until=until, outcome=wanted.state or "", tag=wanted.tag, before=before)
    user = call.token.user if call.token.scope == "submit" else None
    most = wanted.limit
    try:
        sent = call.operators.history().sent
        found = await ask(sent, query, user, wanted.recipient, most + 1)
    except UnsearchableError as error:
        raise wrong("", str(error)) from None
    page = found[:most]
    return MessageList(
        messages=tuple(map(_summary, page)),
        next="_".join(map(str, page[-1].place)) if len(found) > most else None,
    )


def _summary(found: SentMessage) -> MessageSummary:
    text = found.accepted.text
    return MessageSummary(
        id=text("id"),
        created=found.accepted.at,
        sender=text("sender"),
        tags=tuple(text("tags").split()),
        metadata=json.loads(text("metadata") or "{}"),
        recipients=tuple(_of_entry(each, at, each.outcome) for at, each in enumerate(found.entries)),
    )


async def detail_of(call: ApiCall) -> MessageDetail | None:
    """Return the details of a message in the queue, or None if the queue does not contain it. A user's token
    sees the messages of its user only; for others, raise NotFoundError.
    """
    message_id = call.path["message_id"]
    try:
        detail = await call.one(QueueShow(message_id=message_id), MessageDetail)
    except NotFoundError:
        return None
    if call.token.scope == "submit" and detail.user != call.token.user:
        raise NotFoundError(f"message {message_id} does not exist")
    return detail


async def state_of(call: ApiCall) -> MessageState:
    """Return the state of a message for each of its recipients. Raise NotFoundError if the message is
    unknown.
    """
    message_id, detail = call.path["message_id"], await detail_of(call)
    user = call.token.user if call.token.scope == "submit" else None
    known = await ask(call.operators.history().entries, message_id, user)
    if detail is None and not known:
        raise NotFoundError(f"message {message_id} does not exist")
    states = {index: _of_entry(entry, index, entry.outcome) for index, entry in enumerate(known)}
    if detail is not None:
        places = {each: index for index, each in enumerate(detail.recipients)}
        for address, index in places.items():
            states.setdefault(index, RecipientState(address=address, index=index, state="gone"))
        for row in detail.deliveries:
            index = places.get(row.recipient, len(places))
            states[index] = msgspec.structs.replace(
                _of_entry(row, index, row.state), next_attempt=row.next_attempt
            )
    created = known[0].accepted or known[0].at if detail is None else detail.created
    return MessageState(id=message_id, created=created, recipients=tuple(states[at] for at in sorted(states)))


def _of_entry(entry: HistoryEntry | DeliveryRow, index: int, state: str) -> RecipientState:
    return RecipientState(
        address=entry.recipient, index=index, state=state, reply=entry.reply, attempts=entry.attempts
    )
