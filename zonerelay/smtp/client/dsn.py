"""Writes the DSN parameters of a message for a server with DSN (RFC 3461 5.2.1, RFC 6533 3). No I/O.

Policy:

- ENVID, RET and NOTIFY are passed on when the client gave them, and never otherwise.
- ORCPT is passed on as it was given, in the client's case. A recipient with NOTIFY but without ORCPT gets one
  made of its address (5.2.1 d), so that a later report names the recipient that the sender knows.
- An ORCPT of type utf-8 stays unchanged in a transaction with SMTPUTF8. Elsewhere characters beyond ASCII
  become `\\x{HEX}`, RFC 6533's form for servers without SMTPUTF8.

The parameters were checked when they arrived (`smtp/server/dsn.py`), so no value here can end a line.
"""

from __future__ import annotations

import re

from zonerelay.model.address import Mailbox
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Envelope, Notify
from zonerelay.smtp.server.dsn import MAX_ORCPT

_NOT_XTEXT = re.compile(r"[^!-*,-<>-~]")
_NOT_UTF8_XTEXT = re.compile(r"[^!-*,-<>-\[\]-~]")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")


def _words(notify: Notify) -> str:
    if notify & Notify.NEVER:
        return "NEVER"
    # The order of RFC 3461 4.1's examples; it carries no meaning.
    wanted = [name for name in ("SUCCESS", "FAILURE", "DELAY") if notify & Notify[name]]
    return ",".join(wanted)


_NOTIFY = tuple(_words(Notify(value)) for value in range(16))


def mail_parameters(envelope: Envelope) -> str:
    """Returns RET and ENVID, each with a space in front."""
    ret = f" RET={envelope.ret}" if envelope.ret else ""
    return f"{ret} ENVID={envelope.envid}" if envelope.envid else ret


def rcpt_parameters(delivery: Delivery, *, smtputf8: bool) -> str:
    """Returns NOTIFY and ORCPT, each with a space in front. `smtputf8`: MAIL has that parameter."""
    notify = f" NOTIFY={_NOTIFY[delivery.notify]}" if delivery.notify else ""
    orcpt = delivery.orcpt
    if not orcpt and notify:
        orcpt = original_recipient(delivery.recipient)
    if not smtputf8 and not orcpt.isascii():
        orcpt = _NOT_ASCII.sub(_embedded, orcpt)
    return f"{notify} ORCPT={orcpt}" if orcpt else notify


def original_recipient(recipient: Mailbox) -> str:
    """Returns an ORCPT value for an address, `""` when it would be too long for one."""
    if recipient.isascii():
        value = "rfc822;" + _NOT_XTEXT.sub(_xtext, recipient)
    else:
        value = "utf-8;" + _NOT_UTF8_XTEXT.sub(_embedded, recipient)
    return value if len(value) <= MAX_ORCPT else ""


def _xtext(match: re.Match[str]) -> str:
    return f"+{ord(match[0]):02X}"


def _embedded(match: re.Match[str]) -> str:
    return f"\\x{{{ord(match[0]):02X}}}"
