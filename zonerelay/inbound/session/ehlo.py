"""The commands by which a client says who it is: EHLO, HELO, STARTTLS, XCLIENT.

EHLO and HELO may come again and reset the transaction (RFC 5321 4.1.4). XCLIENT, from listed peers only,
makes the session that of another client; what that client may do is decided anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zonerelay.inbound.policy.api import Helo
from zonerelay.inbound.state import replies as answers
from zonerelay.inbound.state.questions import Verdict
from zonerelay.inbound.state.replies import Answer
from zonerelay.smtp.server.xclient import parse_xclient

if TYPE_CHECKING:
    from zonerelay.inbound.session.commands import Dialog

MAX_HELO = 255


def ehlo(dialog: Dialog, argument: str) -> Answer:
    return _hello(dialog, "EHLO", argument)


def helo(dialog: Dialog, argument: str) -> Answer:
    return _hello(dialog, "HELO", argument)


def _hello(dialog: Dialog, verb: str, name: str) -> Answer:
    if not name:
        return dialog.refuse(answers.NEEDS_ARGUMENT, verb)
    dialog.reset()
    if Helo not in dialog.reception.consultants.asked:
        return _welcome(dialog, verb, name)

    def decided(verdict: Verdict) -> Answer:
        if verdict.decision.reply is not None:
            return dialog.refuse_by(verdict, verb)
        dialog.keep_edits(Helo.step, verdict.decision)
        return _welcome(dialog, verb, name)

    return dialog.ask(Helo(client=dialog.standing.info, name=name[:MAX_HELO]), decided)


def _welcome(dialog: Dialog, verb: str, name: str) -> Answer:
    standing, greeting = dialog.standing, dialog.reception.greeting
    extended = verb == "EHLO"
    standing.said_hello(name[:MAX_HELO], extended=extended)
    return greeting.ehlo(standing.grants.offer, dialog.reception.clock.now()) if extended else greeting.helo


def starttls(dialog: Dialog, argument: str) -> Answer:
    if argument:
        return dialog.refuse(answers.NO_ARGUMENT, "STARTTLS")
    if dialog.standing.tls is not None:
        return dialog.refuse(answers.TLS_ALREADY, "STARTTLS")
    if not dialog.standing.grants.offers_starttls:
        return dialog.refuse(answers.NOT_OFFERED, "STARTTLS")
    dialog.reset()
    return answers.START_TLS


def xclient(dialog: Dialog, argument: str) -> Answer:
    if not dialog.standing.client.may_xclient:
        return dialog.refuse(answers.NOT_OFFERED, "XCLIENT")
    if dialog.transaction is not None:
        return dialog.refuse(answers.NOT_IN_TRANSACTION, "XCLIENT")
    dialog.xclient = parse_xclient(argument)
    return answers.READMIT
