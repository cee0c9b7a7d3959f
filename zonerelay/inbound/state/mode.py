"""Applies the mode of a user (`config/rails`) to the envelope, before anything is stored. No I/O.

- redirect: the whole message goes to the user's mailbox, once. Each address that it was for is in a field
  X-Original-To, the first `MAX_FIELDS` of them.
- copy: the mailbox is one more recipient, of whose delivery no report is made.
- capture, listed: `cleanup/deliveries` holds the mail that is not to be sent.

So routes, durability, reports and the queue treat such mail as any other.
"""

from __future__ import annotations

from zonerelay.config.rails import Mode
from zonerelay.inbound.state.transaction import Edits, Transaction, mailboxes
from zonerelay.model.address import Mailbox, recipient_key
from zonerelay.model.envelope import Notify, Recipient

FIELD = "X-Original-To"
MAX_FIELDS = 100


def apply_mode(transaction: Transaction) -> None:
    """The envelope is complete, and rewritten."""
    if transaction.allowance is None:
        return
    transaction.named = mailboxes(transaction.recipients.values())
    rails = transaction.allowance.rails
    mailbox = Mailbox(rails.mailbox)
    if rails.mode is Mode.REDIRECT:
        fields = tuple((FIELD, each) for each in transaction.named[:MAX_FIELDS])
        transaction.edits = transaction.edits.and_those_of(Edits(add=fields))
        transaction.recipients = {recipient_key(mailbox): Recipient(address=mailbox)}
        transaction.rewritten.append(("recipient mode=redirect", mailbox))
    elif rails.mode is Mode.COPY:
        copy = Recipient(address=mailbox, notify=Notify.NEVER)
        if recipient_key(mailbox) not in transaction.recipients:
            transaction.recipients[recipient_key(mailbox)] = copy
            transaction.rewritten.append(("recipient mode=copy", mailbox))
