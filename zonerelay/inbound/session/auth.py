"""AUTH (RFC 4954). The passwords are checked elsewhere; here are its rules in the conversation.

Refused without TLS unless the listener says otherwise in words. Failed attempts are counted per connection
here, and per client where the passwords are checked. A wrong name and a wrong password get the same
answer. A check that could not be made is 454, never 535: a client gives up for good on that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zonerelay.config.settings import ListenerAuth
from zonerelay.inbound.access.auth import LoginKind
from zonerelay.inbound.policy.api import Auth
from zonerelay.inbound.state import replies as answers
from zonerelay.inbound.state.questions import LogIn, Verdict
from zonerelay.inbound.state.replies import Answer
from zonerelay.model.reply import Reply
from zonerelay.smtp.server.paths import CommandError
from zonerelay.smtp.server.sasl import SaslExchange, parse_auth

AUTH_FAILED = 535  # RFC 4954 6

if TYPE_CHECKING:
    from zonerelay.inbound.session.commands import Dialog


def auth(dialog: Dialog, argument: str) -> Answer:
    standing = dialog.standing
    if not standing.grants.offers_auth:
        off = dialog.reception.settings.auth is ListenerAuth.OFF
        return dialog.refuse(answers.NOT_OFFERED if off else answers.AUTH_NEEDS_TLS, "AUTH")
    if not standing.helo:
        return dialog.refuse(answers.EHLO_FIRST, "AUTH")
    if standing.user is not None:
        return dialog.refuse(answers.AUTH_ALREADY, "AUTH")
    if dialog.transaction is not None:
        return dialog.refuse(answers.NOT_IN_TRANSACTION, "AUTH")
    mechanism, initial = parse_auth(argument)
    exchange = SaslExchange(mechanism)
    return _step(dialog, exchange, initial)


def respond(dialog: Dialog, exchange: SaslExchange, line: bytes) -> Answer:
    """The client's line in an exchange, which is over unless it gets another challenge."""
    try:
        return _step(dialog, exchange, line.decode("ascii", "replace"))
    except CommandError as error:
        return dialog.refuse(answers.bad_command(error.reply), "AUTH")


def _step(dialog: Dialog, exchange: SaslExchange, text: str | None) -> Answer:
    try:
        result = exchange.respond(text)
    except CommandError as error:
        if error.reply.code == AUTH_FAILED:
            return _failed(dialog)
        raise
    if isinstance(result, Reply):
        dialog.exchange = exchange
        return Answer(result, result.encode())
    question = LogIn(dialog.standing.info, exchange.mechanism, result)
    return dialog.ask(question, lambda verdict: _decided(dialog, verdict))


def _decided(dialog: Dialog, verdict: Verdict) -> Answer:
    login = verdict.login
    if login is None or login.kind is LoginKind.BROKEN:
        return dialog.refuse(answers.AUTH_TROUBLE, "AUTH", detail="" if login is None else login.detail)
    if login.kind is LoginKind.LOCKED:
        return dialog.refuse(answers.AUTH_LOCKED, "AUTH", detail=login.detail)
    if login.kind is not LoginKind.OK or login.user is None:
        return _failed(dialog)
    if verdict.decision.reply is not None:
        return dialog.refuse_by(verdict, "AUTH")
    dialog.keep_edits(Auth.step, verdict.decision)
    dialog.standing.logged_in(login.user)
    return answers.AUTH_OK


def _failed(dialog: Dialog) -> Answer:
    dialog.auth_failures += 1
    if dialog.auth_failures >= dialog.reception.settings.max_auth_failures:
        return dialog.refuse(answers.TOO_MANY_LOGINS, "AUTH")
    return dialog.refuse(answers.AUTH_FAILED, "AUTH")
