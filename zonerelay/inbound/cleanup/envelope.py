"""Checks the envelope of a message step by step: its sender, its recipients, then its content. No I/O.

All checks of a submission are here and in `intake`, for every way of submitting mail: `begin` for the sender,
`add` for one recipient, `new_intake` when the envelope is complete. A step returns the reply for an SMTP
client. A reply with a reason is a refusal.

Policy, where the RFCs leave a choice:

- A recipient that is named twice (domains compared without case) is one recipient.
- A client that may not relay is refused at RCPT. However, every client may send to an address that SRS has
  made here (`message/srs.py`): its hash proves that this relay forwarded mail of that sender. The envelope
  sender of such mail need not be the null sender, because automatic replies have one, and an abuser of the
  address could also use `<>`. The mail is sent to that one address, and only until `max_age` has passed.
- An unauthenticated client, which may do no more than that, gets no DSNs: the sender that it names may be a
  third party.
- A release time in the past means immediately; one beyond `max_hold` is refused (RFC 4865).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from zonerelay.config.settings import ListenerAuth
from zonerelay.config.user_limits import NONE
from zonerelay.inbound.access.guard import Allowance, Guard
from zonerelay.inbound.cleanup.intake import Intake
from zonerelay.inbound.cleanup.submission import SubmittingClient
from zonerelay.inbound.cleanup.whole_message import WholeIntake
from zonerelay.inbound.limits.auth_failures import TooManyGuessesError, WrongHashError
from zonerelay.inbound.limits.connections import client_key
from zonerelay.inbound.policy import Mail, Rcpt
from zonerelay.inbound.policy.api import Changes, WholeMessage
from zonerelay.inbound.refusal import Reason, Refusal
from zonerelay.inbound.state import changed_envelope, replies
from zonerelay.inbound.state.context import SuspensionCheck
from zonerelay.inbound.state.permissions import apply_mode
from zonerelay.inbound.state.questions import LookupResult, UserLimitsLookup
from zonerelay.inbound.state.replies import ServerReply, refused
from zonerelay.inbound.state.rewriting import renamed
from zonerelay.inbound.state.transaction import RECIPIENT_COST, MailTransaction
from zonerelay.message.srs import Srs, SrsError
from zonerelay.model.address import Mailbox, recipient_key
from zonerelay.model.envelope import Notify, Recipient, Ret
from zonerelay.smtp.server.params import MailCommand
from zonerelay.store.contract import Unhealthy


def begin(submission: SubmittingClient, command: MailCommand, key: str | None = None) -> ServerReply:
    """Start a transaction for this sender. `key` is the idempotency key, if the client set it outside of the
    message, "" if it has none, and None if the header may contain one.
    """
    refusal = _mail_refusal(submission, command)
    if refusal is not None:
        return refusal
    release = 0.0
    if command.hold_for is not None or command.hold_until is not None:
        now = submission.context.clock.now()
        release = now + command.hold_for if command.hold_for is not None else command.hold_until or 0.0
        if release > now + submission.context.settings.max_hold:
            return submission.refuse(replies.TOO_FAR_AHEAD, "MAIL", mailbox=command.sender)
        release = release if release > now else 0.0
    transaction = MailTransaction(command, release=release, edits=submission.edits)
    transaction.idempotency_key = key or ""
    transaction.key_may_follow = key is None
    client_state = submission.client_state
    if client_state.user is not None and submission.context.guard is not None:
        return _guarded(submission, transaction, submission.context.guard, client_state.user.name)
    return _begin(submission, transaction)


def _guarded(
    submission: SubmittingClient, transaction: MailTransaction, guard: Guard, user: str
) -> ServerReply:
    """Check the limits of the user. This needs a lookup if they are not available without reading a file."""

    def decided(verdict: LookupResult) -> ServerReply:
        if verdict.decision.reply is not None:
            return submission.refuse_by(verdict, "MAIL", mailbox=transaction.mail.sender)
        return _allowed(submission, transaction, verdict.allowance)

    known = guard.known(user)
    if known is None:
        return submission.ask(UserLimitsLookup(guard, user), decided)
    return _allowed(submission, transaction, known)


def _allowed(
    submission: SubmittingClient, transaction: MailTransaction, allowance: Allowance | Refusal | None
) -> ServerReply:
    if isinstance(allowance, Allowance):
        client, now = submission.client_state.client.address, submission.context.clock.now()
        refusal = allowance.mail_refusal(client, now, transaction.mail.size)
        if allowance.rails is not NONE:
            transaction.allowance = allowance
        submission.client_state.go_by(allowance.rails.idempotency)
    else:
        refusal = allowance
    if refusal is not None and not _is_for_later(transaction, refusal):
        answer = submission.refuse_guarded(refusal, "MAIL", mailbox=transaction.mail.sender)
        if not transaction.idempotency_key or refusal.reason is not Reason.QUOTA:
            return answer
        transaction.unless_repeated = answer
    return _begin(submission, transaction)


def _is_for_later(transaction: MailTransaction, refusal: Refusal) -> bool:
    """Return whether the refusal waits for the header, because this may be a repetition of a message that was
    accepted before the quota was used up.
    """
    if refusal.reason is not Reason.QUOTA or refusal.reply.is_permanent or not transaction.key_may_follow:
        return False
    if transaction.over_quota is None and not transaction.recipients:
        transaction.over_quota = refusal
    return transaction.over_quota is not None


def _begin(submission: SubmittingClient, transaction: MailTransaction) -> ServerReply:
    command, client_state = transaction.mail, submission.client_state
    if Mail not in submission.context.consultants.asked:
        submission.transaction = transaction
        return replies.SENDER_OK
    event = Mail(
        client=client_state.info,
        sender=command.sender,
        size=command.size,
        body=command.body,
        smtputf8=command.smtputf8,
        recipients=transaction.recipients,
    )
    return submission.ask(event, lambda verdict: _mail_decided(submission, transaction, verdict))


def _mail_refusal(submission: SubmittingClient, command: MailCommand) -> ServerReply | None:
    context = submission.context
    if command.size > context.settings.max_message_size:
        answer = replies.too_big(context.settings.max_message_size)
        return submission.refuse(answer, "MAIL", mailbox=command.sender)
    unhealthy = context.store.unhealthy()
    if unhealthy is not None:
        answer = replies.STORE_FULL if unhealthy is Unhealthy.NO_SPACE else replies.STORE_FAILURE
        return submission.refuse(answer, "MAIL", mailbox=command.sender, detail=unhealthy)
    if submission.client_state.user is not None and not submission.client_state.may_send_as(command.sender):
        return submission.refuse(replies.NOT_YOUR_ADDRESS, "MAIL", mailbox=command.sender)
    orders = context.orders
    if (
        orders is not None
        and orders.are_refusing
        and (order := orders.refuse(submission.client_state.origin, command.sender, None, False))
    ):
        return submission.refuse(
            replies.SUSPENDED, "MAIL", mailbox=command.sender, detail=f"suspension {order}"
        )
    return None


def _mail_decided(
    submission: SubmittingClient, transaction: MailTransaction, verdict: LookupResult
) -> ServerReply:
    if verdict.decision.reply is not None:
        return submission.refuse_by(verdict, "MAIL", mailbox=transaction.mail.sender)
    refusal = _changed(submission, transaction, verdict, "MAIL")
    if refusal is not None:
        return refusal
    transaction.decide(verdict.decision)
    submission.transaction = transaction
    return replies.SENDER_OK


def _changed(
    submission: SubmittingClient,
    transaction: MailTransaction,
    verdict: LookupResult,
    command: str,
    *,
    given: Recipient | None = None,
    given_address: str = "",
) -> ServerReply | None:
    """Apply a handler's changes to the envelope, or return the refusal if they are not allowed."""
    changes = verdict.decision
    if not (isinstance(changes, Changes) and changes.of_envelope):
        return None
    before = len(transaction.recipients)
    failed = changed_envelope.apply(
        changes,
        transaction,
        submission.client_state,
        submission.context,
        step=command.lower(),
        given=given,
        given_address=given_address,
    )
    if failed is None:
        cost = (len(transaction.recipients) - before) * RECIPIENT_COST
        transaction.cost += cost
        submission.context.memory.used += cost
        return None
    return submission.refuse(failed[0], command, mailbox=transaction.mail.sender, detail=failed[1])


def add(
    submission: SubmittingClient, transaction: MailTransaction, key: str, recipient: Recipient
) -> ServerReply:
    """Add a recipient. `key` is its `recipient_key`."""
    may_relay = submission.client_state.grants.may_relay
    if "%" in recipient.address and _is_route(recipient.address, submission.context.hostname):
        return submission.refuse(replies.PERCENT_ROUTE, "RCPT", mailbox=recipient.address)
    if submission.context.srs is not None:
        return _perhaps_a_report(
            submission, transaction, submission.context.srs, recipient, may_relay=may_relay
        )
    return _take(submission, transaction, key, recipient, recipient.address, may_relay=may_relay)


def _is_route(mailbox: Mailbox, hostname: str) -> bool:
    """Return whether `user%domain@relay` is a source route: its domain is our own. Elsewhere, % has no
    meaning.
    """
    local, _, domain = mailbox.rpartition("@")
    return domain.lower() == hostname.lower() and "%" in local.strip("%") and not local.startswith('"')


def _perhaps_a_report(
    submission: SubmittingClient,
    transaction: MailTransaction,
    srs: Srs,
    recipient: Recipient,
    *,
    may_relay: bool,
) -> ServerReply:
    """Add a recipient. Replace an address that SRS has made here by the sender that it contains."""
    given, context = recipient.address, submission.context
    strangers, client = context.srs_recipients, client_key(submission.client_state.client.address)

    def no(detail: str) -> ServerReply:
        return submission.refuse(replies.NOT_OF_OURS, "RCPT", mailbox=given, detail=detail)

    try:
        first = strangers.reverse(srs, given, client, context.clock)
    except TooManyGuessesError:
        return submission.refuse(replies.TOO_MANY_GUESSES, "RCPT", mailbox=given)
    except WrongHashError as error:
        answer = no(str(error))
        submission.delay = max(submission.delay, error.delay)
        return answer
    except SrsError as error:
        return no(str(error))
    if first is not None:
        if not may_relay:
            if codes := strangers.refusal(first, context.clock.monotonic()):
                return no(f"the next hop rejects it: {codes}")
            transaction.mail = replace(transaction.mail, ret=Ret.UNSET, envid="")
            recipient = Recipient(address=given, notify=Notify.NEVER)
        recipient, may_relay = renamed(recipient, first), True
    return _take(
        submission, transaction, recipient_key(recipient.address), recipient, given, may_relay=may_relay
    )


def _take(
    submission: SubmittingClient,
    transaction: MailTransaction,
    key: str,
    recipient: Recipient,
    given: Mailbox,
    *,
    may_relay: bool,
) -> ServerReply:
    """Check and add a recipient. `given` is the address in RCPT, which is used by access rules and the
    policy.
    """
    refusal = _rcpt_refusal(submission, transaction, key, given) if may_relay else _denied(submission)
    if refusal is not None:
        return submission.refuse(refusal, "RCPT", mailbox=given)
    orders = submission.context.orders
    if (
        orders is not None
        and orders.are_refusing
        and (order := _order_against(submission, orders, transaction, given))
    ):
        return submission.refuse(replies.SUSPENDED, "RCPT", mailbox=given, detail=f"suspension {order}")
    if key in transaction.recipients:
        return replies.RECIPIENT_OK
    if transaction.allowance is not None:
        barred = transaction.allowance.rcpt_refusal(given, len(transaction.recipients))
        if barred is not None and not _is_for_later(transaction, barred):
            return submission.refuse_guarded(barred, "RCPT", mailbox=given)
    if Rcpt in submission.context.consultants.asked:
        return _ask_about(submission, transaction, key, recipient, given)
    _add(submission, transaction, key, recipient, given)
    return replies.RECIPIENT_OK


def _denied(submission: SubmittingClient) -> ServerReply:
    state = submission.client_state
    may_log_in = submission.context.settings.auth is not ListenerAuth.OFF
    return replies.relaying_denied(state.client.address, may_log_in=may_log_in)


def _order_against(
    submission: SubmittingClient, orders: SuspensionCheck, transaction: MailTransaction, given: Mailbox
) -> str:
    context, client_state = submission.context, submission.client_state
    zone_header, user = context.zone_header, client_state.user
    names_zone = zone_header is not None and zone_header.trusts(
        client_state.client.address, "" if user is None else user.name
    )
    return orders.refuse(client_state.origin, transaction.mail.sender, given, names_zone)


def _rcpt_refusal(
    submission: SubmittingClient, transaction: MailTransaction, key: str, given: Mailbox
) -> ServerReply | None:
    client_state, context = submission.client_state, submission.context
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
    submission: SubmittingClient, transaction: MailTransaction, key: str, recipient: Recipient, given: Mailbox
) -> None:
    transaction.recipients[key] = recipient
    if recipient.address is not given:
        transaction.rewritten.append(("recipient srs", recipient.address))
    transaction.cost += RECIPIENT_COST
    memory = submission.context.memory
    memory.used += RECIPIENT_COST
    if memory.full:
        memory.relieve()  # this may end the current session


def _ask_about(
    submission: SubmittingClient, transaction: MailTransaction, key: str, recipient: Recipient, given: Mailbox
) -> ServerReply:
    event = Rcpt(
        client=submission.client_state.info,
        sender=transaction.mail.sender,
        recipient=given,
        recipients_so_far=len(transaction.recipients),
        mail=transaction.mail,
        recipients=transaction.recipients,
    )

    def decided(verdict: LookupResult) -> ServerReply:
        if verdict.decision.reply is not None:
            return submission.refuse_by(verdict, "RCPT", mailbox=given)
        refusal = _changed(submission, transaction, verdict, "RCPT", given=recipient, given_address=given)
        if refusal is not None:
            return refusal
        transaction.decide(verdict.decision, recipient.address)
        if not (isinstance(verdict.decision, Changes) and given in verdict.decision.removed):
            _add(submission, transaction, key, recipient, given)
        return replies.RECIPIENT_OK

    return submission.ask(event, decided)


def new_intake(submission: SubmittingClient, on_room: Callable[[], None]) -> Intake:
    """Return the intake for the content, now that the envelope is complete. `on_room`: see `Intake`."""
    context, transaction, client_state = submission.context, submission.transaction, submission.client_state
    assert transaction is not None
    origin = client_state.origin
    kind: type[Intake] = Intake
    if WholeMessage in context.consultants.asked and transaction.unless_repeated is None:
        kind = WholeIntake
    elif context.rewriting is not None:
        context.rewriting.rewrite(transaction, origin)
    if kind is Intake:
        apply_mode(transaction)
    envelope = transaction.envelope(
        context.ids.next(),
        context.clock.now(),
        origin,
        client_state.priority or context.settings.priority,
    )
    return kind(envelope, transaction, client_state, context, on_room)
