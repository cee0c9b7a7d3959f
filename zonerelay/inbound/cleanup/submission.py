"""Represents one client that submits mail: its state, its transaction, and its pending lookup. No I/O.

`envelope` builds the transaction step by step. A step returns a reply immediately, or `ask(question,
after_verdict)`; then the caller performs the lookup, and `decided` returns the reply. The SMTP session
answers a command with each step (`session/conversation`); `submit` performs all of them in one call.
"""

from __future__ import annotations

from collections.abc import Callable

from zonerelay.inbound.policy import Connect, Decision, Helo
from zonerelay.inbound.policy.api import Changes
from zonerelay.inbound.refusal import Refusal
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.client_state import ClientState
from zonerelay.inbound.state.context import ListenerContext
from zonerelay.inbound.state.questions import LookupResult, Question
from zonerelay.inbound.state.replies import ServerReply
from zonerelay.inbound.state.transaction import NO_EDITS, HeaderEdits, MailTransaction
from zonerelay.model.address import Mailbox
from zonerelay.model.message_id import MessageId

MAX_HELO = 255

AfterVerdict = Callable[[LookupResult], ServerReply]


class SubmittingClient:
    """A client that submits mail. `delay` is the delay of the reply to an error in seconds. `edits` are the
    policy's changes to every message of this client.
    """

    def __init__(self, context: ListenerContext, client_state: ClientState) -> None:
        self.context = context
        self.client_state = client_state
        self.transaction: MailTransaction | None = None
        self.delay = 0.0
        self.edits: HeaderEdits = NO_EDITS
        self.edits_by_step: tuple[tuple[str, HeaderEdits], ...] = ()
        self.question: Question | None = None
        self._after_verdict: AfterVerdict | None = None

    def reset(self) -> None:
        """End the mail transaction. The client stays known (RFC 5321 4.1.1.5)."""
        if self.transaction is not None:
            self.context.memory.used -= self.transaction.cost
            self.transaction = None

    def connect(self) -> ServerReply:
        """Call the policy with the new client, if the policy handles connections."""
        if Connect not in self.context.consultants.asked:
            return self.context.greeting.banner
        return self.ask(Connect(client=self.client_state.info), self._connect_decided)

    def hello(self, name: str, *, extended: bool) -> ServerReply:
        """Greet a client by its name, unless the policy refuses it. `extended`: it sent EHLO."""
        name = name[:MAX_HELO]
        if Helo not in self.context.consultants.asked:
            return self._welcome(name, extended)

        def decided(verdict: LookupResult) -> ServerReply:
            decision = verdict.decision
            if decision.reply is not None:
                return self.refuse_by(verdict, "EHLO" if extended else "HELO")
            self.keep_edits(Helo.step, decision)
            answer = self._welcome(name, extended)
            kept = decision.lines if isinstance(decision, Changes) else ()
            return replies.said(250, "", "\n".join(kept)) if kept else answer

        lines = tuple(self._offer().reply.text.split("\n"))
        event = Helo(client=self.client_state.info, name=name, extended=extended, lines=lines)
        return self.ask(event, decided)

    def _welcome(self, name: str, extended: bool) -> ServerReply:
        self.client_state.said_hello(name, extended=extended)
        return self._offer() if extended else self.context.greeting.helo

    def _offer(self) -> ServerReply:
        return self.context.greeting.ehlo(self.client_state.grants.offer, self.context.clock.now())

    def refuse(
        self,
        answer: ServerReply,
        command: str = "",
        *,
        message_id: MessageId | None = None,
        mailbox: Mailbox | None = None,
        detail: str = "",
    ) -> ServerReply:
        """Log a refusal, count it in the metrics, and return it."""
        if answer.reason is not None:
            self.context.events.refused(
                self.client_state.origin,
                command,
                answer.reply,
                answer.reason.value,
                message_id=message_id,
                sender=None if self.transaction is None else self.transaction.mail.sender,
                mailbox=mailbox,
                detail=detail,
            )
        return answer

    def refuse_by(
        self, verdict: LookupResult, command: str, *, mailbox: Mailbox | None = None
    ) -> ServerReply:
        """Refuse by a verdict that has a reply, and return the refusal. Code 421 ends the session."""
        reply = verdict.decision.reply
        assert reply is not None
        return self.refuse(replies.decided(reply, verdict.reason), command, mailbox=mailbox)

    def refuse_guarded(
        self, refusal: Refusal, command: str, *, mailbox: Mailbox | None = None
    ) -> ServerReply:
        """Reject what the user's limits do not allow, and return the rejection."""
        if refusal.quota:
            self.context.events.metrics.quota_refused.add((refusal.quota,))
        return self.refuse(replies.guarded(refusal), command, mailbox=mailbox)

    def ask(self, question: Question, after_verdict: AfterVerdict) -> ServerReply:
        self.question = question
        self._after_verdict = after_verdict
        return replies.ASK

    def decided(self, verdict: LookupResult) -> ServerReply:
        """Return the reply that follows from the verdict on `question`."""
        after_verdict = self._after_verdict
        assert after_verdict is not None
        self.question = self._after_verdict = None
        return after_verdict(verdict)

    def keep_edits(self, step: str, wanted: Decision | HeaderEdits) -> None:
        """Apply these edits to every later message. A repeated step replaces its earlier edits."""
        edits = NO_EDITS.and_those_of(wanted)
        by_step = dict(self.edits_by_step)
        if edits is NO_EDITS and step not in by_step:
            return
        by_step[step] = edits
        self.edits_by_step = tuple(by_step.items())
        self.edits = NO_EDITS
        for each in by_step.values():
            self.edits = self.edits.and_those_of(each)

    def _connect_decided(self, verdict: LookupResult) -> ServerReply:
        reply = verdict.decision.reply
        if reply is None:
            self.keep_edits(Connect.step, verdict.decision)
            return self.context.greeting.banner
        return self.refuse(replies.refused(reply, verdict.reason, replies.NextAction.CLOSE))
