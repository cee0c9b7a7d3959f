"""The permissions of a client and its EHLO extensions, by its address, its TLS and its authentication.

There are few combinations of these in a listener, so each is computed once. To relay, a client needs one of:
an address in `allow_networks`, a login as a user, or a listed client certificate. With `auth = "required"`
the address is not sufficient.

The module also applies the mode of a user (`config`) to the envelope, before anything is stored. No
I/O.

- redirect: the whole message is sent to the user's mailbox, once. The first `MAX_FIELDS` of the original
  recipients are listed in X-Original-To fields.
- copy: the mailbox is an additional recipient, for which no DSN is sent.
- capture, listed: `cleanup/deliveries` captures the mail that is not to be sent.

So routes, durability, DSNs and the queue treat such mail like any other.
"""

from __future__ import annotations

from dataclasses import dataclass

from zonerelay.config.settings import ListenerAuth, ListenerSettings, ListenerTls, UnsafeListener
from zonerelay.config.user_limits import UserMode
from zonerelay.inbound.state.replies import AUTH, DSN, FUTURE_RELEASE, STARTTLS, XCLIENT
from zonerelay.inbound.state.transaction import HeaderEdits, MailTransaction, mailboxes
from zonerelay.model.address import Mailbox, recipient_key
from zonerelay.model.envelope import Notify, Recipient
from zonerelay.smtp.server import params

FIELD = "X-Original-To"
MAX_FIELDS = 100


def apply_mode(transaction: MailTransaction) -> None:
    """Apply the user's mode to the envelope, which is complete and rewritten."""
    if transaction.allowance is None:
        return
    transaction.named = mailboxes(transaction.recipients.values())
    rails = transaction.allowance.rails
    mailbox = Mailbox(rails.mailbox)
    if rails.mode is UserMode.REDIRECT:
        fields = tuple((FIELD, each) for each in transaction.named[:MAX_FIELDS])
        transaction.edits = transaction.edits.and_those_of(HeaderEdits(add=fields))
        transaction.recipients = {recipient_key(mailbox): Recipient(address=mailbox)}
        transaction.rewritten.append(("recipient mode=redirect", mailbox))
    elif rails.mode is UserMode.COPY:
        copy = Recipient(address=mailbox, notify=Notify.NEVER)
        if recipient_key(mailbox) not in transaction.recipients:
            transaction.recipients[recipient_key(mailbox)] = copy
            transaction.rewritten.append(("recipient mode=copy", mailbox))


@dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """The permissions of one client. `must_log_in`: the client must log in first. `offer` is the set of EHLO
    extensions; `mail_parameters` and `rcpt_parameters` are the accepted parameters of MAIL and RCPT.
    """

    may_relay: bool
    must_log_in: bool
    must_start_tls: bool
    offers_starttls: bool
    offers_auth: bool
    mail_parameters: frozenset[str]
    rcpt_parameters: frozenset[str]
    offer: int


class GrantTable:
    """Decides the permissions of clients."""

    def __init__(self, settings: ListenerSettings) -> None:
        self._settings = settings
        self._known: dict[tuple[bool, bool, bool, bool], Grants] = {}

    def of(self, may_relay: bool, may_xclient: bool, secure: bool, proven: bool) -> Grants:
        """Return the permissions of a client.

        `may_relay` is determined by its address. `secure`: it uses TLS. `proven`: it has logged in or
        presented a listed certificate.
        """
        key = (may_relay, may_xclient, secure, proven)
        grants = self._known.get(key)
        if grants is None:
            grants = self._known[key] = _grants(self._settings, *key)
        return grants


def _grants(
    settings: ListenerSettings, may_relay: bool, may_xclient: bool, secure: bool, proven: bool
) -> Grants:
    must_log_in = not proven and settings.auth is ListenerAuth.REQUIRED
    may_relay = proven or (may_relay and not must_log_in)
    starttls = settings.tls is ListenerTls.STARTTLS and not secure
    auth = settings.auth is not ListenerAuth.OFF and (
        secure or UnsafeListener.CLEARTEXT_AUTH in settings.unsafe
    )
    # Only for clients that may relay, now or after a login: RFC 4865 is for submission, and with DSN an
    # unauthenticated client could have our reports sent to a third party.
    submits = may_relay or auth
    hold = submits and settings.max_hold > 0
    offers = (
        *((STARTTLS, starttls), (AUTH, auth), (DSN, submits)),
        *((FUTURE_RELEASE, hold), (XCLIENT, may_xclient)),
    )
    return Grants(
        may_relay=may_relay,
        must_log_in=must_log_in,
        must_start_tls=settings.require_tls and not secure,
        offers_starttls=starttls,
        offers_auth=auth,
        mail_parameters=params.MAIL_PARAMETERS
        | (params.DSN_MAIL_PARAMETERS if submits else frozenset())
        | (params.AUTH_MAIL_PARAMETERS if auth else frozenset())
        | (params.HOLD_MAIL_PARAMETERS if hold else frozenset()),
        rcpt_parameters=params.DSN_RCPT_PARAMETERS if submits else params.RCPT_PARAMETERS,
        offer=sum(flag for flag, offered in offers if offered),
    )
