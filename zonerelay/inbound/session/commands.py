"""Answers one line of a client: parses the command and calls its function. No I/O.

Policy, where the RFCs leave a choice:

- Input that is pipelined after EHLO, HELO, AUTH or DATA ends the session with 554 5.5.0 (RFC 2920 3.1). The
  reply to these commands determines how the following bytes are read, and a client that did not wait for it
  may be a web page that was made to send a POST request here. Pipelined groups that the RFC allows are
  answered in order. Input that is pipelined after STARTTLS is discarded by the session (RFC 3207 4.2).
- VRFY reveals nothing, except a reply of an aiosmtpd handler to clients that may relay. EXPN and the TURN
  commands are not implemented.

Commands that identify a client: EHLO, HELO, STARTTLS, XCLIENT. EHLO and HELO may be repeated and reset the
transaction (RFC 5321 4.1.4). XCLIENT is accepted from listed peers only and makes the session that of another
client, whose permissions are then evaluated.

The AUTH command (RFC 4954): this module implements the protocol, and `access/auth` checks the passwords. AUTH
is refused without TLS unless the listener explicitly allows it. Failed attempts are counted per connection
here, and per client where the passwords are checked. A wrong name and a wrong password get the same reply. If
the check was not possible, the reply is 454 and never 535, because a client treats 535 as permanent.

Commands of a mail transaction: MAIL, RCPT, DATA, BDAT, RSET (RFC 5321 4.1.1, RFC 3030). This module enforces
their order; `cleanup/envelope` checks sender and recipients.

Policy for these, where the RFCs leave a choice:

- MAIL requires EHLO or HELO first. A client that must log in before anything else is refused at MAIL.
- DSN parameters are refused (555) where DSN is not offered. They have no effect where DSN is offered only
  because the client may still log in.
- The bytes of a refused BDAT are read and discarded before the reply, and its transaction ends, so that input
  that the client pipelined after it cannot run as commands. A BDAT with an unreadable size ends the session,
  because the end of its bytes is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from zonerelay.config.settings import ListenerAuth
from zonerelay.inbound.access.auth import LoginKind
from zonerelay.inbound.cleanup import envelope
from zonerelay.inbound.policy import Auth
from zonerelay.inbound.policy.api import Noop, Quit, Rset, Vrfy
from zonerelay.inbound.refusal import Reason
from zonerelay.inbound.session.conversation import Conversation
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.questions import LoginLookup, LookupResult
from zonerelay.inbound.state.replies import NextAction, ServerReply, refused
from zonerelay.model.address import recipient_key
from zonerelay.model.envelope import Recipient
from zonerelay.model.reply import Reply
from zonerelay.smtp.server.commands import HTTP_VERBS, LineFault, parse_command
from zonerelay.smtp.server.line_ends import parse_bdat
from zonerelay.smtp.server.params import by_the_grammar, parse_mail, parse_rcpt
from zonerelay.smtp.server.paths import CommandError
from zonerelay.smtp.server.proxy_protocol import parse_xclient
from zonerelay.smtp.server.sasl import SaslExchange, parse_auth

REMEMBERED = 1024  # paths with parameters, which repeat often; not whole lines, because AUTH is secret

_parse_mail = lru_cache(maxsize=REMEMBERED)(parse_mail)


@lru_cache(maxsize=REMEMBERED)
def _parse_rcpt(argument: str, smtputf8: bool, offered: frozenset[str]) -> tuple[str, Recipient]:
    """Return the key of a recipient (see `recipient_key`), and the recipient."""
    recipient = parse_rcpt(argument, smtputf8=smtputf8, offered=offered)
    return recipient_key(recipient.address), recipient


def mail(conversation: Conversation, argument: str) -> ServerReply:
    client_state = conversation.client_state
    if not client_state.helo:
        return conversation.refuse(replies.EHLO_FIRST, "MAIL")
    if conversation.transaction is not None:
        return conversation.refuse(replies.NESTED_MAIL, "MAIL")
    if client_state.grants.must_log_in:
        return conversation.refuse(replies.AUTH_FIRST, "MAIL")
    offered = client_state.grants.mail_parameters
    try:
        command = _parse_mail(argument, offered=offered)
    except CommandError:
        if not client_state.is_lenient:
            raise
        command = _parse_mail(by_the_grammar(argument), offered=offered)
    return envelope.begin(conversation, command)


def rcpt(conversation: Conversation, argument: str) -> ServerReply:
    transaction = conversation.transaction
    if transaction is None:
        return conversation.refuse(replies.MAIL_FIRST, "RCPT")
    if transaction.chunked:
        return conversation.refuse(replies.IN_CHUNKS, "RCPT")
    client_state, smtputf8 = conversation.client_state, transaction.mail.smtputf8
    offered = client_state.grants.rcpt_parameters
    try:
        key, recipient = _parse_rcpt(argument, smtputf8, offered)
    except CommandError:
        if not client_state.is_lenient:
            raise
        key, recipient = _parse_rcpt(by_the_grammar(argument), smtputf8, offered)
    return envelope.add(conversation, transaction, key, recipient)


def data(conversation: Conversation, argument: str) -> ServerReply:
    if argument:
        return conversation.refuse(replies.NO_ARGUMENT, "DATA")
    transaction = conversation.transaction
    if transaction is None:
        return conversation.refuse(replies.MAIL_FIRST, "DATA")
    if transaction.chunked:
        return conversation.refuse(replies.IN_CHUNKS, "DATA")
    if not transaction.recipients:
        return conversation.refuse(replies.NO_RECIPIENTS, "DATA")
    return replies.START_BODY


def bdat(conversation: Conversation, argument: str) -> ServerReply:
    try:
        size, last = parse_bdat(argument)
    except CommandError as error:
        return conversation.refuse(refused(error.reply, Reason.SYNTAX, NextAction.CLOSE), "BDAT")
    conversation.chunk = (size, last)
    if conversation.client_state.grants.must_start_tls:
        return _refused_chunk(conversation, replies.TLS_FIRST, size)
    transaction, limit = conversation.transaction, conversation.context.settings.max_message_size
    if transaction is None:
        return _refused_chunk(conversation, replies.MAIL_FIRST, size)
    if not transaction.recipients:
        return _refused_chunk(conversation, replies.NO_RECIPIENTS, size)
    transaction.octets += size
    if transaction.octets > limit:
        return _refused_chunk(conversation, replies.too_big(limit), size)
    transaction.chunked = True
    return replies.TAKE_CHUNK


def _refused_chunk(conversation: Conversation, answer: ServerReply, size: int) -> ServerReply:
    conversation.reset()
    if size > 2 * conversation.context.settings.max_message_size + replies.MAX_DRAINED:
        return conversation.refuse(replace(answer, then=NextAction.CLOSE), "BDAT")
    answer = conversation.refuse(answer, "BDAT")
    return (
        answer
        if answer.then is NextAction.CLOSE
        else replace(answer, wire=b"", later=answer.wire, then=NextAction.DISCARD)
    )


def rset(conversation: Conversation, argument: str) -> ServerReply:
    if argument:
        return conversation.refuse(replies.NO_ARGUMENT, "RSET")
    conversation.reset()
    if Rset not in conversation.context.consultants.asked:
        return replies.OK
    return conversation.ask_handler(Rset(client=conversation.client_state.info), "RSET", replies.OK)


AUTH_FAILED = 535  # RFC 4954 6


def auth(conversation: Conversation, argument: str) -> ServerReply:
    client_state = conversation.client_state
    if not client_state.grants.offers_auth:
        off = conversation.context.settings.auth is ListenerAuth.OFF
        return conversation.refuse(replies.NOT_OFFERED if off else replies.AUTH_NEEDS_TLS, "AUTH")
    if not client_state.helo:
        return conversation.refuse(replies.EHLO_FIRST, "AUTH")
    if client_state.user is not None:
        return conversation.refuse(replies.AUTH_ALREADY, "AUTH")
    if conversation.transaction is not None:
        return conversation.refuse(replies.NOT_IN_TRANSACTION, "AUTH")
    mechanism, initial = parse_auth(argument)
    exchange = SaslExchange(mechanism)
    return _step(conversation, exchange, initial)


def respond(conversation: Conversation, exchange: SaslExchange, line: bytes) -> ServerReply:
    """Return the reply to the client's line in an AUTH exchange."""
    try:
        return _step(conversation, exchange, line.decode("ascii", "replace"))
    except CommandError as error:
        return conversation.refuse(replies.bad_command(error.reply), "AUTH")


def _step(conversation: Conversation, exchange: SaslExchange, text: str | None) -> ServerReply:
    try:
        result = exchange.respond(text)
    except CommandError as error:
        if error.reply.code == AUTH_FAILED:
            return _failed(conversation)
        raise
    if isinstance(result, Reply):
        conversation.exchange = exchange
        return ServerReply(result, result.encode())
    question = LoginLookup(conversation.client_state.info, exchange.mechanism, result)
    return conversation.ask(question, lambda verdict: _decided(conversation, verdict))


def _decided(conversation: Conversation, verdict: LookupResult) -> ServerReply:
    login = verdict.login
    if login is None or (login.kind is LoginKind.BROKEN and login.refusal is None):
        return conversation.refuse(replies.AUTH_FAILURE, "AUTH", detail="" if login is None else login.detail)
    if login.refusal is not None:
        return conversation.refuse(replies.barred(login.refusal), "AUTH", detail=login.detail)
    if login.kind is LoginKind.LOCKED:
        return conversation.refuse(replies.AUTH_LOCKED, "AUTH", detail=login.detail)
    if login.kind is not LoginKind.OK or login.user is None:
        return _failed(conversation)
    if verdict.decision.reply is not None:
        return conversation.refuse_by(verdict, "AUTH")
    conversation.keep_edits(Auth.step, verdict.decision)
    conversation.client_state.logged_in(login.user)
    return replies.AUTH_OK


def _failed(conversation: Conversation) -> ServerReply:
    conversation.auth_failures += 1
    if conversation.auth_failures >= conversation.context.settings.max_auth_failures:
        return conversation.refuse(replies.TOO_MANY_LOGINS, "AUTH")
    return conversation.refuse(replies.AUTH_FAILED, "AUTH")


def ehlo(conversation: Conversation, argument: str) -> ServerReply:
    return _hello(conversation, "EHLO", argument)


def helo(conversation: Conversation, argument: str) -> ServerReply:
    return _hello(conversation, "HELO", argument)


def _hello(conversation: Conversation, verb: str, name: str) -> ServerReply:
    if not name:
        return conversation.refuse(replies.NEEDS_ARGUMENT, verb)
    conversation.reset()
    return conversation.hello(name, extended=verb == "EHLO")


def starttls(conversation: Conversation, argument: str) -> ServerReply:
    if argument:
        return conversation.refuse(replies.NO_ARGUMENT, "STARTTLS")
    if conversation.client_state.tls is not None:
        return conversation.refuse(replies.TLS_ALREADY, "STARTTLS")
    if not conversation.client_state.grants.offers_starttls:
        return conversation.refuse(replies.NOT_OFFERED, "STARTTLS")
    conversation.reset()
    return replies.START_TLS


def xclient(conversation: Conversation, argument: str) -> ServerReply:
    if not conversation.client_state.client.may_xclient:
        return conversation.refuse(replies.NOT_OFFERED, "XCLIENT")
    if conversation.transaction is not None:
        return conversation.refuse(replies.NOT_IN_TRANSACTION, "XCLIENT")
    conversation.xclient = parse_xclient(argument)
    return replies.READMIT


_SYNCHRONISING = frozenset({"EHLO", "HELO", "AUTH", "DATA"})
_NOT_OFFERED = frozenset({"EXPN", "ETRN", "TURN", "ATRN", "SEND", "SOML", "SAML", "BURL"})

Command = Callable[[Conversation, str], ServerReply]


def answer(conversation: Conversation, line: bytes | LineFault, *, more: bool) -> ServerReply:
    """Return the reply to a line. `more` is true if further input has already arrived."""
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
            # The end of its bytes is unknown, and they must not run as commands.
            refusal = replace(refusal, then=NextAction.CLOSE)
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
    return respond(conversation, exchange, line)


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
    "EHLO": ehlo,
    "HELO": helo,
    "STARTTLS": starttls,
    "XCLIENT": xclient,
    "AUTH": auth,
    "MAIL": mail,
    "RCPT": rcpt,
    "DATA": data,
    "BDAT": bdat,
    "RSET": rset,
    "NOOP": _noop,
    "VRFY": _vrfy,
    "HELP": _help,
    "QUIT": _quit,
}


def _tls_before(verb: str) -> Command:
    return lambda conversation, _: conversation.refuse(replies.TLS_FIRST, verb)


# RFC 3207 4: the commands that a server that requires TLS still answers without it.
_IN_CLEAR = {
    **{verb: _tls_before(verb) for verb in _COMMANDS},
    **{verb: _COMMANDS[verb] for verb in ("EHLO", "HELO", "STARTTLS", "BDAT", "NOOP", "RSET", "QUIT")},
}
