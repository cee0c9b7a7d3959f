"""The columns of a row that was read from the table, and what they make: a `Row`, or what is wrong with it.

What an application has written is a stranger's: BadRowError says in words what cannot be sent. Pure.
"""

from __future__ import annotations

from zonerelay.model.outbox import MAX_ROW, mailbox_zone
from zonerelay.model.priority import Priority
from zonerelay.outbox.compose.drafts import BadRowError, Content, recipients_of
from zonerelay.outbox.database.sql import HEAD_COLUMNS, MAX_PEOPLE, PEOPLE
from zonerelay.outbox.rows.mailboxes import Mailbox
from zonerelay.outbox.rows.rows import QUEUED, Row, Write, read_states
from zonerelay.store.postgres.driver import Columns

PUT_OFF = 300.0
"""Seconds until a row of a mailbox that cannot be used is looked at again."""
MAX_CREATED = 253_402_300_799
"""The end of the year 9999, beyond which no Date can be written."""

# What is none of these is normal: a table of the application's own may have such a column for other reasons.
_PRIORITIES = {each.value: each for each in Priority}
_OK = HEAD_COLUMNS
_PEOPLE = slice(HEAD_COLUMNS + 1, HEAD_COLUMNS + 1 + len(PEOPLE))
_SMALL = HEAD_COLUMNS + 1 + len(PEOPLE)


def read_row(columns: Columns, default_zone: str, mailbox: Mailbox | None) -> Row:
    """Raises BadRowError."""
    if not columns[_OK]:
        raise BadRowError(f"the addresses have more than {MAX_PEOPLE} octets")
    created = -1 if columns[5] is None else columns[5]
    if not 0 <= columns[0] <= MAX_ROW or not 0 <= created <= MAX_CREATED:
        raise BadRowError("id is negative or beyond 2^60, or created_at is missing, infinite or no such year")
    people = recipients_of(
        dict(zip(PEOPLE, columns[_PEOPLE], strict=True)), mailbox.from_address if mailbox else ""
    )
    content = None
    if len(columns) > _SMALL and columns[_SMALL]:
        content = Content(
            **dict(zip(("subject", "text", "html", "headers"), columns[_SMALL + 1 :], strict=True))
        )
    return Row(
        columns[0],
        columns[1] or "",
        zone=mailbox_zone(columns[3]) if columns[3] is not None else columns[2] or default_zone,
        priority=_PRIORITIES.get(columns[9], Priority.NORMAL),
        created=created,
        attempts=columns[4],
        people=people,
        states=read_states(columns[6]),
        content=content,
    )


def put_off(columns: Columns, problem: str) -> Write:
    """A row that waits until something else has been corrected."""
    return Write(columns[0], columns[1], QUEUED, columns[4], problem, columns[6], PUT_OFF)
