"""Represents an outbox row that this relay has claimed: parses its columns, and decides what is written to
it. Pure.

Values that an application has written are as untrusted as the commands of an SMTP client. BadRowError names
the column that cannot be sent. Each recipient has its own state, so a recipient who has received the message
does not get it again. The row is written each time a recipient has its final outcome or is deferred. After
the last attempt of a claim the row gets its status:

    every recipient has the message   sent
    a recipient is to be retried      queued; next_retry_at is the earliest retry
    otherwise                         failed; error_log has the reasons, with pseudonyms of the recipients
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec
from msgspec.structs import replace

from zonerelay.model.delivery import Delivery, DeliveryKey, mailbox_zone, queue_of
from zonerelay.model.envelope import MAX_ROW, OUTBOX, Envelope, Mailbox, Origin, Priority, Recipient, row_id
from zonerelay.model.reply import Attempt, Outcome, Reply
from zonerelay.outbox.database.sql import HEAD_COLUMNS, MAX_PEOPLE, PEOPLE
from zonerelay.outbox.drafts import BadRowError, RowContent, RowRecipients, recipients_of
from zonerelay.store.postgres.driver import Columns
from zonerelay.telemetry.logs.redact import Redactor

QUEUED, PROCESSING, SENT, FAILED = "queued", "processing", "sent", "failed"
FOREVER = float("inf")
MAX_LINES = 20
MAX_ATTEMPTS = 1_000_000
MAX_DELAY = 10 * 366 * 86400.0
SOON = 1.0
"""A recipient who is due at most this many seconds later than the row is attempted with it."""
PUT_OFF = 300.0
"""Seconds until a row of an unusable mailbox is checked again."""
MAX_CREATED = 253_402_300_799
"""The end of the year 9999, after which no Date field can be written."""

# Every other value means normal, because the application's table may have such a column for other reasons.
_PRIORITIES = {each.value: each for each in Priority}
_OK = HEAD_COLUMNS
_PEOPLE = slice(HEAD_COLUMNS + 1, HEAD_COLUMNS + 1 + len(PEOPLE))
_SMALL = HEAD_COLUMNS + 1 + len(PEOPLE)


class RecipientProgress(msgspec.Struct, frozen=True, omit_defaults=True):
    """The delivery progress of one recipient of an outbox row, as stored in the row. `done` is `sent` or
    `failed`; `text` is redacted.
    """

    done: str = ""
    attempts: Annotated[int, msgspec.Meta(ge=0)] = 0
    next: float = 0.0
    held: bool = False
    at: float = 0.0
    code: Annotated[int, msgspec.Meta(ge=0, le=599)] = 0
    detail: str = ""
    text: str = ""
    local: bool = False
    in_doubt: bool = False
    act: str = ""

    def last(self) -> Attempt | None:
        if self.code < 200:  # not an SMTP reply code
            return None
        reply = Reply(self.code, self.detail, self.text)
        return Attempt(self.at, reply, local=self.local, in_doubt=self.in_doubt)


_States = dict[str, RecipientProgress]


class RowWrite(NamedTuple):
    """The values to write to an outbox row after a change of its state. `delay` is the number of seconds
    until the next attempt; `None` means at once, or never again.
    """

    id: int
    token: str
    status: str
    attempts: int
    error_log: str | None
    state: str | None
    delay: float | None


def read_states(json: str | None) -> _States:
    """Parse the stored delivery progress of a row's recipients. Unreadable states were not written by a
    relay, so every recipient starts again. This repeats no outcome that a relay has stored.
    """
    try:
        return msgspec.json.decode(json, type=_States) if json else {}
    except (msgspec.MsgspecError, RecursionError):
        return {}


@dataclass(eq=False)
class Row:
    """An outbox row that this relay has claimed or read. `out` has the recipients that wait in this relay or
    are being attempted. `content` is set for small rows.
    """

    id: int
    token: str
    zone: str
    created: float
    attempts: int
    people: RowRecipients
    states: _States
    content: RowContent | None
    priority: Priority = Priority.NORMAL
    out: set[Mailbox] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.queue = queue_of(self.zone, self.priority)
        self.message_id = row_id(self.id)

    def state(self, recipient: Mailbox) -> RecipientProgress:
        return self.states.get(recipient) or RecipientProgress()

    def delivery(self, recipient: Mailbox, *, due: bool = False) -> Delivery:
        state = self.state(recipient)
        return Delivery(
            queue=self.queue,
            message_id=self.message_id,
            recipient=recipient,
            created=self.created,
            attempts=state.attempts,
            next_attempt=0.0 if due else state.next,
            held=state.held,
            last=state.last(),
            act=state.act,
        )

    def open(self) -> list[Delivery]:
        """Return the row's deliveries that have no final outcome yet, in recipient order."""
        return [self.delivery(each) for each in sorted(self.people.everybody) if not self.state(each).done]

    def take_due(self, now: float) -> list[Delivery]:
        """Select and return the deliveries to attempt now, at least one if any has no final outcome and is
        not held.
        """
        if not self.open():
            # The row was finished and was queued again. A recipient who has the message does not get it
            # twice.
            self.states = {each: state for each, state in self.states.items() if state.done == SENT}
        waiting = [each for each in self.open() if not each.held]
        due = [each for each in waiting if each.next_attempt <= now + SOON]
        if not due and waiting:
            # The row is due although no recipient is, so an operator has set next_retry_at.
            due = waiting
        self.out = {each.recipient for each in due}
        return [self.delivery(each.recipient, due=True) for each in due]

    def envelope(self) -> Envelope:
        people = self.people
        return Envelope(
            id=self.message_id,
            sender=people.sender,
            recipients=tuple(Recipient(address=each) for each in people.everybody),
            created=self.created,
            smtputf8=not "".join((people.author.mailbox, people.sender, *people.everybody)).isascii(),
            origin=Origin(protocol=OUTBOX),
        )

    # --- outcomes

    def finish(self, delivery: Delivery, failure: Outcome | None, now: float, redact: Redactor) -> None:
        attempts = delivery.attempts + (1 if failure is None or failure.counts else 0)
        if failure is None:
            state = RecipientProgress(done=SENT, at=now)
        else:
            state = replace(_with_reply(failure.attempt(now), redact, delivery.recipient), done=FAILED)
        self._settle(delivery.recipient, state, attempts)

    def postpone(self, delivery: Delivery, redact: Redactor) -> None:
        state = replace(
            _with_reply(delivery.last, redact, delivery.recipient),
            next=max(delivery.next_attempt, 0.0),
            held=delivery.held,
            act=delivery.act,
        )
        self._settle(delivery.recipient, state, delivery.attempts)

    def _settle(self, recipient: Mailbox, state: RecipientProgress, attempts: int) -> None:
        self.states[recipient] = replace(state, attempts=attempts)
        self.attempts = max(self.attempts, attempts)
        self.out.discard(recipient)

    # --- stored values

    def write(self, now: float, redact: Redactor) -> RowWrite:
        states = {each: self.state(each) for each in self.people.everybody}
        waiting = [state for state in states.values() if not state.done]
        error_log = _error_log(states, redact) or None
        delay: float | None = None
        if self.out:
            status = PROCESSING
        elif waiting:
            status = QUEUED
            first = min(FOREVER if state.held else state.next for state in waiting)
            delay = FOREVER if first == FOREVER else max(first - now, 0.0) if first else None
        else:
            status = FAILED if any(state.done == FAILED for state in states.values()) else SENT
        if status == SENT:
            error_log = None
        state = None if status == SENT else msgspec.json.encode(self.states).decode()
        # The owner of the table may have written any number. One that is too large could never be stored.
        attempts = min(max(self.attempts, 0), MAX_ATTEMPTS)
        if delay is not None and delay != FOREVER:
            delay = min(delay, MAX_DELAY)
        return RowWrite(self.id, self.token, status, attempts, error_log, state, delay)


def read_row(columns: Columns, default_zone: str) -> Row:
    """Create a `Row` from the columns that the query for claims has returned. Raises BadRowError."""
    if not columns[_OK]:
        raise BadRowError(f"the address columns exceed {MAX_PEOPLE} bytes")
    created = -1 if columns[5] is None else columns[5]
    if not 0 <= columns[0] <= MAX_ROW or not 0 <= created <= MAX_CREATED:
        raise BadRowError("id is negative or larger than 2^60, or created_at is missing or out of range")
    people = recipients_of(dict(zip(PEOPLE, columns[_PEOPLE], strict=True)))
    is_small = len(columns) > _SMALL and columns[_SMALL]
    return Row(
        columns[0],
        columns[1] or "",
        zone=mailbox_zone(columns[3]) if columns[3] is not None else columns[2] or default_zone,
        priority=_PRIORITIES.get(columns[7], Priority.NORMAL),
        created=created,
        attempts=columns[4],
        people=people,
        states=read_states(columns[6]),
        content=RowContent(*columns[_SMALL + 1 :]) if is_small else None,
    )


def put_off(columns: Columns, problem: str) -> RowWrite:
    """Return the write that queues an unusable row again for a later attempt, with the problem as its
    error.
    """
    return RowWrite(columns[0], columns[1], QUEUED, columns[4], problem, columns[6], PUT_OFF)


def keys_of(row: Row) -> Iterable[DeliveryKey]:
    return (DeliveryKey(row.queue, row.message_id, each) for each in row.out)


def _with_reply(attempt: Attempt | None, redact: Redactor, recipient: Mailbox) -> RecipientProgress:
    if attempt is None:
        return RecipientProgress()
    reply = attempt.reply
    return RecipientProgress(
        at=attempt.at,
        code=reply.code,
        detail=reply.detail,
        text=redact.about(reply.text, recipient),
        local=attempt.local,
        in_doubt=attempt.in_doubt,
    )


def _error_log(states: dict[Mailbox, RecipientProgress], redact: Redactor) -> str:
    failed = [(at, each, state) for at, (each, state) in enumerate(states.items(), 1) if state.code]
    lines = [
        f"{redact.mailbox(each)} (recipient {at} of {len(states)}) {state.done or 'waits'}"
        f" after {state.attempts} attempts:"
        f" {state.code} {state.detail and f'{state.code // 100}.{state.detail} '}{state.text}"
        for at, each, state in failed[:MAX_LINES]
    ]
    if len(failed) > MAX_LINES:
        lines.append(f"and {len(failed) - MAX_LINES} more")
    return redact.stored("\n".join(lines))
