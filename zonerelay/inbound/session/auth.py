"""The AUTH command (RFC 4954): its rules in the session. `access/auth` checks the passwords.

Refused without TLS unless the listener says otherwise in words. Failed attempts are counted per connection
here, and per client where the passwords are checked. A wrong name and a wrong password get the same reply. A
check that could not be made is answered 454, never 535, which makes a client give up for good.
"""

from __future__ import annotations

from zonerelay.config.settings import ListenerAuth
from zonerelay.inbound.access.auth import LoginKind
from zonerelay.inbound.policy import Auth
from zonerelay.inbound.session.conversation import Conversation
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.questions import LogIn, Verdict
from zonerelay.inbound.state.replies import ServerReply
from zonerelay.model.reply import Reply
from zonerelay.smtp.server.paths import CommandError
from zonerelay.smtp.server.sasl import SaslExchange, parse_auth

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
    """The client's line in an exchange, which is over unless it gets another challenge."""
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
    question = LogIn(conversation.client_state.info, exchange.mechanism, result)
    return conversation.ask(question, lambda verdict: _decided(conversation, verdict))


def _decided(conversation: Conversation, verdict: Verdict) -> ServerReply:
    login = verdict.login
    if login is None or (login.kind is LoginKind.BROKEN and login.refusal is None):
        return conversation.refuse(replies.AUTH_TROUBLE, "AUTH", detail="" if login is None else login.detail)
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
