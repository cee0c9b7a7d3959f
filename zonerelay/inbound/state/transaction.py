"""Represents one mail transaction, from MAIL to the end of data (RFC 5321 3.3). Values only.

It holds the arguments of MAIL and RCPT, and the policy's decisions about the message: zones and header
changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

import msgspec
from msgspec import structs

from zonerelay.inbound.access.guard import Allowance
from zonerelay.inbound.policy import Decision
from zonerelay.inbound.refusal import Refusal
from zonerelay.model.envelope import Envelope, Mailbox, MessageId, Origin, Recipient
from zonerelay.model.queue_name import Priority
from zonerelay.smtp.server.params import MailCommand

if TYPE_CHECKING:
    from zonerelay.inbound.state.replies import ServerReply


class HeaderEdits(msgspec.Struct, frozen=True):
    """Changes to the header: fields to add at the top, and names of fields to remove."""

    add: tuple[tuple[str, str], ...] = ()
    remove: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.add or self.remove)

    def and_those_of(self, decision: Decision | HeaderEdits) -> HeaderEdits:
        if not (decision.add or decision.remove):
            return self
        return HeaderEdits((*self.add, *decision.add), (*self.remove, *decision.remove))


NO_EDITS = HeaderEdits()


RECIPIENT_COST = 512  # bytes of memory counted for each recipient of an open transaction


class HeaderRules(Protocol):
    """The [[rewrite]] rules for the header of one client's mail. `rules_of_header` are the rules that have
    changed something.
    """

    rules_of_header: set[int]

    def rewrite_header(self, header: bytes) -> bytes: ...


class MailTransaction:
    """A mail transaction of a client. `release` is the Unix time before which it must not be sent; 0.0 means
    immediately.

    `cost` is the memory counted for the recipients. `idempotency_key` is the key that the client set outside
    the message, or ""; `key_may_follow` means that the header may contain one, and `over_quota` is the
    refusal of a message that has none. `rewritten` lists the changes of recipients since RCPT, with the new
    addresses. A submission that may be accepted in part has all its recipients in `asked`, and
    the replies to those that are refused in `refused`. `unless_repeated` is the refusal of a message that is
    accepted only if it was submitted before with the same key.
    """

    def __init__(self, mail: MailCommand, *, release: float, edits: HeaderEdits) -> None:
        self.mail = mail
        self.recipients: dict[str, Recipient] = {}
        self.release = release
        self.edits = edits
        self.zone = ""
        self.allowance: Allowance | None = None  # the limits of the user, if there is one
        self.named: tuple[Mailbox, ...] = ()  # the recipients before the user's mode replaced them
        self.asked: tuple[Mailbox, ...] = ()
        self.refused: dict[Mailbox, str] = {}
        self.idempotency_key = ""
        self.key_may_follow = False
        self.over_quota: Refusal | None = None
        self.unless_repeated: ServerReply | None = None
        self.zone_named = ""  # the zone that the message itself names
        self.notes: tuple[str, ...] = ()  # notes for the trace
        self.zones: dict[Mailbox, str] = {}
        self.cost = 0
        self.octets = 0  # that BDAT has announced
        self.rewrites: HeaderRules | None = None  # for this client's mail, once the envelope is complete
        self.rewritten: list[tuple[str, Mailbox]] = []
        self.chunked = False  # after the first BDAT, RCPT and DATA are not allowed

    def decide(self, decision: Decision, recipient: Mailbox | None = None) -> None:
        """Apply a decision of the policy, for the whole message or for one recipient."""
        self.edits = self.edits.and_those_of(decision)
        if decision.zone and recipient is None:
            self.zone = decision.zone
            self.zones.clear()  # the zone of a later step replaces that of an earlier one
        elif decision.zone and recipient is not None:
            self.zones[recipient] = decision.zone

    def zone_of(self, recipient: Mailbox) -> str:
        """Return the policy's zone for this recipient, or an empty string if the routes decide."""
        return self.zones.get(recipient) or self.zone

    def envelope(
        self, message_id: MessageId, created: float, origin: Origin, priority: Priority = Priority.NORMAL
    ) -> Envelope:
        mail = self.mail
        if mail.smtputf8:
            # RFC 6531 4.3: UTF8SMTP, with A and S as for ESMTP.
            origin = structs.replace(origin, protocol=origin.protocol.replace("ESMTP", "UTF8SMTP"))
        return Envelope(
            id=message_id,
            sender=mail.sender,
            recipients=tuple(self.recipients.values()),
            created=created,
            body=mail.body,
            smtputf8=mail.smtputf8,
            ret=mail.ret,
            envid=mail.envid,
            origin=origin,
            priority=priority,
            require_tls=mail.require_tls,
        )


def mailboxes(recipients: Iterable[Recipient]) -> tuple[Mailbox, ...]:
    return tuple(recipient.address for recipient in recipients)
