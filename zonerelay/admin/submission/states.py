"""What became of a message for each of its recipients: those that wait from the queue, the others from the
history, where addresses are pseudonyms unless `[history] addresses` says otherwise.
"""

from __future__ import annotations

import msgspec

from zonerelay.admin.api.verbs import Call
from zonerelay.control.history import ask, entries
from zonerelay.history.reader import Entry
from zonerelay.operations.answers import MessageDetail
from zonerelay.operations.errors import NotFoundError
from zonerelay.operations.requests import QueueShow


class RecipientState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`index` is the place in the answer to the submission. `state`: `queued` when accepted, `refused`; later
    that of the queue, or `delivered`, `bounced`, `expired`, `dropped`, or `gone` when the history does not
    have it. `reply` is the last of the other side.
    """

    address: str
    index: int
    state: str
    reply: str = ""
    attempts: int = 0
    next_attempt: float | None = None


class MessageState(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    created: float
    recipients: tuple[RecipientState, ...]


async def detail_of(call: Call, message_id: str) -> MessageDetail | None:
    """The message while it is in the queue. A user's token sees the messages of its user. Raises
    NotFoundError for another's.
    """
    try:
        detail = await call.one(QueueShow(message_id=message_id), MessageDetail)
    except NotFoundError:
        return None
    if call.token.scope == "submit" and detail.user != call.token.user:
        raise NotFoundError(f"no message {message_id}")
    return detail


async def state_of(call: Call, message_id: str) -> MessageState:
    """Raises NotFoundError."""
    detail = await detail_of(call, message_id)
    user = call.token.user if call.token.scope == "submit" else None
    settings, now = call.operators.settings(), call.operators.clock.now()
    known = await ask(entries, settings, message_id, user, now)
    if detail is None and not known:
        raise NotFoundError(f"no message {message_id}")
    states = {index: _of_entry(entry, index) for index, entry in enumerate(known)}
    if detail is not None:
        places = {each: index for index, each in enumerate(detail.recipients)}
        for address, index in places.items():
            states.setdefault(index, RecipientState(address=address, index=index, state="gone"))
        for row in detail.deliveries:
            index = places.get(row.recipient, len(places))
            states[index] = RecipientState(
                address=row.recipient,
                index=index,
                state=row.state,
                reply=row.reply,
                attempts=row.attempts,
                next_attempt=row.next_attempt,
            )
    created = known[0].accepted or known[0].at if detail is None else detail.created
    return MessageState(id=message_id, created=created, recipients=tuple(states[at] for at in sorted(states)))


def _of_entry(entry: Entry, index: int) -> RecipientState:
    return RecipientState(
        address=entry.recipient,
        index=index,
        state=entry.outcome,
        reply=entry.reply,
        attempts=entry.attempts,
    )
