"""Value types for events, protocol lines and the steps of messages. Workers record them, and answers to
operators consist of them, so their field names are a public contract (`operations.answers`). It imports
nothing heavy, which would slow every command down.
"""

import msgspec


class MailEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="event"):
    """A mail event with the fields of its log line. Addresses are pseudonyms unless `[log] redact = false`,
    or unless the reader's scope is `operate` and the relay has them in memory. `worker` is set if there are
    several workers.
    """

    at: float
    event: str
    level: str = "info"
    fields: dict[str, str | int | float | bool | None] = {}
    worker: int | None = None


class TranscriptLine(msgspec.Struct, frozen=True, tag_field="kind", tag="line"):
    """One line of an SMTP session in a transcript, without its line end. `direction` is "received" or "sent",
    from the relay's point of view, or "note" for an entry that is not a protocol line: the size of a body, a
    handshake, omitted lines. Each worker counts its `session`s from 1. `side` is "inbound" or "outbound", and
    `peer` is the address of the other end.
    """

    at: float
    session: int
    side: str
    peer: str
    direction: str
    text: str
    worker: int | None = None


class TraceStep(msgspec.Struct, frozen=True, tag_field="kind", tag="step"):
    """One past or future step of a message, at the Unix time `at`. A `recipient` of "" means all
    recipients.
    """

    at: float
    event: str
    recipient: str = ""
    text: str = ""
