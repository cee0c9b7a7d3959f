"""Writes the commands of one transaction: MAIL with the parameters that the peer supports, the RCPTs,
DATA.
"""

from __future__ import annotations

from collections.abc import Sequence

from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Body, Message
from zonerelay.smtp.client.dsn import mail_parameters, rcpt_parameters
from zonerelay.smtp.client.extensions import Capabilities

DATA = b"DATA\r\n"

_NEXT_RCPT = ">\r\nRCPT TO:<"


def script(message: Message, deliveries: Sequence[Delivery], capabilities: Capabilities) -> bytes:
    """Returns MAIL, the RCPTs and DATA, a line each. Raises ValueError for a line break in an address.

    Mailboxes and DSN parameters were parsed when they arrived. Line breaks are checked once more, because one
    would be a command of a stranger's choice.
    """
    envelope = message.envelope
    sender, rcpts = envelope.sender, _NEXT_RCPT.join([each.recipient for each in deliveries]) + ">"
    parameters = f" SIZE={message.size}" if capabilities.size_offered else ""
    if capabilities.eight_bit_mime and (message.eight_bit or envelope.body is Body.EIGHT_BIT):
        parameters += " BODY=8BITMIME"
    smtputf8 = capabilities.smtputf8 and (envelope.smtputf8 or not (sender.isascii() and rcpts.isascii()))
    if smtputf8:
        parameters += " SMTPUTF8"
    if envelope.require_tls and capabilities.require_tls:
        parameters += " REQUIRETLS"
    if capabilities.dsn:
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


def _with_wishes(deliveries: Sequence[Delivery], *, smtputf8: bool) -> str:
    """Returns every recipient with its DSN parameters, where there are any."""
    rcpts = [f"{each.recipient}>{rcpt_parameters(each, smtputf8=smtputf8)}" for each in deliveries]
    return "\r\nRCPT TO:<".join(rcpts)
