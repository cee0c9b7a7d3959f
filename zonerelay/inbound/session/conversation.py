"""The state of one SMTP client's session that the command functions share. No I/O.

It adds to `SubmittingClient` the state that only SMTP has: the counts of commands, errors and failed logins,
the SASL exchange, and chunks. MAIL and RCPT build its mail transaction (RFC 5321 4.1.4).

A new object is created whenever the client turns out to be another one (PROXY, XCLIENT) or has completed a
TLS handshake; the earlier state is discarded.

Policy, where the RFCs leave a choice:

- The reply to an error of a client that may not relay is delayed, longer each time (`limits/connections`).
- A refusal for the whole session (too many errors) never replaces the reply to a message.
"""

from __future__ import annotations

from zonerelay.inbound.access.networks import Client
from zonerelay.inbound.cleanup.submission import SubmittingClient
from zonerelay.inbound.limits.connections import client_key
from zonerelay.inbound.policy import Connect, Event
from zonerelay.inbound.policy.api import Changes, Quit
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.client_state import ClientState
from zonerelay.inbound.state.context import ListenerContext
from zonerelay.inbound.state.questions import LookupResult
from zonerelay.inbound.state.replies import NextAction, ServerReply
from zonerelay.inbound.tls.ports import TlsInfo
from zonerelay.model.address import Mailbox
from zonerelay.model.message_id import MessageId
from zonerelay.smtp.server.proxy_protocol import XClient
from zonerelay.smtp.server.sasl import SaslExchange


class Conversation(SubmittingClient):
    """The session state that the command functions read and change.

    `held_back` is the reply that is delayed by `delay` seconds. `exchange` is set while the client's lines
    are SASL responses. `chunk` is the size of the current BDAT in bytes, and whether it is the last one.
    """

    def __init__(self, context: ListenerContext, client: Client, tls: TlsInfo | None = None) -> None:
        settings = context.settings
        super().__init__(context, ClientState(settings, context.grants, client, tls))
        self.max_commands = settings.max_commands
        self._max_errors = settings.max_errors
        self._errors = 0
        self.held_back: ServerReply | None = None
        self.in_clear = self.client_state.grants.must_start_tls  # most commands require TLS first
        self.commands = 0
        self.auth_failures = 0
        self.exchange: SaslExchange | None = None
        self.chunk = (0, False)
        self.xclient: XClient | None = None

    def refuse(
        self,
        answer: ServerReply,
        command: str = "",
        *,
        message_id: MessageId | None = None,
        mailbox: Mailbox | None = None,
        detail: str = "",
    ) -> ServerReply:
        """Log and count a refusal, and return it. Too many of them end the session."""
        super().refuse(answer, command, message_id=message_id, mailbox=mailbox, detail=detail)
        if answer.counts:
            self._errors += 1
            if not self.client_state.grants.may_relay:
                client = client_key(self.client_state.client.address)
                self.delay = self.context.error_delays.made(client, self.context.clock.monotonic())
            if self._errors >= self._max_errors and answer.then is not NextAction.CLOSE and not message_id:
                return self.refuse(replies.TOO_MANY_ERRORS, command)
        return answer

    def slowed(self, answer: ServerReply) -> ServerReply:
        """Return the reply, which is sent after `delay` seconds if that is not 0."""
        if answer.then is not NextAction.GO_ON and answer.then is not NextAction.CLOSE:
            return answer  # the next reply is delayed instead
        self.held_back = answer
        return replies.HOLD_BACK

    def ask_handler(self, event: Event, command: str, answer: ServerReply) -> ServerReply:
        """Call the policy for a command that only aiosmtpd handlers handle. `answer` is the relay's own
        reply.
        """

        def decided(verdict: LookupResult) -> ServerReply:
            decision = verdict.decision
            if decision.reply is not None:
                return answer if isinstance(event, Quit) else self.refuse_by(verdict, command)
            if isinstance(decision, Changes) and decision.vrfy_reply is not None:
                return ServerReply(decision.vrfy_reply, decision.vrfy_reply.encode())
            return answer

        return self.ask(event, decided)

    def go_on_from(self, before: Conversation) -> None:
        """Keep the policy's decision at connect after STARTTLS. The client must repeat everything else."""
        for step, edits in before.edits_by_step:
            if step == Connect.step:
                self.keep_edits(step, edits)
