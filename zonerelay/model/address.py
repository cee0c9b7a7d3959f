"""Parses and formats mailboxes of an envelope.

A `Mailbox` is text that has passed the RFC 5321 path parser in `zonerelay.smtp.server.params`
(`local@domain`, the local part in the form the client sent it, quotes included).
Nothing else may build one, so no other module checks one again. The null reverse-path is
`NULL_SENDER`, the empty string: RFC 5321 4.5.5 writes it `<>`, which `path()` restores.
"""

from __future__ import annotations

from typing import NewType

Mailbox = NewType("Mailbox", str)

NULL_SENDER = Mailbox("")


def local_part(mailbox: Mailbox) -> str:
    """Return everything before the last `@`; the whole text for a bare `postmaster`."""
    return mailbox.rpartition("@")[0] or mailbox


def domain_of(mailbox: Mailbox) -> str:
    """Return the part after the last `@` in lower case, as sent (U-label or A-label); `""` if there is none.

    The last `@` is the right one: RFC 5321 4.1.2 lets a quoted local part hold others.
    """
    at = mailbox.rfind("@")
    return "" if at < 0 else mailbox[at + 1 :].lower()


def path(mailbox: Mailbox) -> str:
    """Return the RFC 5321 path form, with angle brackets."""
    return f"<{mailbox}>"


def recipient_key(mailbox: Mailbox) -> str:
    """Return the mailbox with its domain in lower case: equal for spellings of the same mailbox."""
    local, at, domain = mailbox.rpartition("@")
    return f"{local}{at}{domain.lower()}"
