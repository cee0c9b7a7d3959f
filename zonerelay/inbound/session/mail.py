"""The commands of a mail transaction: MAIL, RCPT, DATA, BDAT, RSET (RFC 5321 4.1.1, RFC 3030).

They say what may come when; `cleanup/envelope` checks sender and recipients.

Policy, where the RFCs leave room:

- MAIL needs EHLO or HELO first. A client that has to log in for anything is refused at MAIL.
- Wishes for reports are refused (555) where DSN is not offered, and have no effect where it is offered
  because the client may still log in.
- The octets of a refused BDAT are read and dropped before it is answered, and its transaction is over: what a
  client pipelines behind it must not run as commands. A BDAT without a readable size ends the session,
  because the end of its octets is unknown.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from zonerelay.inbound.cleanup import envelope
from zonerelay.inbound.policy.changes import Rset
from zonerelay.inbound.refusal import Reason
from zonerelay.inbound.session.conversation import Conversation
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.replies import ServerReply, Then, refused
from zonerelay.model.address import recipient_key
from zonerelay.model.envelope import Recipient
from zonerelay.smtp.server.line_ends import parse_bdat
from zonerelay.smtp.server.params import parse_mail, parse_rcpt
from zonerelay.smtp.server.paths import CommandError

REMEMBERED = 1024  # paths with parameters: the same come again and again. Not whole lines: AUTH's are secret

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
    return envelope.begin(conversation, _parse_mail(argument, offered=client_state.grants.mail_parameters))


def rcpt(conversation: Conversation, argument: str) -> ServerReply:
    transaction = conversation.transaction
    if transaction is None:
        return conversation.refuse(replies.MAIL_FIRST, "RCPT")
    if transaction.chunked:
        return conversation.refuse(replies.IN_CHUNKS, "RCPT")
    grants = conversation.client_state.grants
    key, recipient = _parse_rcpt(argument, transaction.mail.smtputf8, grants.rcpt_parameters)
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
        return conversation.refuse(refused(error.reply, Reason.SYNTAX, Then.CLOSE), "BDAT")
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
        return conversation.refuse(replace(answer, then=Then.CLOSE), "BDAT")
    answer = conversation.refuse(answer, "BDAT")
    return (
        answer
        if answer.then is Then.CLOSE
        else replace(answer, wire=b"", later=answer.wire, then=Then.DISCARD)
    )


def rset(conversation: Conversation, argument: str) -> ServerReply:
    if argument:
        return conversation.refuse(replies.NO_ARGUMENT, "RSET")
    conversation.reset()
    if Rset not in conversation.context.consultants.asked:
        return replies.OK
    return conversation.ask_handler(Rset(client=conversation.client_state.info), "RSET", replies.OK)
