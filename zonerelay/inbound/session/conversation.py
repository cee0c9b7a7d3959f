"""The commands of one SMTP client's session, and the state that they share. No I/O.

A `Conversation` answers one line after the other. It adds to `SubmittingClient` what only SMTP has: the
counts of commands, errors and failed logins, the SASL exchange, and chunks. MAIL and RCPT build its mail
transaction (RFC 5321 4.1.4). A new object is created whenever the client turns out to be another one (PROXY,
XCLIENT) or has completed a TLS handshake; the earlier state is discarded.

Policy, where the RFCs leave a choice:

- The reply to an error of a client that may not relay is delayed, longer each time (`limits/clients`).
- A refusal for the whole session (too many errors) never replaces the reply to a message.
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
their order; `cleanup/submission` checks sender and recipients.

Policy for these, where the RFCs leave a choice:

- MAIL requires EHLO or HELO first. A client that must log in before anything else is refused at MAIL.
- DSN parameters are refused (555) where DSN is not offered. They have no effect where DSN is offered only
  because the client may still log in.
- The bytes of a refused BDAT are read and discarded before the reply, and its transaction ends, so that input
  that the client pipelined after it cannot run as commands. A BDAT with an unreadable size ends the session,
  because the end of its bytes is unknown.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from msgspec import structs

from zonerelay.config.settings import ListenerAuth
from zonerelay.inbound.access.auth import LoginKind
from zonerelay.inbound.access.networks import Client
from zonerelay.inbound.cleanup.submission import SubmittingClient
from zonerelay.inbound.limits.clients import client_key
from zonerelay.inbound.policy import Auth, Connect, Event
from zonerelay.inbound.policy.api import Changes, Noop, Quit, Rset, Vrfy
from zonerelay.inbound.refusal import Reason
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.client_state import ClientState
from zonerelay.inbound.state.context import ListenerContext, LookupResult
from zonerelay.inbound.state.replies import NextAction, ServerReply, refused
from zonerelay.inbound.tls.channel import TlsInfo
from zonerelay.model.envelope import Recipient, recipient_key
from zonerelay.model.reply import Reply
from zonerelay.smtp.server.commands import HTTP_VERBS, LineFault, parse_command
from zonerelay.smtp.server.line_ends import parse_bdat
from zonerelay.smtp.server.params import by_the_grammar, parse_mail, parse_rcpt
from zonerelay.smtp.server.paths import CommandError
from zonerelay.smtp.server.proxy_protocol import XClient, parse_xclient
from zonerelay.smtp.server.sasl import SaslExchange, parse_auth

REMEMBERED = 1024  # paths with parameters, which repeat often; not whole lines, because AUTH is secret
_parse_mail = lru_cache(maxsize=REMEMBERED)(parse_mail)


@lru_cache(maxsize=REMEMBERED)
def _parse_rcpt(argument: str, smtputf8: bool, offered: frozenset[str]) -> tuple[str, Recipient]:
    """Parse RCPT, and return the recipient with its key (see `recipient_key`)."""
    recipient = parse_rcpt(argument, smtputf8=smtputf8, offered=offered)
    return recipient_key(recipient.address), recipient


_AUTH_FAILED = 535  # RFC 4954 6
# RFC 3207 4: the commands that a server that requires TLS still answers without it.
_IN_CLEAR = frozenset({"EHLO", "HELO", "STARTTLS", "BDAT", "NOOP", "RSET", "QUIT"})
_SYNCHRONISING = frozenset({"EHLO", "HELO", "AUTH", "DATA"})
_NOT_OFFERED = frozenset({"EXPN", "ETRN", "TURN", "ATRN", "SEND", "SOML", "SAML", "BURL"})


class Conversation(SubmittingClient):
    """Executes the commands of one SMTP client, and holds the state that they share.

    `exchange` is set while the client's lines are SASL responses, and `logs_in` while its password is being
    checked. `chunk` is the size of the current BDAT in bytes, and whether it is the last one.
    """

    logs_in = False

    def __init__(self, context: ListenerContext, client: Client, tls: TlsInfo | None = None) -> None:
        settings = context.settings
        super().__init__(context, ClientState(settings, context.grants, client, tls))
        self.max_commands = settings.max_commands
        self._errors = 0
        self.in_clear = self.client_state.grants.must_start_tls  # most commands require TLS first
        self.commands = 0
        self.auth_failures = 0
        self.exchange: SaslExchange | None = None
        self.chunk = (0, False)
        self.xclient: XClient | None = None

    def _counted(self, answer: ServerReply, command: str, *, of_message: bool) -> ServerReply:
        """Count a refusal as a client's error, and return it, or a reply that ends the session. Too many of
        them end the session.
        """
        if answer.counts:
            self._errors += 1
            if not self.client_state.grants.may_relay:
                client = client_key(self.client_state.client.address)
                self.delay = self.context.error_delays.made(client, self.context.clock.monotonic())
            too_many = self._errors >= self.context.settings.max_errors
            if too_many and answer.then is not NextAction.CLOSE and not of_message:
                return self.refuse(replies.TOO_MANY_ERRORS, command)
        return answer

    def slowed(self, answer: ServerReply) -> ServerReply:
        """Delay a reply by `delay` seconds."""
        if answer.then is not NextAction.GO_ON and answer.then is not NextAction.CLOSE:
            return answer  # the next reply is delayed instead
        delay, self.delay = self.delay, 0.0
        return self.ask(partial(self.context.wait, delay), lambda _: answer)

    def _handled(
        self, event: type[Event], command: str, answer: ServerReply, **fields: Any
    ) -> ServerReply:  # Any: values of the event's fields
        """Call the policy for a command that only aiosmtpd handlers receive. `answer` is the relay's own
        reply, which is final if there is no handler, or no `command` that it may refuse.
        """
        if event not in self.context.asked:
            return answer

        def decided(verdict: LookupResult) -> ServerReply:
            decision = verdict.decision
            if isinstance(decision, Changes) and decision.vrfy_reply is not None:
                return ServerReply(decision.vrfy_reply, decision.vrfy_reply.encode())
            return answer

        return self.ask(event(client=self.client_state.info, **fields), decided, command)

    def go_on_from(self, before: "Conversation") -> None:
        """Keep the policy's decision about the connection after STARTTLS. The client must repeat everything
        else.
        """
        if (decision := before.edits_by_step.get(Connect.step)) is not None:
            self.keep_edits(Connect.step, decision)

    def _mail(self, argument: str) -> ServerReply:
        client_state = self.client_state
        if not client_state.helo:
            return self.refuse(replies.EHLO_FIRST, "MAIL")
        if self.transaction is not None:
            return self.refuse(replies.NESTED_MAIL, "MAIL")
        if client_state.grants.must_log_in:
            return self.refuse(replies.AUTH_FIRST, "MAIL")
        offered = client_state.grants.mail_parameters
        try:
            command = _parse_mail(argument, offered=offered)
        except CommandError:
            if not client_state.is_lenient:
                raise
            command = _parse_mail(by_the_grammar(argument), offered=offered)
        return self.begin(command)

    def _rcpt(self, argument: str) -> ServerReply:
        transaction = self.transaction
        if transaction is None:
            return self.refuse(replies.MAIL_FIRST, "RCPT")
        if transaction.chunked:
            return self.refuse(replies.IN_CHUNKS, "RCPT")
        client_state, smtputf8 = self.client_state, transaction.mail.smtputf8
        offered = client_state.grants.rcpt_parameters
        try:
            key, recipient = _parse_rcpt(argument, smtputf8, offered)
        except CommandError:
            if not client_state.is_lenient:
                raise
            key, recipient = _parse_rcpt(by_the_grammar(argument), smtputf8, offered)
        return self.add(transaction, key, recipient)

    def _data(self, argument: str) -> ServerReply:
        if argument:
            return self.refuse(replies.NO_ARGUMENT, "DATA")
        transaction = self.transaction
        if transaction is None:
            return self.refuse(replies.MAIL_FIRST, "DATA")
        if transaction.chunked:
            return self.refuse(replies.IN_CHUNKS, "DATA")
        if not transaction.recipients:
            return self.refuse(replies.NO_RECIPIENTS, "DATA")
        return replies.START_BODY

    def _bdat(self, argument: str) -> ServerReply:
        try:
            size, last = parse_bdat(argument)
        except CommandError as error:
            return self.refuse(refused(error.reply, Reason.SYNTAX, NextAction.CLOSE), "BDAT")
        self.chunk = (size, last)
        if self.client_state.grants.must_start_tls:
            return self._refused_chunk(replies.TLS_FIRST, size)
        transaction, limit = self.transaction, self.context.settings.max_message_size
        if transaction is None:
            return self._refused_chunk(replies.MAIL_FIRST, size)
        if not transaction.recipients:
            return self._refused_chunk(replies.NO_RECIPIENTS, size)
        transaction.octets += size
        if transaction.octets > limit:
            return self._refused_chunk(replies.too_big(limit), size)
        transaction.chunked = True
        return replies.TAKE_CHUNK

    def _refused_chunk(self, answer: ServerReply, size: int) -> ServerReply:
        self.reset()
        if size > 2 * self.context.settings.max_message_size + replies.MAX_DRAINED:
            return self.refuse(structs.replace(answer, then=NextAction.CLOSE), "BDAT")
        answer = self.refuse(answer, "BDAT")
        if answer.then is NextAction.CLOSE:
            return answer
        return structs.replace(answer, wire=b"", later=answer.wire, then=NextAction.DISCARD)

    def _rset(self, argument: str) -> ServerReply:
        if argument:
            return self.refuse(replies.NO_ARGUMENT, "RSET")
        self.reset()
        return self._handled(Rset, "RSET", replies.OK)

    def _auth(self, argument: str) -> ServerReply:
        client_state = self.client_state
        if replies.AUTH not in client_state.grants.offer:
            off = self.context.settings.auth is ListenerAuth.OFF
            return self.refuse(replies.NOT_OFFERED if off else replies.AUTH_NEEDS_TLS, "AUTH")
        if not client_state.helo:
            return self.refuse(replies.EHLO_FIRST, "AUTH")
        if client_state.user is not None:
            return self.refuse(replies.AUTH_ALREADY, "AUTH")
        if self.transaction is not None:
            return self.refuse(replies.NOT_IN_TRANSACTION, "AUTH")
        mechanism, initial = parse_auth(argument)
        exchange = SaslExchange(mechanism)
        return self._step(exchange, initial)

    def _step(self, exchange: SaslExchange, text: str | None) -> ServerReply:
        try:
            result = exchange.respond(text)
        except CommandError as error:
            if error.reply.code == _AUTH_FAILED:
                return self._failed()
            raise
        if isinstance(result, Reply):
            self.exchange = exchange
            return ServerReply(result, result.encode())
        self.logs_in = True
        log_in = partial(self.context.log_in, self.client_state.info, exchange.mechanism, result)
        return self.ask(log_in, self._decided)

    def _decided(self, verdict: LookupResult) -> ServerReply:
        self.logs_in, login = False, verdict.login
        if login is None or (login.kind is LoginKind.BROKEN and login.refusal is None):
            return self.refuse(replies.AUTH_FAILURE, "AUTH", detail="" if login is None else login.detail)
        if login.refusal is not None:
            return self.refuse(replies.barred(login.refusal), "AUTH", detail=login.detail)
        if login.kind is LoginKind.LOCKED:
            return self.refuse(replies.AUTH_LOCKED, "AUTH", detail=login.detail)
        if login.kind is not LoginKind.OK or login.user is None:
            return self._failed()
        if verdict.decision.reply is not None:
            return self.refuse_by(verdict, "AUTH")
        self.keep_edits(Auth.step, verdict.decision)
        self.client_state.logged_in(login.user)
        return replies.AUTH_OK

    def _failed(self) -> ServerReply:
        self.auth_failures += 1
        if self.auth_failures >= self.context.settings.max_auth_failures:
            return self.refuse(replies.TOO_MANY_LOGINS, "AUTH")
        return self.refuse(replies.AUTH_FAILED, "AUTH")

    def _ehlo(self, argument: str) -> ServerReply:
        return self._hello("EHLO", argument)

    def _helo(self, argument: str) -> ServerReply:
        return self._hello("HELO", argument)

    def _hello(self, verb: str, name: str) -> ServerReply:
        if not name:
            return self.refuse(replies.NEEDS_ARGUMENT, verb)
        self.reset()
        return self.hello(name, extended=verb == "EHLO")

    def _starttls(self, argument: str) -> ServerReply:
        if argument:
            return self.refuse(replies.NO_ARGUMENT, "STARTTLS")
        if self.client_state.tls is not None:
            return self.refuse(replies.TLS_ALREADY, "STARTTLS")
        if replies.STARTTLS not in self.client_state.grants.offer:
            return self.refuse(replies.NOT_OFFERED, "STARTTLS")
        self.reset()
        return replies.START_TLS

    def _xclient(self, argument: str) -> ServerReply:
        if not self.client_state.client.may_xclient:
            return self.refuse(replies.NOT_OFFERED, "XCLIENT")
        if self.transaction is not None:
            return self.refuse(replies.NOT_IN_TRANSACTION, "XCLIENT")
        self.xclient = parse_xclient(argument)
        return replies.READMIT

    def answer(self, line: bytes | LineFault, *, more: bool) -> ServerReply:
        """Execute a command line, and return the reply. `more` is true if further input has already
        arrived.
        """
        self.commands += 1
        if isinstance(line, LineFault) or self.exchange is not None or self.commands > self.max_commands:
            return self._no_command(line)
        verb = ""
        try:
            verb, argument = parse_command(line)
            command = _COMMANDS.get(verb)
            if command is None:
                return self._unknown(verb)
            if more and verb in _SYNCHRONISING:
                return self.refuse(replies.PIPELINED, verb)
            if self.in_clear and verb not in _IN_CLEAR:
                return self.refuse(replies.TLS_FIRST, verb)
            return command(self, argument)
        except CommandError as error:
            refusal = replies.bad_command(error.reply)
            if line[:4].upper() == b"BDAT":
                # The end of its bytes is unknown, and they must not run as commands.
                refusal = structs.replace(refusal, then=NextAction.CLOSE)
            return self.refuse(refusal, verb)

    def _no_command(self, line: bytes | LineFault) -> ServerReply:
        if self.commands > self.max_commands:
            return self.refuse(replies.TOO_MANY_COMMANDS)
        exchange, self.exchange = self.exchange, None
        if isinstance(line, LineFault):
            bare = line is LineFault.BARE_LF
            too_long = replies.LINE_TOO_LONG if exchange is None else replies.RESPONSE_TOO_LONG
            return self.refuse(replies.BARE_LF_COMMAND if bare else too_long)
        assert exchange is not None
        try:
            return self._step(exchange, line.decode("ascii", "replace"))
        except CommandError as error:
            return self.refuse(replies.bad_command(error.reply), "AUTH")

    def _unknown(self, verb: str) -> ServerReply:
        if verb in HTTP_VERBS:
            return self.refuse(replies.NOT_SMTP)
        if verb in _NOT_OFFERED:
            return self.refuse(replies.NOT_OFFERED, verb)
        return self.refuse(replies.UNKNOWN)

    def _noop(self, argument: str) -> ServerReply:
        return self._handled(Noop, "NOOP", replies.OK, argument=argument)

    def _vrfy(self, argument: str) -> ServerReply:
        if not argument:
            return self.refuse(replies.NEEDS_ARGUMENT, "VRFY")
        if not self.client_state.grants.may_relay:
            return replies.CANNOT_VERIFY
        return self._handled(Vrfy, "VRFY", replies.CANNOT_VERIFY, address=argument.strip("<>"))

    def _help(self, argument: str) -> ServerReply:
        return replies.HELP

    def _quit(self, argument: str) -> ServerReply:
        if argument:
            return self.refuse(replies.NO_ARGUMENT, "QUIT")
        return self._handled(Quit, "", replies.BYE)


Command = Callable[[Conversation, str], ServerReply]


_COMMANDS: dict[str, Command] = {
    verb: getattr(Conversation, f"_{verb.lower()}")
    for verb in (
        *("EHLO", "HELO", "STARTTLS", "XCLIENT", "AUTH", "MAIL", "RCPT", "DATA", "BDAT", "RSET", "NOOP"),
        *("VRFY", "HELP", "QUIT"),
    )
}
