"""Writes the commands of one transaction: MAIL with the parameters that the peer supports, DSN included, the
RCPTs, DATA.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from zonerelay.model.address import Mailbox
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Body, Envelope, Message, Notify
from zonerelay.smtp.client.extensions import Capabilities
from zonerelay.smtp.server.params import MAX_ORCPT

# Writes the DSN parameters of a message for a server with DSN (RFC 3461 5.2.1, RFC 6533 3). No I/O.
#
# Policy:
#
# - ENVID, RET and NOTIFY are passed on when the client gave them, and never otherwise.
# - ORCPT is passed on as it was given, in the client's case. A recipient with NOTIFY but without ORCPT gets
#   one made of its address (5.2.1 d), so that a later report names the recipient that the sender knows.
# - An ORCPT of type utf-8 stays unchanged in a transaction with SMTPUTF8. Elsewhere characters beyond ASCII
#   become `\x{HEX}`, RFC 6533's form for servers without SMTPUTF8.
#
# The parameters were checked when they arrived (`smtp/server/params.py`), so no value here can end a line.

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


DATA = b"DATA\r\n"

_NEXT_RCPT = ">\r\nRCPT TO:<"


def script(message: Message, deliveries: Sequence[Delivery], capabilities: Capabilities) -> bytes:
    """Returns MAIL, the RCPTs and DATA, a line each. Raises ValueError for a line break in an address.

    Mailboxes and DSN parameters were parsed when they arrived. Line breaks are checked once more, because one
    would be a command of a stranger's choice.
    """
    envelope = message.envelope
    sender, rcpts = envelope.sender, _NEXT_RCPT.join([each.recipient for each in deliveries]) + ">"
    few = capabilities.few_parameters
    parameters = f" SIZE={message.size}" if capabilities.size_offered and not few else ""
    if capabilities.eight_bit_mime and (message.eight_bit or (envelope.body is Body.EIGHT_BIT and not few)):
        parameters += " BODY=8BITMIME"
    declared = needs_smtputf8(message) if few else envelope.smtputf8
    smtputf8 = capabilities.smtputf8 and (declared or not (sender.isascii() and rcpts.isascii()))
    if smtputf8:
        parameters += " SMTPUTF8"
    if envelope.require_tls and capabilities.require_tls:
        parameters += " REQUIRETLS"
    if capabilities.dsn and not few:
        if envelope.ret or envelope.envid:
            parameters += mail_parameters(envelope)
        for each in deliveries:
            if each.notify or each.orcpt:
                rcpts = _with_wishes(deliveries, smtputf8=smtputf8)
                break
    commands = f"MAIL FROM:<{sender}>{parameters}\r\nRCPT TO:<{rcpts}\r\nDATA\r\n".encode()
    lines = len(deliveries) + 2
    if commands.count(b"\r") != lines or commands.count(b"\n") != lines:
        raise ValueError("an envelope address holds a line break")
    return commands


def dispensable(
    message: Message, deliveries: Sequence[Delivery], capabilities: Capabilities, command: int
) -> bool:
    """True when the command at this position (0 is MAIL) has parameters that the message can do without."""
    if capabilities.few_parameters:
        return False
    few = script(message, deliveries, replace(capabilities, few_parameters=True))
    whole = script(message, deliveries, capabilities)
    return few.split(b"\r\n")[command] != whole.split(b"\r\n")[command]


def needs_smtputf8(message: Message) -> bool:
    """True when the message needs SMTPUTF8 for any recipient (RFC 6531 3.6, RFC 6532 3.2).

    The sender is beyond ASCII, or a message that was declared so has UTF-8 in its header. Of a very long
    header only the fields that the message remembers are examined.
    """
    envelope = message.envelope
    if not envelope.sender.isascii():
        return True
    return envelope.smtputf8 and not all(name.isascii() and text.isascii() for name, text in message.headers)


def _with_wishes(deliveries: Sequence[Delivery], *, smtputf8: bool) -> str:
    """Returns every recipient with its DSN parameters, where there are any."""
    rcpts = [f"{each.recipient}>{rcpt_parameters(each, smtputf8=smtputf8)}" for each in deliveries]
    return "\r\nRCPT TO:<".join(rcpts)
