"""The settings of the outbox: [outbox]. Import them from `models`."""

from __future__ import annotations

from dataclasses import dataclass

from zonerelay.config.options.options import MB, MINUTE, Form, count, duration, size, switch, text, texts


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxSettings:
    """[outbox]: a second way in, where `url` is given."""

    url: str = text(
        "",
        "The database whose rows are sent as mail (docs/outbox.md), written as in [postgres]. Empty: none. "
        "No password here.",
    )
    password: str = text(
        "",
        "Where the password is: a file, env:NAME or credential:NAME. Empty: none is needed.",
        form=Form.SECRET,
    )
    schema: str = text("public", "The schema of the tables.")
    table: str = text(
        "outbound_messages", "The table that applications insert into. Relays with the same share its rows."
    )
    mailbox_table: str = text("mailboxes", "The table of mailboxes that rows may name.")
    create_tables: bool = switch(
        False,
        "Make the tables where there are none. Otherwise zonerelay outbox schema prints what makes them.",
    )
    zone: str = text(
        "default", "The zone of rows that name neither a zone nor a mailbox.", form=Form.ZONE_NAME
    )
    keys: tuple[str, ...] = texts(
        (),
        "Where the keys are that open smtp_password_encrypted: files, env:NAME or credential:NAME. The first "
        "one seals; each is tried to open.",
        form=Form.SECRETS,
    )
    poll_interval: float = duration(
        10.0,
        "How often to look for rows that nobody has told of. Inserts are told at once.",
        least=0.1,
        most=10 * MINUTE,
    )
    lease: float = duration(
        15 * MINUTE,
        "How long a relay may be silent before others give its rows back to the queue. It may still be "
        "sending them, so this should be longer than any transaction: [delivery] final_dot_timeout alone is "
        "10 minutes.",
        least=1.0,
    )
    max_attempts: int = count(
        10, "Failed attempts of a recipient after which a row fails; n² minutes follow the n-th.", most=1000
    )
    max_message_size: int = size(25 * MB, "Rows whose message is larger fail.")
