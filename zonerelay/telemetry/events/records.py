"""Defines events, protocol lines and steps of messages as values. Workers record them, and answers to
operators consist of them, so their field names are a public contract (`operations.answers`). It imports
nothing heavy, which would slow every command down.
"""

import msgspec


class MailEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="event"):
    """An event, with the fields of its log line: addresses are pseudonyms unless `[log] redact = false`,
    or unless the scope is `operate` and the relay has them in memory. `worker` is set if there are several.
    """

    at: float
    event: str
    level: str = "info"
    fields: dict[str, str | int | float | bool | None] = {}
    worker: int | None = None


class TranscriptLine(msgspec.Struct, frozen=True, tag_field="kind", tag="line"):
    """A line of a session, without its line end. `direction` is "received" or "sent", from the relay's point
    of view, or "note" for an entry that is not a protocol line: the size of a body, a handshake, omitted
    lines. Each worker counts its `session`s from 1. `side` is "inbound" or "outbound", and `peer` is the
    address of the other end.
    """

    at: float
    session: int
    side: str
    peer: str
    direction: str
    text: str
    worker: int | None = None


class TraceStep(msgspec.Struct, frozen=True, tag_field="kind", tag="step"):
    """One thing that has happened or is going to happen, at the Unix time `at`. A `recipient` of "" means all
    of them.
    """

    at: float
    event: str
    recipient: str = ""
    text: str = ""
