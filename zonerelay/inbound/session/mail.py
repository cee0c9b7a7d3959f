"""The commands of a mail transaction: MAIL, RCPT, DATA, BDAT, RSET (RFC 5321 4.1.1, RFC 3030).

Policy, where the RFCs leave room:

- MAIL needs EHLO or HELO first. A recipient named twice (domains compared without case) is one.
- A client that may not relay is refused at RCPT; one that has to log in for anything, at MAIL. Every client
  may write to a sender that SRS has made here (`message/srs.py`): its hash proves that this relay sent that
  sender's mail on. The envelope sender of such mail need not be the null sender: automatic answers come with
  one, and an abuser of the address could write from `<>` as well. The mail goes to that one sender, and for
  `max_age` only.
- A stranger, which may do no more than that, gets no reports: the sender that it names may be a third person.
  Wishes for reports are refused (555) where DSN is not offered, and have no effect where it is offered
  because the client may still log in.
- The octets of a refused BDAT are read and dropped before it is answered, and its transaction is over: what a
  client pipelines behind it must not run as commands. A BDAT without a readable size ends the session,
  because the end of its octets is unknown.
- A time of release in the past means at once; one beyond `max_hold` is refused (RFC 4865).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from zonerelay.config.rails import NONE
from zonerelay.config.settings import ListenerAuth
from zonerelay.inbound.access.guard import Allowance, Guard, Refusal
from zonerelay.inbound.limits.connections import client_key
from zonerelay.inbound.limits.srs_recipients import TooManyGuessesError, WrongHashError
from zonerelay.inbound.policy import Mail, Rcpt
from zonerelay.inbound.policy.changes import Changes, Rset
from zonerelay.inbound.refusal import Reason
from zonerelay.inbound.session.conversation import Conversation
from zonerelay.inbound.state import changed_envelope, replies
from zonerelay.inbound.state.context import RefusesMail
from zonerelay.inbound.state.questions import Allow, Verdict
from zonerelay.inbound.state.replies import ServerReply, Then, refused
from zonerelay.inbound.state.rewriting import renamed
from zonerelay.inbound.state.transaction import RECIPIENT_COST, Transaction
from zonerelay.message.srs import Srs, SrsError
from zonerelay.model.address import Mailbox, recipient_key
from zonerelay.model.envelope import Notify, Recipient, Ret
from zonerelay.smtp.server.bdat import parse_bdat
from zonerelay.smtp.server.params import HTTP_MAIL_PARAMETERS, MailCommand, parse_mail, parse_rcpt
from zonerelay.smtp.server.paths import CommandError
from zonerelay.store.contract import Unhealthy

REMEMBERED = 1024  # paths with parameters: the same come again and again. Not whole lines: AUTH's are secret

_parse_mail = lru_cache(maxsize=REMEMBERED)(parse_mail)


@lru_cache(maxsize=REMEMBERED)
def _parse_rcpt(argument: str, smtputf8: bool, offered: frozenset[str]) -> tuple[str, Recipient]:
    """Return the key of a recipient (see `recipient_key`), and the recipient."""
    recipient = parse_rcpt(argument, smtputf8=smtputf8, offered=offered)
    return recipient_key(recipient.address), recipient


def mail(conversation: Conversation, argument: str) -> ServerReply:
    client_state = conversation.client_state
    if not client_state.helo:
        return conversation.refuse(replies.EHLO_FIRST, "MAIL")
    if conversation.transaction is not None:
        return conversation.refuse(replies.NESTED_MAIL, "MAIL")
    if client_state.grants.must_log_in:
        return conversation.refuse(replies.AUTH_FIRST, "MAIL")
    offered = client_state.grants.mail_parameters
    if client_state.client.over_http:
        offered |= HTTP_MAIL_PARAMETERS
    command = _parse_mail(argument, offered=offered)
    refusal = _mail_refusal(conversation, command)
    if refusal is not None:
        return refusal
    held_back = command.hold_for is not None or command.hold_until is not None
    release = _release(conversation, command) if held_back else 0.0
    transaction = Transaction(command, release=release, edits=conversation.edits)
    if client_state.user is not None and conversation.context.guard is not None:
        return _guarded(conversation, transaction, conversation.context.guard, client_state.user.name)
    return _begin(conversation, transaction)


def _guarded(conversation: Conversation, transaction: Transaction, guard: Guard, user: str) -> ServerReply:
    """Hold the user to its guard rails; a file has to be read, or a usage, when it is not known at once."""

    def decided(verdict: Verdict) -> ServerReply:
        if verdict.decision.reply is not None:
            return conversation.refuse_by(verdict, "MAIL", mailbox=transaction.mail.sender)
        return _allowed(conversation, transaction, verdict.allowance)

    known = guard.known(user)
    if known is None:
        return conversation.ask(Allow(guard, user), decided)
    return _allowed(conversation, transaction, known)


def _allowed(
    conversation: Conversation, transaction: Transaction, allowance: Allowance | Refusal | None
) -> ServerReply:
    if isinstance(allowance, Allowance):
        client, now = conversation.client_state.client.address, conversation.context.clock.now()
        refusal = allowance.mail_refusal(client, now, transaction.mail.size)
        if allowance.rails is not NONE:
            transaction.allowance = allowance
        conversation.client_state.go_by(allowance.rails.idempotency)
    else:
        refusal = allowance
    if refusal is not None:
        return conversation.refuse_guarded(refusal, "MAIL", mailbox=transaction.mail.sender)
    return _begin(conversation, transaction)


def _begin(conversation: Conversation, transaction: Transaction) -> ServerReply:
    command, client_state = transaction.mail, conversation.client_state
    if Mail not in conversation.context.consultants.asked:
        conversation.transaction = transaction
        return replies.SENDER_OK
    event = Mail(
        client=client_state.info,
        sender=command.sender,
        size=command.size,
        body=command.body,
        smtputf8=command.smtputf8,
        recipients=transaction.recipients,
    )
    return conversation.ask(event, lambda verdict: _mail_decided(conversation, transaction, verdict))


def _mail_refusal(conversation: Conversation, command: MailCommand) -> ServerReply | None:
    context = conversation.context
    if command.size > context.settings.max_message_size:
        answer = replies.too_big(context.settings.max_message_size)
        return conversation.refuse(answer, "MAIL", mailbox=command.sender)
    unhealthy = context.store.unhealthy()
    if unhealthy is not None:
        answer = replies.STORE_FULL if unhealthy is Unhealthy.NO_SPACE else replies.STORE_TROUBLE
        return conversation.refuse(answer, "MAIL", mailbox=command.sender, detail=unhealthy)
    if conversation.client_state.user is not None and not conversation.client_state.may_send_as(
        command.sender
    ):
        return conversation.refuse(replies.NOT_YOUR_ADDRESS, "MAIL", mailbox=command.sender)
    orders = context.orders
    if (
        orders is not None
        and orders.are_refusing
        and (order := orders.refuse(conversation.client_state.origin, command.sender, None, False))
    ):
        return conversation.refuse(
            replies.SUSPENDED, "MAIL", mailbox=command.sender, detail=f"by order {order}"
        )
    return None


def _release(conversation: Conversation, command: MailCommand) -> float:
    """Raises CommandError."""
    now = conversation.context.clock.now()
    release = now + command.hold_for if command.hold_for is not None else command.hold_until or 0.0
    if release > now + conversation.context.settings.max_hold:
        raise CommandError(replies.TOO_FAR_AHEAD)
    return release if release > now else 0.0


def _mail_decided(conversation: Conversation, transaction: Transaction, verdict: Verdict) -> ServerReply:
    if verdict.decision.reply is not None:
        return conversation.refuse_by(verdict, "MAIL", mailbox=transaction.mail.sender)
    refusal = _changed(conversation, transaction, verdict, "MAIL")
    if refusal is not None:
        return refusal
    transaction.decide(verdict.decision)
    conversation.transaction = transaction
    return replies.SENDER_OK


def _changed(
    conversation: Conversation,
    transaction: Transaction,
    verdict: Verdict,
    command: str,
    *,
    given: Recipient | None = None,
    given_address: str = "",
) -> ServerReply | None:
    """Apply a handler's changes to the envelope. Return the refusal when they are not allowed."""
    changes = verdict.decision
    if not (isinstance(changes, Changes) and changes.of_envelope):
        return None
    before = len(transaction.recipients)
    failed = changed_envelope.apply(
        changes,
        transaction,
        conversation.client_state,
        conversation.context,
        step=command.lower(),
        given=given,
        given_address=given_address,
    )
    if failed is None:
        cost = (len(transaction.recipients) - before) * RECIPIENT_COST
        transaction.cost += cost
        conversation.context.memory.used += cost
        return None
    return conversation.refuse(failed[0], command, mailbox=transaction.mail.sender, detail=failed[1])


def rcpt(conversation: Conversation, argument: str) -> ServerReply:
    transaction = conversation.transaction
    if transaction is None:
        return conversation.refuse(replies.MAIL_FIRST, "RCPT")
    if transaction.chunked:
        return conversation.refuse(replies.IN_CHUNKS, "RCPT")
    grants = conversation.client_state.grants
    key, recipient = _parse_rcpt(argument, transaction.mail.smtputf8, grants.rcpt_parameters)
    may_relay = grants.may_relay
    if "%" in recipient.address and _is_route(recipient.address, conversation.context.hostname):
        return conversation.refuse(replies.PERCENT_ROUTE, "RCPT", mailbox=recipient.address)
    if conversation.context.srs is not None:
        return _perhaps_a_report(
            conversation, transaction, conversation.context.srs, recipient, may_relay=may_relay
        )
    return _take(conversation, transaction, key, recipient, recipient.address, may_relay=may_relay)


def _is_route(mailbox: Mailbox, hostname: str) -> bool:
    """`user%domain@relay`: a source route when the domain is our own. Elsewhere % is a letter."""
    local, _, domain = mailbox.rpartition("@")
    return domain.lower() == hostname.lower() and "%" in local.strip("%") and not local.startswith('"')


def _perhaps_a_report(
    conversation: Conversation, transaction: Transaction, srs: Srs, recipient: Recipient, *, may_relay: bool
) -> ServerReply:
    """Take mail to a sender that SRS has made here for the sender that is in it."""
    given, context = recipient.address, conversation.context
    strangers, client = context.srs_recipients, client_key(conversation.client_state.client.address)

    def no(detail: str) -> ServerReply:
        return conversation.refuse(replies.NOT_OF_OURS, "RCPT", mailbox=given, detail=detail)

    try:
        first = strangers.reverse(srs, given, client, context.clock)
    except TooManyGuessesError:
        return conversation.refuse(replies.TOO_MANY_GUESSES, "RCPT", mailbox=given)
    except WrongHashError as error:
        answer = no(str(error))
        conversation.delay = max(conversation.delay, error.delay)
        return answer
    except SrsError as error:
        return no(str(error))
    if first is not None:
        if not may_relay:
            if codes := strangers.refusal(first, context.clock.monotonic()):
                return no(f"the next hop refuses it: {codes}")
            transaction.mail = replace(transaction.mail, ret=Ret.UNSET, envid="")
            recipient = Recipient(address=given, notify=Notify.NEVER)
        recipient, may_relay = renamed(recipient, first), True
    return _take(
        conversation, transaction, recipient_key(recipient.address), recipient, given, may_relay=may_relay
    )


def _take(
    conversation: Conversation,
    transaction: Transaction,
    key: str,
    recipient: Recipient,
    given: Mailbox,
    *,
    may_relay: bool,
) -> ServerReply:
    """`given` is the address in RCPT: rules and the policy are asked about that one."""
    refusal = _rcpt_refusal(conversation, transaction, key, given) if may_relay else _denied(conversation)
    if refusal is not None:
        return conversation.refuse(refusal, "RCPT", mailbox=given)
    orders = conversation.context.orders
    if (
        orders is not None
        and orders.are_refusing
        and (order := _order_against(conversation, orders, transaction, given))
    ):
        return conversation.refuse(replies.SUSPENDED, "RCPT", mailbox=given, detail=f"by order {order}")
    if key in transaction.recipients:
        return replies.RECIPIENT_OK
    if transaction.allowance is not None:
        barred = transaction.allowance.rcpt_refusal(given, len(transaction.recipients))
        if barred is not None:
            return conversation.refuse_guarded(barred, "RCPT", mailbox=given)
    if Rcpt in conversation.context.consultants.asked:
        return _ask_about(conversation, transaction, key, recipient, given)
    _add(conversation, transaction, key, recipient, given)
    return replies.RECIPIENT_OK


def _denied(conversation: Conversation) -> ServerReply:
    state = conversation.client_state
    may_log_in = conversation.context.settings.auth is not ListenerAuth.OFF
    return replies.relaying_denied(state.client.address, may_log_in=may_log_in)


def _order_against(
    conversation: Conversation, orders: RefusesMail, transaction: Transaction, given: Mailbox
) -> str:
    context, client_state = conversation.context, conversation.client_state
    zone_header, user = context.zone_header, client_state.user
    names_zone = zone_header is not None and zone_header.trusts(
        client_state.client.address, "" if user is None else user.name
    )
    return orders.refuse(client_state.origin, transaction.mail.sender, given, names_zone)


def _rcpt_refusal(
    conversation: Conversation, transaction: Transaction, key: str, given: Mailbox
) -> ServerReply | None:
    client_state, context = conversation.client_state, conversation.context
    if context.access is not None:
        user = client_state.user.name if client_state.user is not None else ""
        sender, address = transaction.mail.sender, client_state.client.address
        reply = context.access.decide(address, user, sender, given)
        if reply is not None:
            return refused(reply, Reason.ACCESS)
    recipients = transaction.recipients
    if len(recipients) >= context.settings.max_recipients and key not in recipients:
        return replies.too_many_recipients(context.settings.max_recipients)
    return None


def _add(
    conversation: Conversation, transaction: Transaction, key: str, recipient: Recipient, given: Mailbox
) -> None:
    transaction.recipients[key] = recipient
    if recipient.address is not given:
        transaction.rewritten.append(("recipient srs", recipient.address))
    transaction.cost += RECIPIENT_COST
    memory = conversation.context.memory
    memory.used += RECIPIENT_COST
    if memory.full:
        memory.relieve()  # perhaps of this very session


def _ask_about(
    conversation: Conversation, transaction: Transaction, key: str, recipient: Recipient, given: Mailbox
) -> ServerReply:
    event = Rcpt(
        client=conversation.client_state.info,
        sender=transaction.mail.sender,
        recipient=given,
        recipients_so_far=len(transaction.recipients),
        mail=transaction.mail,
        recipients=transaction.recipients,
    )

    def decided(verdict: Verdict) -> ServerReply:
        if verdict.decision.reply is not None:
            return conversation.refuse_by(verdict, "RCPT", mailbox=given)
        refusal = _changed(conversation, transaction, verdict, "RCPT", given=recipient, given_address=given)
        if refusal is not None:
            return refusal
        transaction.decide(verdict.decision, recipient.address)
        if not (isinstance(verdict.decision, Changes) and given in verdict.decision.removed):
            _add(conversation, transaction, key, recipient, given)
        return replies.RECIPIENT_OK

    return conversation.ask(event, decided)


def data(conversation: Conversation, argument: str) -> ServerReply:
    if argument:
        return conversation.refuse(replies.NO_ARGUMENT, "DATA")
    transaction = conversation.transaction
    if transaction is None:
        return conversation.refuse(replies.MAIL_FIRST, "DATA")
    if transaction.chunked:
        return conversation.refuse(replies.IN_CHUNKS, "DATA")
    if not transaction.recipients:
        return conversation.refuse(replies.NO_RECIPIENTS, "DATA")
    return replies.START_BODY


def bdat(conversation: Conversation, argument: str) -> ServerReply:
    try:
        size, last = parse_bdat(argument)
    except CommandError as error:
        return conversation.refuse(refused(error.reply, Reason.SYNTAX, Then.CLOSE), "BDAT")
    conversation.chunk = (size, last)
    if conversation.client_state.grants.must_start_tls:
        return _refused_chunk(conversation, replies.TLS_FIRST, size)
    transaction, limit = conversation.transaction, conversation.context.settings.max_message_size
    if transaction is None:
        return _refused_chunk(conversation, replies.MAIL_FIRST, size)
    if not transaction.recipients:
        return _refused_chunk(conversation, replies.NO_RECIPIENTS, size)
    transaction.octets += size
    if transaction.octets > limit:
        return _refused_chunk(conversation, replies.too_big(limit), size)
    transaction.chunked = True
    return replies.TAKE_CHUNK


def _refused_chunk(conversation: Conversation, answer: ServerReply, size: int) -> ServerReply:
    conversation.reset()
    if size > 2 * conversation.context.settings.max_message_size + replies.MAX_DRAINED:
        return conversation.refuse(replace(answer, then=Then.CLOSE), "BDAT")
    answer = conversation.refuse(answer, "BDAT")
    return (
        answer
        if answer.then is Then.CLOSE
        else replace(answer, wire=b"", later=answer.wire, then=Then.DISCARD)
    )


def rset(conversation: Conversation, argument: str) -> ServerReply:
    if argument:
        return conversation.refuse(replies.NO_ARGUMENT, "RSET")
    conversation.reset()
    if Rset not in conversation.context.consultants.asked:
        return replies.OK
    return conversation.ask_handler(Rset(client=conversation.client_state.info), "RSET", replies.OK)
