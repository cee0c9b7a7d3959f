"""One client's conversation outside message bodies: lines in, answers out. No I/O, no awaiting.

Owns what is counted and who may speak when: commands, errors, an AUTH exchange in progress, the transaction
that is being built (RFC 5321 4.1.4). What each command means is in `hello`, `login` and `mail`; how bytes
travel is the session's business. A command that cannot be decided without asking somebody is answered
`Then.ASK`: `question` is what to ask, and `decided` takes the verdict and gives the answer.

Policy, where the RFCs leave room:

- Input pipelined behind EHLO, HELO, AUTH or DATA ends the session with 554 5.5.0 (RFC 2920 3.1): their
  answer decides how the following bytes are to be read, and a client that did not wait for it may be a
  web page that was made to post here. Pipelined groups as the RFC allows them are answered in order.
  What is pipelined behind STARTTLS is dropped, unread (RFC 3207 4.2).
- VRFY tells nothing; EXPN and the turn commands are not implemented.
- The answer to an error of a client that may not relay waits, longer each time (`errors`).
- A refusal for the whole session (too many errors) never takes the place of the answer to a message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zonerelay.inbound.access.networks import Client
from zonerelay.inbound.limits.connections import client_key
from zonerelay.inbound.policy import Connect, Decision
from zonerelay.inbound.session import auth, ehlo, mail
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.client_state import ClientState
from zonerelay.inbound.state.context import ListenerContext
from zonerelay.inbound.state.questions import Question, Verdict
from zonerelay.inbound.state.replies import ServerReply, Then, refused
from zonerelay.inbound.state.transaction import NO_EDITS, Edits, Transaction
from zonerelay.inbound.tls.ports import TlsInfo
from zonerelay.model.address import Mailbox
from zonerelay.model.message_id import MessageId
from zonerelay.smtp.server.commands import HTTP_VERBS, parse_command
from zonerelay.smtp.server.lines import LineFault
from zonerelay.smtp.server.paths import CommandError
from zonerelay.smtp.server.sasl import SaslExchange
from zonerelay.smtp.server.xclient import XClient

_SYNCHRONISING = frozenset({"EHLO", "HELO", "AUTH", "DATA"})
_NOT_OFFERED = frozenset({"EXPN", "ETRN", "TURN", "ATRN", "SEND", "SOML", "SAML", "BURL"})

AfterVerdict = Callable[[Verdict], ServerReply]


class Conversation:
    """`answer` takes one line. The commands' modules read and change the attributes."""

    __slots__ = (
        "_after_verdict",
        "_errors",
        "_known",
        "_max_commands",
        "_max_errors",
        "auth_failures",
        "chunk",
        "client_state",
        "commands",
        "context",
        "delay",
        "edits",
        "edits_by_step",
        "exchange",
        "held_back",
        "question",
        "transaction",
        "xclient",
    )

    def __init__(self, context: ListenerContext, client: Client, tls: TlsInfo | None = None) -> None:
        settings = context.settings
        self.context = context
        self.client_state = ClientState(settings, context.grants, client, tls)
        self._max_commands = settings.max_commands
        self._max_errors = settings.max_errors
        self._errors = 0
        self.delay = 0.0  # seconds that the answer to a stranger's error waits
        self.held_back: ServerReply | None = None
        self._known = _IN_CLEAR if self.client_state.grants.must_start_tls else _COMMANDS
        self.commands = 0
        self.auth_failures = 0
        self.exchange: SaslExchange | None = None  # while the client's lines are SASL responses
        self.transaction: Transaction | None = None
        self.edits: Edits = NO_EDITS  # what the policy wants of every message of this client
        self.edits_by_step: tuple[tuple[str, Edits], ...] = ()
        self.chunk = (0, False)  # octets of the BDAT being answered, and whether it is the last
        self.xclient: XClient | None = None
        self.question: Question | None = None
        self._after_verdict: AfterVerdict | None = None

    def reset(self) -> None:
        """Forget the transaction, not the client."""
        if self.transaction is not None:
            self.context.memory.used -= self.transaction.cost
            self.transaction = None

    def greet(self) -> ServerReply:
        if Connect not in self.context.consultants.asked:
            return self.context.greeting.banner
        return self.ask(Connect(client=self.client_state.info), self._connect_decided)

    def answer(self, line: bytes | LineFault, *, more: bool) -> ServerReply:
        """The answer to a line; `more` says that further input is already there."""
        self.commands += 1
        if isinstance(line, LineFault) or self.exchange is not None or self.commands > self._max_commands:
            return self._no_command(line)
        verb = ""
        try:
            verb, argument = parse_command(line)
            command = self._known.get(verb)
            if command is None:
                return self._unknown(verb)
            if more and verb in _SYNCHRONISING:
                return self.refuse(replies.PIPELINED, verb)
            return command(self, argument)
        except CommandError as error:
            answer = replies.bad_command(error.reply)
            if line[:4].upper() == b"BDAT":
                # Nobody knows where its octets end, and they must not run as commands.
                answer = replace(answer, then=Then.CLOSE)
            return self.refuse(answer, verb)

    def _no_command(self, line: bytes | LineFault) -> ServerReply:
        if self.commands > self._max_commands:
            return self.refuse(replies.TOO_MANY_COMMANDS)
        exchange, self.exchange = self.exchange, None
        if isinstance(line, LineFault):
            bare = line is LineFault.BARE_LF
            too_long = replies.LINE_TOO_LONG if exchange is None else replies.RESPONSE_TOO_LONG
            return self.refuse(replies.BARE_LF_COMMAND if bare else too_long)
        assert exchange is not None
        return auth.respond(self, exchange, line)

    def refuse(
        self,
        answer: ServerReply,
        command: str = "",
        *,
        message_id: MessageId | None = None,
        mailbox: Mailbox | None = None,
        detail: str = "",
    ) -> ServerReply:
        """Log and count a refusal; too many of them end the session."""
        if answer.reason is not None:
            self.context.events.refused(
                self.client_state.origin,
                command,
                answer.reply,
                answer.reason.value,
                message_id=message_id,
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
        """The answer, or the order to the session to hold it back for `delay`."""
        if answer.then is not Then.GO_ON and answer.then is not Then.CLOSE:
            return answer  # the next one, then
        self.held_back = answer
        return replies.HOLD_BACK

    # Asking somebody.

    def ask(self, question: Question, after_verdict: AfterVerdict) -> ServerReply:
        self.question = question
        self._after_verdict = after_verdict
        return replies.ASK

    def decided(self, verdict: Verdict) -> ServerReply:
        """The verdict on `question`."""
        after_verdict = self._after_verdict
        assert after_verdict is not None
        self.question = self._after_verdict = None
        return after_verdict(verdict)

    def refuse_by(self, verdict: Verdict, command: str, *, mailbox: Mailbox | None = None) -> ServerReply:
        """The verdict's reply, which is there; 421 ends the session."""
        reply = verdict.decision.reply
        assert reply is not None
        return self.refuse(replies.decided(reply, verdict.reason), command, mailbox=mailbox)

    def _connect_decided(self, verdict: Verdict) -> ServerReply:
        reply = verdict.decision.reply
        if reply is None:
            self.keep_edits(Connect.step, verdict.decision)
            return self.context.greeting.banner
        return self.refuse(refused(reply, verdict.reason, Then.CLOSE))

    def keep_edits(self, step: str, wanted: Decision | Edits) -> None:
        """For every message from here on; a step that comes again replaces what it said before."""
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
        """Behind STARTTLS: who has connected stays decided, what was said does not count."""
        for step, edits in before.edits_by_step:
            if step == Connect.step:
                self.keep_edits(step, edits)

    # Commands of no consequence.

    def _unknown(self, verb: str) -> ServerReply:
        if verb in HTTP_VERBS:
            return self.refuse(replies.NOT_SMTP)
        if verb in _NOT_OFFERED:
            return self.refuse(replies.NOT_OFFERED, verb)
        return self.refuse(replies.UNKNOWN)

    def _noop(self, argument: str) -> ServerReply:
        return replies.OK

    def _vrfy(self, argument: str) -> ServerReply:
        return replies.CANNOT_VERIFY if argument else self.refuse(replies.NEEDS_ARGUMENT, "VRFY")

    def _help(self, argument: str) -> ServerReply:
        return replies.HELP

    def _quit(self, argument: str) -> ServerReply:
        return self.refuse(replies.NO_ARGUMENT, "QUIT") if argument else replies.BYE


_COMMANDS: dict[str, Callable[[Conversation, str], ServerReply]] = {
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
    "NOOP": Conversation._noop,
    "VRFY": Conversation._vrfy,
    "HELP": Conversation._help,
    "QUIT": Conversation._quit,
}


def _tls_before(verb: str) -> Callable[[Conversation, str], ServerReply]:
    return lambda conversation, _: conversation.refuse(replies.TLS_FIRST, verb)


# RFC 3207 4: what a server that insists on TLS still answers without it.
_IN_CLEAR = {
    **{verb: _tls_before(verb) for verb in _COMMANDS},
    **{verb: _COMMANDS[verb] for verb in ("EHLO", "HELO", "STARTTLS", "BDAT", "NOOP", "RSET", "QUIT")},
}
