"""Changes the envelope of a transaction as an aiosmtpd handler wants it. No I/O.

A handler may not do more than its client: the syntax of addresses, the permission to relay, the user's list
of senders, the [[access]] rules and `max_recipients` also apply to the addresses that it sets. If a check
fails, nothing has changed. An address with invalid syntax is the handler's error, so the reply is temporary
(rule 3).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from zonerelay.inbound.access.guard import Allowance
from zonerelay.inbound.policy.api import Changes, FailureKind
from zonerelay.inbound.refusal import Reason
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.client_state import ClientState
from zonerelay.inbound.state.context import ListenerContext
from zonerelay.inbound.state.replies import ServerReply, refused
from zonerelay.inbound.state.transaction import MailTransaction, renamed
from zonerelay.model.envelope import Mailbox, Recipient, recipient_key
from zonerelay.model.reply import Reply
from zonerelay.smtp.server.paths import CommandError, forward_path, require_ascii, reverse_path

UNUSABLE = refused(Reply(451, "3.0", "Policy not available now"), Reason.POLICY)


def apply(
    changes: Changes,
    transaction: MailTransaction,
    client_state: ClientState,
    context: ListenerContext,
    *,
    step: str,
    given: Recipient | None = None,
    given_address: str = "",
) -> tuple[ServerReply, str] | None:
    """Change the transaction, or return the refusal and its cause. `step` is the name of the policy's step.

    `given` is the recipient of the current RCPT command, and `given_address` its address in that command. The
    transaction does not include it yet.
    """
    mail, known = transaction.mail, transaction.recipients
    unknown = changes.removed - {each.address for each in known.values()} - {given_address}
    if unknown:
        return _unusable(context, step, f"it removed {min(unknown)}, which has another address here (SRS)")
    wanted = {key: each for key, each in known.items() if each.address not in changes.removed}
    try:
        sender = mail.sender
        if changes.sender is not None:
            sender = _checked(reverse_path(f"<{changes.sender}>"), smtputf8=mail.smtputf8)
        added = [_checked(forward_path(f"<{each}>"), smtputf8=mail.smtputf8) for each in changes.added]
    except CommandError as error:
        return _unusable(context, step, f"it set an invalid address: {error.reply}")
    for mailbox in added:
        recipient = Recipient(address=mailbox) if given is None else renamed(given, mailbox)
        wanted.setdefault(recipient_key(mailbox), recipient)
    addresses = [each.address for each in wanted.values()]
    if given is not None and given_address not in changes.removed:
        addresses.append(given.address)
    refusal = _refusal(sender, addresses, changes, client_state, context)
    if refusal is None and transaction.allowance is not None:
        refusal = _guarded(transaction.allowance, addresses, context)
    if refusal is not None:
        return refusal
    transaction.mail = mail if sender == mail.sender else structs.replace(mail, sender=sender)
    transaction.recipients.clear()  # the same object, because it identifies the transaction
    transaction.recipients.update(wanted)
    transaction.rewritten += [("recipient policy", mailbox) for mailbox in added]
    return None


def _unusable(context: ListenerContext, step: str, cause: str) -> tuple[ServerReply, str]:
    context.events.policy_failed(step, FailureKind.BAD_DECISION, cause)
    return UNUSABLE, cause


def _refusal(
    sender: Mailbox,
    addresses: Sequence[Mailbox],
    changes: Changes,
    client_state: ClientState,
    context: ListenerContext,
) -> tuple[ServerReply, str] | None:
    if changes.sender is not None and not client_state.may_send_as(sender):
        return replies.NOT_YOUR_ADDRESS, f"the handler changed the sender to {sender}"
    if not changes.added and changes.sender is None:
        return None
    if changes.added and not client_state.grants.may_relay:
        return replies.RELAYING_DENIED, f"the handler added {changes.added[0]}"
    most = context.settings.max_recipients
    if len(addresses) > most:
        return replies.too_many_recipients(most), "including those added by the handler"
    if context.access is not None:
        for address in addresses:
            reply = context.access.decide(client_state.origin, sender, address)
            if reply is not None:
                return refused(reply, Reason.ACCESS), f"{address} after the handler's changes"
    return None


def _guarded(
    allowance: Allowance, addresses: Sequence[Mailbox], context: ListenerContext
) -> tuple[ServerReply, str] | None:
    for number, address in enumerate(addresses):
        refusal = allowance.rcpt_refusal(address, number)
        if refusal is not None:
            return context.guarded(refusal), f"{address} after the handler's changes"
    return None


def _checked(parsed: tuple[Mailbox, str], *, smtputf8: bool) -> Mailbox:
    """Return the address of a parsed path. Raise CommandError if the path is invalid."""
    mailbox, rest = parsed
    if rest:
        raise CommandError(Reply(501, "1.3", "Bad address syntax"))
    if not smtputf8:
        require_ascii(mailbox)
    return mailbox
