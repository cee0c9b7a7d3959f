"""Answers one line of a client: reads the command and calls its function in `mail`, `ehlo` or `auth`. No I/O.

Policy, where the RFCs leave room:

- Input pipelined behind EHLO, HELO, AUTH or DATA ends the session with 554 5.5.0 (RFC 2920 3.1): their reply
  decides how the following bytes are to be read, and a client that did not wait for it may be a web page that
  was made to post here. Pipelined groups as the RFC allows them are answered in order. The session drops what
  is pipelined behind STARTTLS unread (RFC 3207 4.2).
- VRFY tells nothing but what a handler of aiosmtpd says to clients that may relay. EXPN and the TURN commands
  are not implemented.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zonerelay.inbound.policy.changes import Noop, Quit, Vrfy
from zonerelay.inbound.session import auth, ehlo, mail
from zonerelay.inbound.session.conversation import Conversation
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.replies import ServerReply, Then
from zonerelay.smtp.server.commands import HTTP_VERBS, LineFault, parse_command
from zonerelay.smtp.server.paths import CommandError

_SYNCHRONISING = frozenset({"EHLO", "HELO", "AUTH", "DATA"})
_NOT_OFFERED = frozenset({"EXPN", "ETRN", "TURN", "ATRN", "SEND", "SOML", "SAML", "BURL"})

Command = Callable[[Conversation, str], ServerReply]


def answer(conversation: Conversation, line: bytes | LineFault, *, more: bool) -> ServerReply:
    """Return the reply to a line; `more` says that further input is already there."""
    conversation.commands += 1
    if (
        isinstance(line, LineFault)
        or conversation.exchange is not None
        or conversation.commands > conversation.max_commands
    ):
        return _no_command(conversation, line)
    verb = ""
    try:
        verb, argument = parse_command(line)
        command = (_IN_CLEAR if conversation.in_clear else _COMMANDS).get(verb)
        if command is None:
            return _unknown(conversation, verb)
        if more and verb in _SYNCHRONISING:
            return conversation.refuse(replies.PIPELINED, verb)
        return command(conversation, argument)
    except CommandError as error:
        refusal = replies.bad_command(error.reply)
        if line[:4].upper() == b"BDAT":
            # The end of its octets is unknown, and they must not run as commands.
            refusal = replace(refusal, then=Then.CLOSE)
        return conversation.refuse(refusal, verb)


def _no_command(conversation: Conversation, line: bytes | LineFault) -> ServerReply:
    if conversation.commands > conversation.max_commands:
        return conversation.refuse(replies.TOO_MANY_COMMANDS)
    exchange, conversation.exchange = conversation.exchange, None
    if isinstance(line, LineFault):
        bare = line is LineFault.BARE_LF
        too_long = replies.LINE_TOO_LONG if exchange is None else replies.RESPONSE_TOO_LONG
        return conversation.refuse(replies.BARE_LF_COMMAND if bare else too_long)
    assert exchange is not None
    return auth.respond(conversation, exchange, line)


def _unknown(conversation: Conversation, verb: str) -> ServerReply:
    if verb in HTTP_VERBS:
        return conversation.refuse(replies.NOT_SMTP)
    if verb in _NOT_OFFERED:
        return conversation.refuse(replies.NOT_OFFERED, verb)
    return conversation.refuse(replies.UNKNOWN)


def _noop(conversation: Conversation, argument: str) -> ServerReply:
    if Noop not in conversation.context.consultants.asked:
        return replies.OK
    event = Noop(client=conversation.client_state.info, argument=argument)
    return conversation.ask_handler(event, "NOOP", replies.OK)


def _vrfy(conversation: Conversation, argument: str) -> ServerReply:
    if not argument:
        return conversation.refuse(replies.NEEDS_ARGUMENT, "VRFY")
    client_state = conversation.client_state
    if Vrfy not in conversation.context.consultants.asked or not client_state.grants.may_relay:
        return replies.CANNOT_VERIFY
    event = Vrfy(client=client_state.info, address=argument.strip("<>"))
    return conversation.ask_handler(event, "VRFY", replies.CANNOT_VERIFY)


def _help(_: Conversation, argument: str) -> ServerReply:
    return replies.HELP


def _quit(conversation: Conversation, argument: str) -> ServerReply:
    if argument:
        return conversation.refuse(replies.NO_ARGUMENT, "QUIT")
    if Quit not in conversation.context.consultants.asked:
        return replies.BYE
    return conversation.ask_handler(Quit(client=conversation.client_state.info), "QUIT", replies.BYE)


_COMMANDS: dict[str, Command] = {
    "EHLO": ehlo.ehlo,
    "HELO": ehlo.helo,
    "STARTTLS": ehlo.starttls,
    "XCLIENT": ehlo.xclient,
    "AUTH": auth.auth,
    "MAIL": mail.mail,
    "RCPT": mail.rcpt,
    "DATA": mail.data,
    "BDAT": mail.bdat,
    "RSET": mail.rset,
    "NOOP": _noop,
    "VRFY": _vrfy,
    "HELP": _help,
    "QUIT": _quit,
}


def _tls_before(verb: str) -> Command:
    return lambda conversation, _: conversation.refuse(replies.TLS_FIRST, verb)


# RFC 3207 4: the commands that a server that insists on TLS still answers without it.
_IN_CLEAR = {
    **{verb: _tls_before(verb) for verb in _COMMANDS},
    **{verb: _COMMANDS[verb] for verb in ("EHLO", "HELO", "STARTTLS", "BDAT", "NOOP", "RSET", "QUIT")},
}
