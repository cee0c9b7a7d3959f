"""The commands that identify a client: EHLO, HELO, STARTTLS, XCLIENT.

EHLO and HELO may come again and reset the transaction (RFC 5321 4.1.4). XCLIENT, from listed peers only,
makes the session that of another client; what that client may do is decided anew.
"""

from __future__ import annotations

from zonerelay.inbound.policy import Helo
from zonerelay.inbound.policy.changes import Changes
from zonerelay.inbound.session.conversation import Conversation
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.questions import Verdict
from zonerelay.inbound.state.replies import ServerReply
from zonerelay.smtp.server.proxy_protocol import parse_xclient

MAX_HELO = 255


def ehlo(conversation: Conversation, argument: str) -> ServerReply:
    return _hello(conversation, "EHLO", argument)


def helo(conversation: Conversation, argument: str) -> ServerReply:
    return _hello(conversation, "HELO", argument)


def _hello(conversation: Conversation, verb: str, name: str) -> ServerReply:
    if not name:
        return conversation.refuse(replies.NEEDS_ARGUMENT, verb)
    conversation.reset()
    if Helo not in conversation.context.consultants.asked:
        return _welcome(conversation, verb, name)

    def decided(verdict: Verdict) -> ServerReply:
        if verdict.decision.reply is not None:
            return conversation.refuse_by(verdict, verb)
        conversation.keep_edits(Helo.step, verdict.decision)
        answer = _welcome(conversation, verb, name)
        kept = verdict.decision.lines if isinstance(verdict.decision, Changes) else ()
        return replies.said(250, "", "\n".join(kept)) if kept else answer

    event = Helo(
        client=conversation.client_state.info,
        name=name[:MAX_HELO],
        extended=verb == "EHLO",
        lines=tuple(_offer(conversation).reply.text.split("\n")),
    )
    return conversation.ask(event, decided)


def _welcome(conversation: Conversation, verb: str, name: str) -> ServerReply:
    extended = verb == "EHLO"
    conversation.client_state.said_hello(name[:MAX_HELO], extended=extended)
    return _offer(conversation) if extended else conversation.context.greeting.helo


def _offer(conversation: Conversation) -> ServerReply:
    context = conversation.context
    return context.greeting.ehlo(conversation.client_state.grants.offer, context.clock.now())


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
