"""One client's conversation up to DATA: command lines in, answers out. No I/O, no awaiting.

Owns the order of commands and the transaction that is being built (RFC 5321 4.1.4), and counts commands and
errors. What a command means is decided here; how bytes travel is the session's business.

Policy, where the RFCs leave room:

- EHLO and HELO may come again and reset the transaction. MAIL needs one of them first.
- Input pipelined behind EHLO, HELO or DATA ends the session with 554 5.5.0 (RFC 2920 3.1): their answer
  decides how the following bytes are to be read, and a client that did not wait for it may be a
  web page that was made to post here. Pipelined groups as the RFC allows them are answered in order.
- A recipient named twice (domains compared without case) is one recipient.
- VRFY tells nothing; EXPN and the turn commands are not implemented; STARTTLS, AUTH and BDAT are
  refused with 502 while they are not offered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from zonerelay.inbound import answers
from zonerelay.inbound.access import Client
from zonerelay.inbound.answers import Answer, Then
from zonerelay.inbound.reception import Reception
from zonerelay.model.address import Mailbox
from zonerelay.model.envelope import Envelope, Origin, Recipient
from zonerelay.model.message_id import MessageId
from zonerelay.smtp.commands import HTTP_VERBS, parse_command
from zonerelay.smtp.lines import LineFault
from zonerelay.smtp.params import MailCommand, parse_mail, parse_rcpt
from zonerelay.smtp.paths import CommandError

MAX_HELO = 255
REMEMBERED = 1024  # paths with parameters: the same come again and again. Not whole lines: AUTH's are secret

_SYNCHRONISING = frozenset({"EHLO", "HELO", "DATA"})
_NOT_OFFERED = frozenset(
    {"STARTTLS", "AUTH", "BDAT", "EXPN", "ETRN", "TURN", "ATRN", "SEND", "SOML", "SAML", "BURL", "XCLIENT"}
)


_parse_mail = lru_cache(maxsize=REMEMBERED)(parse_mail)


@lru_cache(maxsize=REMEMBERED)
def _parse_rcpt(argument: str, smtputf8: bool) -> tuple[str, Recipient]:
    """A recipient, and what it has in common with the same one in another spelling."""
    rcpt = parse_rcpt(argument, smtputf8=smtputf8)
    local, at, domain = rcpt.recipient.rpartition("@")
    recipient = Recipient(address=rcpt.recipient, notify=rcpt.notify, orcpt=rcpt.orcpt)
    return f"{local}{at}{domain.lower()}", recipient


class Dialog:
    """`answer` takes one line; `in_transaction` is true from MAIL until the end of data or RSET."""

    __slots__ = (
        "_client",
        "_errors",
        "_mail",
        "_max_commands",
        "_max_errors",
        "_origin",
        "_reception",
        "_recipients",
        "commands",
        "in_transaction",
    )

    def __init__(self, reception: Reception, client: Client) -> None:
        settings = reception.settings
        self._reception = reception
        self._max_commands = settings.max_commands
        self._max_errors = settings.max_errors
        self._client = client
        self._origin: Origin | None = None  # before EHLO
        self.commands = 0
        self._errors = 0
        self.in_transaction = False
        self._mail: MailCommand | None = None
        self._recipients: dict[str, Recipient] = {}

    @property
    def origin(self) -> Origin:
        return self._origin or self._came_from()

    def _came_from(self, helo: str = "", protocol: str = "ESMTP") -> Origin:
        return Origin(
            client_address=self._client.address,
            client_port=self._client.port,
            helo=helo,
            protocol=protocol,
            listener=self._reception.settings.address,
        )

    def reset(self) -> None:
        """Forget the transaction, not the client."""
        self.in_transaction = False
        self._mail = None
        self._recipients = {}

    def answer(self, line: bytes | LineFault, *, more: bool) -> Answer:
        """The answer to a line; `more` says that further input is already there."""
        self.commands += 1
        if self.commands > self._max_commands:
            return self.refuse(answers.TOO_MANY_COMMANDS)
        if isinstance(line, LineFault):
            bare = line is LineFault.BARE_LF
            return self.refuse(answers.BARE_LF_COMMAND if bare else answers.LINE_TOO_LONG)
        verb = ""
        try:
            verb, argument = parse_command(line)
            command = _COMMANDS.get(verb)
            if command is None:
                return self._unknown(verb)
            if more and verb in _SYNCHRONISING:
                return self.refuse(answers.PIPELINED, verb)
            return command(self, argument)
        except CommandError as error:
            return self.refuse(answers.bad_command(error.reply), verb)

    def refuse(
        self,
        answer: Answer,
        command: str = "",
        *,
        message_id: MessageId | None = None,
        mailbox: Mailbox | None = None,
        detail: str = "",
    ) -> Answer:
        """Log and count a refusal; too many of them end the session.

        The answer to a message (`message_id`) is never replaced: a permanent no must stay one.
        """
        if answer.reason is not None:
            self._reception.events.refused(
                self.origin,
                command,
                answer.reply,
                answer.reason.value,
                message_id=message_id,
                mailbox=mailbox,
                detail=detail,
            )
        if answer.counts:
            self._errors += 1
            if self._errors >= self._max_errors and answer.then is not Then.CLOSE and not message_id:
                return self.refuse(answers.TOO_MANY_ERRORS, command)
        return answer

    def envelope(self) -> Envelope:
        """The transaction as it stands when DATA was answered 354."""
        mail, origin = self._mail, self._origin
        assert mail is not None
        assert origin is not None
        if mail.smtputf8:
            origin = replace(origin, protocol="UTF8SMTP")
        return Envelope(
            id=self._reception.ids.next(),
            sender=mail.sender,
            recipients=tuple(self._recipients.values()),
            created=self._reception.clock.now(),
            body=mail.body,
            smtputf8=mail.smtputf8,
            ret=mail.ret,
            envid=mail.envid,
            origin=origin,
        )

    def _unknown(self, verb: str) -> Answer:
        if verb in HTTP_VERBS:
            return self.refuse(answers.NOT_SMTP)
        if verb in _NOT_OFFERED:
            return self.refuse(answers.NOT_OFFERED, verb)
        return self.refuse(answers.UNKNOWN)

    def _ehlo(self, argument: str) -> Answer:
        return self._hello("EHLO", argument, "ESMTP", self._reception.ehlo)

    def _helo(self, argument: str) -> Answer:
        return self._hello("HELO", argument, "SMTP", self._reception.helo)

    def _hello(self, verb: str, name: str, protocol: str, answer: Answer) -> Answer:
        if not name:
            return self.refuse(answers.NEEDS_ARGUMENT, verb)
        self.reset()
        self._origin = self._came_from(name[:MAX_HELO], protocol)
        return answer

    def _mail_from(self, argument: str) -> Answer:
        if self._origin is None:
            return self.refuse(answers.EHLO_FIRST, "MAIL")
        if self._mail is not None:
            return self.refuse(answers.NESTED_MAIL, "MAIL")
        mail = _parse_mail(argument)
        reception = self._reception
        if mail.size > reception.settings.max_message_size:
            return self.refuse(answers.TOO_BIG, "MAIL", mailbox=mail.sender)
        unhealthy = reception.store.unhealthy()
        if unhealthy is not None:
            return self.refuse(answers.STORE_FULL, "MAIL", mailbox=mail.sender, detail=unhealthy)
        self._mail = mail
        self.in_transaction = True
        return answers.SENDER_OK

    def _rcpt_to(self, argument: str) -> Answer:
        mail = self._mail
        if mail is None:
            return self.refuse(answers.MAIL_FIRST, "RCPT")
        key, recipient = _parse_rcpt(argument, mail.smtputf8)
        if not self._client.may_relay:
            return self.refuse(answers.RELAYING_DENIED, "RCPT", mailbox=recipient.address)
        recipients = self._recipients
        if key not in recipients:
            if len(recipients) >= self._reception.settings.max_recipients:
                return self.refuse(answers.TOO_MANY_RECIPIENTS, "RCPT", mailbox=recipient.address)
            recipients[key] = recipient
        return answers.RECIPIENT_OK

    def _data(self, argument: str) -> Answer:
        if argument:
            return self.refuse(answers.NO_ARGUMENT, "DATA")
        if self._mail is None:
            return self.refuse(answers.MAIL_FIRST, "DATA")
        if not self._recipients:
            return self.refuse(answers.NO_RECIPIENTS, "DATA")
        return answers.START_BODY

    def _rset(self, argument: str) -> Answer:
        if argument:
            return self.refuse(answers.NO_ARGUMENT, "RSET")
        self.reset()
        return answers.OK

    def _noop(self, argument: str) -> Answer:
        return answers.OK

    def _vrfy(self, argument: str) -> Answer:
        return answers.CANNOT_VERIFY if argument else self.refuse(answers.NEEDS_ARGUMENT, "VRFY")

    def _help(self, argument: str) -> Answer:
        return answers.HELP

    def _quit(self, argument: str) -> Answer:
        return self.refuse(answers.NO_ARGUMENT, "QUIT") if argument else answers.BYE


_COMMANDS: dict[str, Callable[[Dialog, str], Answer]] = {
    "EHLO": Dialog._ehlo,
    "HELO": Dialog._helo,
    "MAIL": Dialog._mail_from,
    "RCPT": Dialog._rcpt_to,
    "DATA": Dialog._data,
    "RSET": Dialog._rset,
    "NOOP": Dialog._noop,
    "VRFY": Dialog._vrfy,
    "HELP": Dialog._help,
    "QUIT": Dialog._quit,
}
