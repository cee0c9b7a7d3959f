"""The commands of a mail transaction: MAIL, RCPT, DATA, BDAT, RSET (RFC 5321 4.1.1, RFC 3030).

Policy, where the RFCs leave room:

- MAIL needs EHLO or HELO first. A recipient named twice (domains compared without case) is one.
- Who may not relay learns it at RCPT; who would have to log in for anything, at MAIL. Everybody may write to
  a sender that SRS has made here (`message/srs.py`): its hash says that this relay sent that sender's mail
  on. Not only from the null sender: answers that people have set up come with one, and who could misuse
  the address could as well write from `<>`. Mail to it goes to that one sender, and for `max_age` only.
- A stranger, who may do no more than that, gets no reports: the sender that a stranger names may be a third
  person. Wishes for reports are refused (555) where DSN is not offered, and have no effect where it is
  offered because the client may still log in.
- The octets of a refused BDAT are read and dropped before it is answered, and its transaction is over: what
  a client pipelines behind it must not run as commands. A BDAT without a size that can be
  read ends the session, because nobody knows where its octets end.
- A time of release in the past means at once; one beyond `max_hold` is refused (RFC 4865).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from zonerelay.inbound.access.networks import Reason
from zonerelay.inbound.access.strangers import TooManyGuessesError, WrongHashError
from zonerelay.inbound.limits.connections import client_key
from zonerelay.inbound.policy.api import Mail, Rcpt
from zonerelay.inbound.state import replies as answers
from zonerelay.inbound.state.questions import Verdict
from zonerelay.inbound.state.replies import Answer, Then, refused
from zonerelay.inbound.state.rewriting import renamed
from zonerelay.inbound.state.transaction import Transaction, recipient_key
from zonerelay.message.srs import Srs, SrsError
from zonerelay.model.address import Mailbox
from zonerelay.model.envelope import Notify, Recipient, Ret
from zonerelay.smtp.server.bdat import parse_bdat
from zonerelay.smtp.server.params import MailCommand, parse_mail, parse_rcpt
from zonerelay.smtp.server.paths import CommandError
from zonerelay.store.common import health

if TYPE_CHECKING:
    from zonerelay.inbound.session.commands import Dialog

REMEMBERED = 1024  # paths with parameters: the same come again and again. Not whole lines: AUTH's are secret
RECIPIENT_COST = 512  # octets of memory that a recipient of an open transaction stands for

_parse_mail = lru_cache(maxsize=REMEMBERED)(parse_mail)


@lru_cache(maxsize=REMEMBERED)
def _parse_rcpt(argument: str, smtputf8: bool, offered: frozenset[str]) -> tuple[str, Recipient]:
    """A recipient, and what it has in common with the same one in another spelling."""
    rcpt = parse_rcpt(argument, smtputf8=smtputf8, offered=offered)
    recipient = Recipient(address=rcpt.recipient, notify=rcpt.notify, orcpt=rcpt.orcpt)
    return recipient_key(rcpt.recipient), recipient


def mail(dialog: Dialog, argument: str) -> Answer:
    standing = dialog.standing
    if not standing.helo:
        return dialog.refuse(answers.EHLO_FIRST, "MAIL")
    if dialog.transaction is not None:
        return dialog.refuse(answers.NESTED_MAIL, "MAIL")
    if standing.grants.must_log_in:
        return dialog.refuse(answers.AUTH_FIRST, "MAIL")
    command = _parse_mail(argument, offered=standing.grants.mail_parameters)
    refusal = _mail_refusal(dialog, command)
    if refusal is not None:
        return refusal
    held_back = command.hold_for is not None or command.hold_until is not None
    release = _release(dialog, command) if held_back else 0.0
    transaction = Transaction(command, release=release, edits=dialog.edits)
    if Mail not in dialog.reception.consultants.asked:
        dialog.transaction = transaction
        return answers.SENDER_OK
    event = Mail(
        client=standing.info,
        sender=command.sender,
        size=command.size,
        body=command.body,
        smtputf8=command.smtputf8,
    )
    return dialog.ask(event, lambda verdict: _mail_decided(dialog, transaction, verdict))


def _mail_refusal(dialog: Dialog, command: MailCommand) -> Answer | None:
    reception = dialog.reception
    if command.size > reception.settings.max_message_size:
        return dialog.refuse(answers.TOO_BIG, "MAIL", mailbox=command.sender)
    unhealthy = reception.store.unhealthy()
    if unhealthy is not None:
        answer = answers.STORE_FULL if unhealthy == health.NO_SPACE else answers.STORE_TROUBLE
        return dialog.refuse(answer, "MAIL", mailbox=command.sender, detail=unhealthy)
    if dialog.standing.user is not None and not dialog.standing.may_send_as(command.sender):
        return dialog.refuse(answers.NOT_YOUR_ADDRESS, "MAIL", mailbox=command.sender)
    return None


def _release(dialog: Dialog, command: MailCommand) -> float:
    """Raises CommandError."""
    now = dialog.reception.clock.now()
    release = now + command.hold_for if command.hold_for is not None else command.hold_until or 0.0
    if release > now + dialog.reception.settings.max_hold:
        raise CommandError(answers.TOO_FAR_AHEAD)
    return release if release > now else 0.0


def _mail_decided(dialog: Dialog, transaction: Transaction, verdict: Verdict) -> Answer:
    if verdict.decision.reply is not None:
        return dialog.refuse_by(verdict, "MAIL", mailbox=transaction.mail.sender)
    transaction.decide(verdict.decision)
    dialog.transaction = transaction
    return answers.SENDER_OK


def rcpt(dialog: Dialog, argument: str) -> Answer:
    transaction = dialog.transaction
    if transaction is None:
        return dialog.refuse(answers.MAIL_FIRST, "RCPT")
    if transaction.chunked:
        return dialog.refuse(answers.IN_CHUNKS, "RCPT")
    grants = dialog.standing.grants
    key, recipient = _parse_rcpt(argument, transaction.mail.smtputf8, grants.rcpt_parameters)
    may_relay = grants.may_relay
    if "%" in recipient.address and _is_route(recipient.address, dialog.reception.hostname):
        return dialog.refuse(answers.PERCENT_ROUTE, "RCPT", mailbox=recipient.address)
    if dialog.reception.srs is not None:
        return _perhaps_a_report(dialog, transaction, dialog.reception.srs, recipient, may_relay=may_relay)
    return _take(dialog, transaction, key, recipient, recipient.address, may_relay=may_relay)


def _is_route(mailbox: Mailbox, hostname: str) -> bool:
    """`user%domain@relay`: with our own name behind it, it asks for another way. Elsewhere % is a letter."""
    local, _, domain = mailbox.rpartition("@")
    return domain.lower() == hostname.lower() and "%" in local.strip("%") and not local.startswith('"')


def _perhaps_a_report(
    dialog: Dialog, transaction: Transaction, srs: Srs, recipient: Recipient, *, may_relay: bool
) -> Answer:
    """To a sender that SRS has made here: it is for the one that is in it."""
    given, reception = recipient.address, dialog.reception
    strangers, client = reception.strangers, client_key(dialog.standing.client.address)

    def no(detail: str) -> Answer:
        return dialog.refuse(answers.NOT_OF_OURS, "RCPT", mailbox=given, detail=detail)

    try:
        first = strangers.reverse(srs, given, client, reception.clock)
    except TooManyGuessesError:
        return dialog.refuse(answers.TOO_MANY_GUESSES, "RCPT", mailbox=given)
    except WrongHashError as error:
        answer = no(str(error))
        dialog.delay = max(dialog.delay, error.delay)
        return answer
    except SrsError as error:
        return no(str(error))
    if first is not None:
        if not may_relay:
            if codes := strangers.refusal(first, reception.clock.monotonic()):
                return no(f"the next hop refuses it: {codes}")
            transaction.mail = replace(transaction.mail, ret=Ret.UNSET, envid="")
            recipient = Recipient(address=given, notify=Notify.NEVER)
        recipient, may_relay = renamed(recipient, first), True
    return _take(dialog, transaction, recipient_key(recipient.address), recipient, given, may_relay=may_relay)


def _take(
    dialog: Dialog,
    transaction: Transaction,
    key: str,
    recipient: Recipient,
    given: Mailbox,
    *,
    may_relay: bool,
) -> Answer:
    """`given` is what the client said; rules and the policy are asked about that."""
    refusal = _rcpt_refusal(dialog, transaction, key, given) if may_relay else answers.RELAYING_DENIED
    if refusal is not None:
        return dialog.refuse(refusal, "RCPT", mailbox=given)
    if key in transaction.recipients:
        return answers.RECIPIENT_OK
    if Rcpt in dialog.reception.consultants.asked:
        return _ask_about(dialog, transaction, key, recipient, given)
    _add(dialog, transaction, key, recipient, given)
    return answers.RECIPIENT_OK


def _rcpt_refusal(dialog: Dialog, transaction: Transaction, key: str, given: Mailbox) -> Answer | None:
    standing, reception = dialog.standing, dialog.reception
    if reception.access is not None:
        user = standing.user.name if standing.user is not None else ""
        sender, address = transaction.mail.sender, standing.client.address
        reply = reception.access.decide(address, user, sender, given)
        if reply is not None:
            return refused(reply, Reason.ACCESS)
    recipients = transaction.recipients
    if len(recipients) >= reception.settings.max_recipients and key not in recipients:
        return answers.TOO_MANY_RECIPIENTS
    return None


def _add(dialog: Dialog, transaction: Transaction, key: str, recipient: Recipient, given: Mailbox) -> None:
    transaction.recipients[key] = recipient
    if recipient.address is not given:
        transaction.rewritten.append(("recipient srs", recipient.address))
    transaction.cost += RECIPIENT_COST
    memory = dialog.reception.memory
    memory.used += RECIPIENT_COST
    if memory.full:
        memory.relieve()  # perhaps of this very session


def _ask_about(
    dialog: Dialog, transaction: Transaction, key: str, recipient: Recipient, given: Mailbox
) -> Answer:
    event = Rcpt(
        client=dialog.standing.info,
        sender=transaction.mail.sender,
        recipient=given,
        recipients_so_far=len(transaction.recipients),
    )

    def decided(verdict: Verdict) -> Answer:
        if verdict.decision.reply is not None:
            return dialog.refuse_by(verdict, "RCPT", mailbox=given)
        transaction.decide(verdict.decision, recipient.address)
        _add(dialog, transaction, key, recipient, given)
        return answers.RECIPIENT_OK

    return dialog.ask(event, decided)


def data(dialog: Dialog, argument: str) -> Answer:
    if argument:
        return dialog.refuse(answers.NO_ARGUMENT, "DATA")
    transaction = dialog.transaction
    if transaction is None:
        return dialog.refuse(answers.MAIL_FIRST, "DATA")
    if transaction.chunked:
        return dialog.refuse(answers.IN_CHUNKS, "DATA")
    if not transaction.recipients:
        return dialog.refuse(answers.NO_RECIPIENTS, "DATA")
    return answers.START_BODY


def bdat(dialog: Dialog, argument: str) -> Answer:
    try:
        size, last = parse_bdat(argument)
    except CommandError as error:
        return dialog.refuse(refused(error.reply, Reason.SYNTAX, Then.CLOSE), "BDAT")
    dialog.chunk = (size, last)
    if dialog.standing.grants.must_start_tls:
        return _refused_chunk(dialog, answers.TLS_FIRST, size)
    transaction, limit = dialog.transaction, dialog.reception.settings.max_message_size
    if transaction is None:
        return _refused_chunk(dialog, answers.MAIL_FIRST, size)
    if not transaction.recipients:
        return _refused_chunk(dialog, answers.NO_RECIPIENTS, size)
    transaction.octets += size
    if transaction.octets > limit:
        return _refused_chunk(dialog, answers.TOO_BIG, size)
    transaction.chunked = True
    return answers.TAKE_CHUNK


def _refused_chunk(dialog: Dialog, answer: Answer, size: int) -> Answer:
    dialog.reset()
    if size > 2 * dialog.reception.settings.max_message_size + answers.MAX_DRAINED:
        return dialog.refuse(replace(answer, then=Then.CLOSE), "BDAT")
    answer = dialog.refuse(answer, "BDAT")
    return answer if answer.then is Then.CLOSE else replace(answer, wire=b"", then=Then.DISCARD)


def rset(dialog: Dialog, argument: str) -> Answer:
    if argument:
        return dialog.refuse(answers.NO_ARGUMENT, "RSET")
    dialog.reset()
    return answers.OK
