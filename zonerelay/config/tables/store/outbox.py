"""[outbox]: the database whose rows are sent as mail.

No URL is in a text of this module: there might be a password in it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from zonerelay.config.options import forms
from zonerelay.config.options.options import (
    MB,
    MINUTE,
    count,
    duration,
    options_of,
    size,
    switch,
    text,
    texts,
)
from zonerelay.config.problems import Report
from zonerelay.config.tables.outbound.delivery import DeliverySettings
from zonerelay.config.tables.outbound.zone import ZoneSettings
from zonerelay.config.tables.store.postgres import is_in_the_open, url_problem
from zonerelay.config.wording import did_you_mean, quoted

_NAME = re.compile("[A-Za-z_][A-Za-z0-9_]{0,39}")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxSettings:
    """[outbox]: a second way in, where `url` is given."""

    url: str = text("")
    """The database whose rows are sent as mail (docs/outbox.md), written as in [postgres]. Empty: none. No
    password here.
    """
    password: str = text("", form=forms.secret)
    """Where the password is: a file, env:NAME or credential:NAME. Empty: none is needed."""
    schema: str = text("public")
    """The schema of the tables."""
    table: str = text("outbound_messages")
    """The table that applications insert into. Relays with the same share its rows."""
    mailbox_table: str = text("mailboxes")
    """The table of mailboxes that rows may name."""
    create_tables: bool = switch(False)
    """Make the tables where there are none. Otherwise zonerelay outbox schema prints what makes them."""
    zone: str = text("default", form=forms.zone_name)
    """The zone of rows that name neither a zone nor a mailbox."""
    keys: tuple[str, ...] = texts((), form=forms.secret)
    """Where the keys are that open smtp_password_encrypted: files, env:NAME or credential:NAME. The first one
    seals; each is tried to open.
    """
    poll_interval: float = duration(10.0, least=0.1, most=10 * MINUTE)
    """How often to look for rows that no notification has announced. Inserts are announced at once."""
    lease: float = duration(15 * MINUTE, least=1.0)
    """How long a relay may be silent before others give its rows back to the queue. It may still be sending
    them, so this should be longer than any transaction: [delivery] final_dot_timeout alone is 10 minutes.
    """
    max_attempts: int = count(10, most=1000)
    """Failed attempts of a recipient after which a row fails; n² minutes follow the n-th."""
    max_message_size: int = size(25 * MB)
    """Rows whose message is larger fail."""


def check_outbox(outbox: OutboxSettings, zones: Sequence[ZoneSettings], report: Report) -> None:
    if not report.sound("outbox"):
        return
    if not outbox.url:
        others = (key for key in options_of(OutboxSettings) if report.given("outbox", key))
        if not report.given("outbox", "url") and any(others):
            report.refuse(("outbox", "url"), 'is missing: write "postgresql://USER@HOST:5432/DATABASE"')
        return
    if problem := url_problem(outbox.url, "outbox.password"):
        report.refuse(("outbox", "url"), problem)
    for key in ("schema", "table", "mailbox_table"):
        if not _NAME.fullmatch(getattr(outbox, key)):
            report.refuse(("outbox", key), "is a name of letters, digits and _, 40 at most")
    if outbox.table == outbox.mailbox_table:
        report.refuse(("outbox", "mailbox_table"), "is the table of messages already")
    names = [zone.name for zone in zones]
    if outbox.zone not in names and all(report.sound("zone", at, "name") for at in range(len(names))):
        near = did_you_mean(outbox.zone, names)
        report.refuse(("outbox", "zone"), f"no zone is named {quoted(outbox.zone)}{near}")


def outbox_advice(outbox: OutboxSettings, delivery: DeliverySettings) -> list[str]:
    if not outbox.url:
        return []
    found = []
    if outbox.lease <= delivery.final_dot_timeout:
        found.append(
            "outbox.lease: not longer than delivery.final_dot_timeout: a message may be sent a second time "
            "while a relay that is cut off from the database still sends it"
        )
    if is_in_the_open(outbox.url):
        found.append(
            "outbox.url: mail goes over the network from any server that answers there: add "
            "?sslmode=verify-full"
        )
    return found
