"""The state of one client's conversation, which the command functions share. No I/O.

Owns the counts of commands, errors and failed log-ins, the facts about the client, the mail transaction that
MAIL and RCPT build (RFC 5321 4.1.4), and the question that has to be asked before the current command is
answered: a command returns `ask(question, after_verdict)`, the session asks, `decided` returns the reply.

A new object starts whenever the client is another one (PROXY, XCLIENT) or has completed a TLS handshake:
nothing that was said before counts.

Policy, where the RFCs leave room:

- The reply to an error of a client that may not relay waits, longer each time (`limits/error_delay`).
- A refusal for the whole session (too many errors) never takes the place of the reply to a message.
"""

from __future__ import annotations

from collections.abc import Callable

from zonerelay.config.credentials.file import User
from zonerelay.inbound.access.guard import Refusal
from zonerelay.inbound.access.networks import Client
from zonerelay.inbound.limits.connections import client_key
from zonerelay.inbound.policy import Connect, Decision, Event
from zonerelay.inbound.policy.changes import Changes, Quit
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.client_state import ClientState
from zonerelay.inbound.state.context import ListenerContext
from zonerelay.inbound.state.questions import Question, Verdict
from zonerelay.inbound.state.replies import ServerReply, Then, refused
from zonerelay.inbound.state.transaction import NO_EDITS, Edits, Transaction
from zonerelay.inbound.tls.ports import TlsInfo
from zonerelay.model.address import Mailbox
from zonerelay.model.message_id import MessageId
from zonerelay.smtp.server.sasl import SaslExchange
from zonerelay.smtp.server.xclient import XClient

AfterVerdict = Callable[[Verdict], ServerReply]


class Conversation:
    """What the commands of `mail`, `ehlo` and `auth` read and change.

    `delay` is how many seconds the reply to an error waits, `held_back` the reply that waits. `exchange` is
    set while the client's lines are SASL responses. `edits` is what the policy wants of every message of this
    client. `chunk` is the size of the BDAT being answered, in octets, and whether it is the last. `user` is
    the one that `xclient` names, as the credentials file has it.
    """

    def __init__(self, context: ListenerContext, client: Client, tls: TlsInfo | None = None) -> None:
        settings = context.settings
        self.context = context
        self.client_state = ClientState(settings, context.grants, client, tls)
        self.max_commands = settings.max_commands
        self._max_errors = settings.max_errors
        self._errors = 0
        self.delay = 0.0
        self.held_back: ServerReply | None = None
        self.in_clear = self.client_state.grants.must_start_tls  # most commands need TLS first
        self.commands = 0
        self.auth_failures = 0
        self.exchange: SaslExchange | None = None
        self.transaction: Transaction | None = None
        self.edits: Edits = NO_EDITS
        self.edits_by_step: tuple[tuple[str, Edits], ...] = ()
        self.chunk = (0, False)
        self.xclient: XClient | None = None
        self.user: User | None = None
        self.question: Question | None = None
        self._after_verdict: AfterVerdict | None = None

    def reset(self) -> None:
        """Forget the mail transaction; the client stays known (RFC 5321 4.1.1.5)."""
        if self.transaction is not None:
            self.context.memory.used -= self.transaction.cost
            self.transaction = None

    def greet(self) -> ServerReply:
        if Connect not in self.context.consultants.asked:
            return self.context.greeting.banner
        return self.ask(Connect(client=self.client_state.info), self._connect_decided)

    def refuse(
        self,
        answer: ServerReply,
        command: str = "",
        *,
        message_id: MessageId | None = None,
        mailbox: Mailbox | None = None,
        detail: str = "",
    ) -> ServerReply:
        """Log and count a refusal, and return it; too many of them end the session."""
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
        if answer.counts:
            self._errors += 1
            if not self.client_state.grants.may_relay:
                client = client_key(self.client_state.client.address)
                self.delay = self.context.error_delays.made(client, self.context.clock.monotonic())
            if self._errors >= self._max_errors and answer.then is not Then.CLOSE and not message_id:
                return self.refuse(replies.TOO_MANY_ERRORS, command)
        return answer

    def slowed(self, answer: ServerReply) -> ServerReply:
        """Return the reply, or the order to the session to hold it back for `delay` seconds."""
        if answer.then is not Then.GO_ON and answer.then is not Then.CLOSE:
            return answer  # the next reply waits instead
        self.held_back = answer
        return replies.HOLD_BACK

    # Questions.

    def ask(self, question: Question, after_verdict: AfterVerdict) -> ServerReply:
        self.question = question
        self._after_verdict = after_verdict
        return replies.ASK

    def decided(self, verdict: Verdict) -> ServerReply:
        """Return the reply that follows from the verdict on `question`."""
        after_verdict = self._after_verdict
        assert after_verdict is not None
        self.question = self._after_verdict = None
        return after_verdict(verdict)

    def refuse_by(self, verdict: Verdict, command: str, *, mailbox: Mailbox | None = None) -> ServerReply:
        """Return the refusal that a verdict with a reply stands for; 421 ends the session."""
        reply = verdict.decision.reply
        assert reply is not None
        return self.refuse(replies.decided(reply, verdict.reason), command, mailbox=mailbox)

    def refuse_guarded(
        self, refusal: Refusal, command: str, *, mailbox: Mailbox | None = None
    ) -> ServerReply:
        """Return what a guard rail of the user refuses."""
        if refusal.full is not None:
            self.context.events.metrics.quota_refused.add((refusal.full.limit,))
        return self.refuse(replies.guarded(refusal), command, mailbox=mailbox)

    def ask_handler(self, event: Event, command: str, answer: ServerReply) -> ServerReply:
        """Ask about a command that only handlers of aiosmtpd are asked about; `answer` is the relay's own."""

        def decided(verdict: Verdict) -> ServerReply:
            decision = verdict.decision
            if decision.reply is not None:
                return answer if isinstance(event, Quit) else self.refuse_by(verdict, command)
            if isinstance(decision, Changes) and decision.told is not None:
                return ServerReply(decision.told, decision.told.encode())
            return answer

        return self.ask(event, decided)

    def _connect_decided(self, verdict: Verdict) -> ServerReply:
        reply = verdict.decision.reply
        if reply is None:
            self.keep_edits(Connect.step, verdict.decision)
            return self.context.greeting.banner
        return self.refuse(refused(reply, verdict.reason, Then.CLOSE))

    def keep_edits(self, step: str, wanted: Decision | Edits) -> None:
        """Apply these edits to every later message; a step that comes again replaces its earlier edits."""
        edits = NO_EDITS.and_those_of(wanted)
        by_step = dict(self.edits_by_step)
        if edits is NO_EDITS and step not in by_step:
            return
        by_step[step] = edits
        self.edits_by_step = tuple(by_step.items())
        self.edits = NO_EDITS
        for each in by_step.values():
            self.edits = self.edits.and_those_of(each)

    def go_on_from(self, before: Conversation) -> None:
        """Keep, after STARTTLS, what was decided at the connection; the client says the rest anew."""
        for step, edits in before.edits_by_step:
            if step == Connect.step:
                self.keep_edits(step, edits)
