"""Writes the commands of one transaction: MAIL with the parameters that the peer supports, the RCPTs,
DATA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
