"""Writes the fields that the relay puts in front of a message: Received, Date and Message-ID.

Received is RFC 5321 4.4; Date and Message-ID are added when they are missing (RFC 6409 8). What the client
said about itself becomes text in our own field, so every character outside a domain or an address literal
becomes `?` and can neither end the field nor open a comment. The recipient is named only when there is
exactly one: otherwise a blind copy would show (RFC 5321 7.2).
"""

from __future__ import annotations

import re
import time
from functools import lru_cache

from zonerelay.message.header.headers import Header
from zonerelay.model.address import path
from zonerelay.model.envelope import Envelope

_MAX_HELO = 255
_NOT_IN_NAME = re.compile(r"[^A-Za-z0-9.:_\[\]-]")
_NOT_IN_UTF8_NAME = re.compile(r"[^\w.:\[\]-]")
_DAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_MONTHS = ("", "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


def trace_fields(envelope: Envelope, header: Header, *, hostname: str, hide_client: bool = False) -> bytes:
    """Returns everything that goes before the message as it came, `header.lead` included."""
    date = rfc5322_date(envelope.created)
    fields = received(envelope, date, hostname=hostname, hide_client=hide_client)
    if "date" not in header.names:
        fields += f"Date: {date}\r\n"
    if "message-id" not in header.names:
        fields += f"Message-ID: <{envelope.id}@{hostname}>\r\n"
    return fields.encode() + header.lead


def received(envelope: Envelope, date: str, *, hostname: str, hide_client: bool = False) -> str:
    origin = envelope.origin
    recipients = envelope.recipients
    if hide_client:
        # The grammar demands a from clause; this one hides the client.
        client = "localhost (client hidden)"
    else:
        client = _from_client(origin.helo, origin.client_address, envelope.smtputf8)
    protocol = f"{origin.protocol} ({origin.tls})" if origin.tls else origin.protocol
    only_for = f"\r\n\tfor {path(recipients[0].address)}" if len(recipients) == 1 else ""
    return (
        f"Received: from {client}\r\n"
        f"\tby {hostname} with {protocol} id {envelope.id}{only_for};\r\n\t{date}\r\n"
    )


def rfc5322_date(timestamp: float) -> str:
    """Returns `Mon, 20 Nov 2023 17:53:01 +0000`, in any locale."""
    return _date(int(timestamp))


@lru_cache(maxsize=16)
def _date(timestamp: int) -> str:
    year, month, day, hour, minute, second, weekday, _, _ = time.gmtime(timestamp)
    return f"{_DAYS[weekday]}, {day:02} {_MONTHS[month]} {year} {hour:02}:{minute:02}:{second:02} +0000"


@lru_cache(maxsize=256)
def _from_client(helo: str, address: str, utf8: bool) -> str:
    """Returns the Extended-Domain with TCP-info of RFC 5321 4.4. A client on a Unix socket has no address."""
    name = (_NOT_IN_UTF8_NAME if utf8 else _NOT_IN_NAME).sub("?", helo[:_MAX_HELO])
    if not address:
        return f"{name} (local)"
    return f"{name} ([IPv6:{address}])" if ":" in address else f"{name} ([{address}])"
