"""The state of one submitting client, its transaction and its pending lookup, for SMTP and HTTP. No I/O.

The transaction is built step by step. A step returns a reply immediately, or `ask(question, after_verdict)`;
then the caller performs the lookup, and `decided` returns the reply. The SMTP session answers a command with
each step (`session/conversation`); `submit` performs all of them in one call.

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

from collections.abc import Callable, Mapping
from functools import partial

from msgspec import structs

from zonerelay.config.settings import ListenerAuth
from zonerelay.config.user_limits import NONE
from zonerelay.inbound.access.guard import Allowance, Guard
from zonerelay.inbound.cleanup.intake import Intake, WholeIntake
from zonerelay.inbound.limits.clients import TooManyGuessesError, client_key
from zonerelay.inbound.policy import Connect, Decision, Helo, Mail, Rcpt
from zonerelay.inbound.policy.api import Changes, WholeMessage
from zonerelay.inbound.refusal import Reason, Refusal
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.client_state import ClientState
from zonerelay.inbound.state.context import ListenerContext, LookupResult, Question, SuspensionCheck
from zonerelay.inbound.state.replies import ServerReply, refused
from zonerelay.inbound.state.transaction import NO_EDITS, RECIPIENT_COST, MailTransaction, renamed
from zonerelay.message.srs import Srs, SrsError
from zonerelay.model.envelope import Mailbox, MessageId, Notify, Recipient, Ret, recipient_key
from zonerelay.smtp.server.params import MailCommand
from zonerelay.store.contract import Unhealthy

MAX_HELO = 255

AfterVerdict = Callable[[LookupResult], ServerReply]


class SubmittingClient:
    """A client that submits mail by SMTP or HTTP. `delay` is the delay of the reply to an error in seconds.
    `edits` are the policy's changes to every message of this client.
    """

    edits_by_step: Mapping[str, Decision] = {}

    def __init__(self, context: ListenerContext, client_state: ClientState) -> None:
        self.context = context
        self.client_state = client_state
        self.transaction: MailTransaction | None = None
        self.delay = 0.0
        self.edits = NO_EDITS
        self.question: Question | None = None
        self._after_verdict: AfterVerdict | None = None

    def reset(self) -> None:
        """End the mail transaction, as RSET does. The client stays known (RFC 5321 4.1.1.5)."""
        if self.transaction is not None:
            self.context.memory.used -= self.transaction.cost
            self.transaction = None

    def connect(self) -> ServerReply:
        """Return the greeting for a new client, after calling the policy if it handles connections."""
        if Connect not in self.context.asked:
            return self.context.greeting.banner
        return self.ask(Connect(client=self.client_state.info), self._connect_decided)

    def hello(self, name: str, *, extended: bool) -> ServerReply:
        """Process EHLO or HELO, and refuse the client if the policy does. `extended` means that it sent
        EHLO.
        """
        name = name[:MAX_HELO]
        if Helo not in self.context.asked:
            return self._welcome(name, extended)

        def decided(verdict: LookupResult) -> ServerReply:
            decision = verdict.decision
            self.keep_edits(Helo.step, decision)
            answer = self._welcome(name, extended)
            kept = decision.lines if isinstance(decision, Changes) else ()
            return replies.said(250, "", "\n".join(kept)) if kept else answer

        lines = tuple(self._offer().reply.text.split("\n"))
        event = Helo(client=self.client_state.info, name=name, extended=extended, lines=lines)
        return self.ask(event, decided, "EHLO" if extended else "HELO")

    def _welcome(self, name: str, extended: bool) -> ServerReply:
        self.client_state.said_hello(name, extended=extended)
        return self._offer() if extended else self.context.greeting.helo

    def _offer(self) -> ServerReply:
        return self.context.greeting.ehlo(self.client_state.grants.offer, self.context.clock.now())

    def refuse(
        self,
        answer: ServerReply,
        command: str = "",
        *,
        message_id: MessageId | None = None,
        mailbox: Mailbox | None = None,
        detail: str = "",
    ) -> ServerReply:
        """Log and count a refusal, and return it."""
        if answer.reason is not None:
            self.context.events.refused(
                self.client_state.origin,
                command,
                answer.reply,
                answer.reason.value,
                message_id=message_id,
                sender=None if self.transaction is None else self.transaction.mail.sender,
                mailbox=mailbox,
                detail=detail,
            )
        return self._counted(answer, command, of_message=message_id is not None)

    def _counted(self, answer: ServerReply, command: str, *, of_message: bool) -> ServerReply:
        """Count a refusal, and return it or another one that ends the session. Clients without a session have
        no limit.
        """
        return answer

    def refuse_by(
        self, verdict: LookupResult, command: str, *, mailbox: Mailbox | None = None
    ) -> ServerReply:
        """Refuse a command with the reply that a lookup returned, and return the refusal. Code 421 ends the
        session.
        """
        reply = verdict.decision.reply
        assert reply is not None
        return self.refuse(replies.decided(reply, verdict.reason), command, mailbox=mailbox)

    def refuse_content(self, intake: Intake, answer: ServerReply, command: str) -> None:
        """Log and count the refusal of a message whose envelope was accepted."""
        about, detail = intake.envelope, intake.detail
        self.refuse(answer, command, message_id=about.id, mailbox=about.sender, detail=detail)

    def ask(
        self, question: Question, after: AfterVerdict, command: str = "", mailbox: Mailbox | None = None
    ) -> ServerReply:
        """Request a lookup from the caller, which calls `decided` with the result. With `command`, a verdict
        that has a reply refuses it.
        """
        self.question = question
        self._after_verdict = after
        self._about = command, mailbox
        return replies.ASK

    def decided(self, verdict: LookupResult) -> ServerReply:
        """Continue after a lookup, and return the reply to the command."""
        after_verdict, (command, mailbox) = self._after_verdict, self._about
        assert after_verdict is not None
        self.question = self._after_verdict = None
        if command and verdict.decision.reply is not None:
            return self.refuse_by(verdict, command, mailbox=mailbox)
        return after_verdict(verdict)

    def keep_edits(self, step: str, decision: Decision) -> None:
        """Apply the header edits of this decision to every later message of the client. A repeated step
        replaces its earlier edits.
        """
        self.edits_by_step = {**self.edits_by_step, step: decision}
        self.edits = NO_EDITS
        for each in self.edits_by_step.values():
            self.edits = self.edits.and_those_of(each)

    def _connect_decided(self, verdict: LookupResult) -> ServerReply:
        reply = verdict.decision.reply
        if reply is None:
            self.keep_edits(Connect.step, verdict.decision)
            return self.context.greeting.banner
        return self.refuse(replies.refused(reply, verdict.reason, replies.NextAction.CLOSE))

    def begin(self, command: MailCommand, key: str | None = None) -> ServerReply:
        """Start a mail transaction for a parsed MAIL command. `key` is the idempotency key, if the client set
        it outside of the message, "" if it has none, and None if the header may contain one.
        """
        failed = self._mail_refusal(command)
        if failed is not None:
            return self.refuse(failed[0], "MAIL", mailbox=command.sender, detail=failed[1])
        release = 0.0
        if command.hold_for is not None or command.hold_until is not None:
            now = self.context.clock.now()
            release = now + command.hold_for if command.hold_for is not None else command.hold_until or 0.0
            if release > now + self.context.settings.max_hold:
                return self.refuse(replies.TOO_FAR_AHEAD, "MAIL", mailbox=command.sender)
            release = release if release > now else 0.0
        transaction = MailTransaction(command, release=release, edits=self.edits)
        transaction.idempotency_key = key or ""
        transaction.key_may_follow = key is None
        client_state = self.client_state
        if client_state.user is not None and self.context.guard is not None:
            return self._guarded(transaction, self.context.guard, client_state.user.name)
        return self._begin(transaction)

    def _guarded(self, transaction: MailTransaction, guard: Guard, user: str) -> ServerReply:
        """Check the limits of the user at MAIL. This needs a lookup unless they are cached."""
        known = guard.known(user)
        if known is not None:
            return self._allowed(transaction, known)
        return self.ask(
            partial(self.context.limits_of, user),
            lambda verdict: self._allowed(transaction, verdict.allowance),
            "MAIL",
            transaction.mail.sender,
        )

    def _allowed(self, transaction: MailTransaction, allowance: Allowance | Refusal | None) -> ServerReply:
        if isinstance(allowance, Allowance):
            client, now = self.client_state.client.address, self.context.clock.now()
            refusal = allowance.mail_refusal(client, now, transaction.mail.size)
            if allowance.rails is not NONE:
                transaction.allowance = allowance
            self.client_state.idempotency = allowance.rails.idempotency or self.context.settings.idempotency
        else:
            refusal = allowance
        if refusal is not None and not _is_for_later(transaction, refusal):
            answer = self.refuse(self.context.guarded(refusal), "MAIL", mailbox=transaction.mail.sender)
            if not transaction.idempotency_key or refusal.reason is not Reason.QUOTA:
                return answer
            transaction.unless_repeated = answer
        return self._begin(transaction)

    def _begin(self, transaction: MailTransaction) -> ServerReply:
        command, client_state = transaction.mail, self.client_state
        if Mail not in self.context.asked:
            self.transaction = transaction
            return replies.SENDER_OK
        event = Mail(
            client=client_state.info,
            sender=command.sender,
            size=command.size,
            body=command.body,
            smtputf8=command.smtputf8,
            recipients=transaction.recipients,
        )
        return self.ask(event, partial(self._mail_decided, transaction), "MAIL", command.sender)

    def _mail_refusal(self, command: MailCommand) -> tuple[ServerReply, str] | None:
        """Return the refusal of a sender and a detail for the log, or None."""
        context = self.context
        if command.size > context.settings.max_message_size:
            return replies.too_big(context.settings.max_message_size), ""
        unhealthy = context.store.unhealthy()
        if unhealthy is not None:
            full = unhealthy is Unhealthy.NO_SPACE
            return replies.STORE_FULL if full else replies.STORE_FAILURE, unhealthy
        if self.client_state.user is not None and not self.client_state.may_send_as(command.sender):
            return replies.NOT_YOUR_ADDRESS, ""
        if context.orders is not None and context.orders.are_refusing:
            return self._suspended(context.orders, command.sender, None)
        return None

    def _mail_decided(self, transaction: MailTransaction, verdict: LookupResult) -> ServerReply:
        refusal = self._changed(transaction, verdict, "MAIL")
        if refusal is not None:
            return refusal
        transaction.decide(verdict.decision)
        self.transaction = transaction
        return replies.SENDER_OK

    def _changed(
        self,
        transaction: MailTransaction,
        verdict: LookupResult,
        command: str,
        *,
        given: Recipient | None = None,
        given_address: str = "",
    ) -> ServerReply | None:
        """Apply the changes of an aiosmtpd handler to the envelope, or return the refusal if they are not
        allowed.
        """
        changes = verdict.decision
        if not (isinstance(changes, Changes) and changes.of_envelope):
            return None
        before = len(transaction.recipients)
        failed = self.context.change_envelope(
            changes,
            transaction,
            self.client_state,
            step=command.lower(),
            given=given,
            given_address=given_address,
        )
        if failed is None:
            cost = (len(transaction.recipients) - before) * RECIPIENT_COST
            transaction.cost += cost
            self.context.memory.used += cost
            return None
        return self.refuse(failed[0], command, mailbox=transaction.mail.sender, detail=failed[1])

    def add(self, transaction: MailTransaction, key: str, recipient: Recipient) -> ServerReply:
        """Add a recipient to the transaction. `key` is its `recipient_key`."""
        may_relay = self.client_state.grants.may_relay
        if "%" in recipient.address and _is_route(recipient.address, self.context.hostname):
            return self.refuse(replies.PERCENT_ROUTE, "RCPT", mailbox=recipient.address)
        if self.context.srs is not None:
            return self._perhaps_a_report(transaction, self.context.srs, recipient, may_relay=may_relay)
        return self._take(transaction, key, recipient, recipient.address, may_relay=may_relay)

    def _perhaps_a_report(
        self, transaction: MailTransaction, srs: Srs, recipient: Recipient, *, may_relay: bool
    ) -> ServerReply:
        """Add a recipient; if it is an SRS address of this relay, add the original sender that it contains
        instead.
        """
        given, context = recipient.address, self.context
        strangers, client = context.srs_recipients, client_key(self.client_state.client.address)

        def no(detail: str) -> ServerReply:
            return self.refuse(replies.NOT_OF_OURS, "RCPT", mailbox=given, detail=detail)

        try:
            first = strangers.reverse(srs, given, client, context.clock)
        except TooManyGuessesError:
            return self.refuse(replies.TOO_MANY_GUESSES, "RCPT", mailbox=given)
        except SrsError as error:
            answer = no(str(error))
            self.delay = max(self.delay, error.delay)
            return answer
        if first is not None:
            if not may_relay:
                if codes := strangers.refusal(first, context.clock.monotonic()):
                    return no(f"the next hop rejects it: {codes}")
                transaction.mail = structs.replace(transaction.mail, ret=Ret.UNSET, envid="")
                recipient = Recipient(address=given, notify=Notify.NEVER)
            recipient, may_relay = renamed(recipient, first), True
        return self._take(
            transaction, recipient_key(recipient.address), recipient, given, may_relay=may_relay
        )

    def _take(
        self, transaction: MailTransaction, key: str, recipient: Recipient, given: Mailbox, *, may_relay: bool
    ) -> ServerReply:
        """Check a recipient, and add it to the transaction. `given` is the address in RCPT, which is used by
        access rules and the policy.
        """
        failed = self._rcpt_refusal(transaction, key, given, may_relay=may_relay)
        if failed is not None:
            return self.refuse(failed[0], "RCPT", mailbox=given, detail=failed[1])
        if key in transaction.recipients:
            return replies.RECIPIENT_OK
        if transaction.allowance is not None:
            barred = transaction.allowance.rcpt_refusal(given, len(transaction.recipients))
            if barred is not None and not _is_for_later(transaction, barred):
                return self.refuse(self.context.guarded(barred), "RCPT", mailbox=given)
        if Rcpt in self.context.asked:
            return self._ask_about(transaction, key, recipient, given)
        self._add(transaction, key, recipient, given)
        return replies.RECIPIENT_OK

    def _suspended(
        self, orders: SuspensionCheck, sender: Mailbox, recipient: Mailbox | None
    ) -> tuple[ServerReply, str] | None:
        """Return the refusal of mail that an operator has suspended, with a detail for the log, or None. At
        MAIL, `recipient` is None.
        """
        origin, zone_header = self.client_state.origin, self.context.zone_header
        names_zone = zone_header is not None and zone_header.trusts(origin.client_address, origin.user)
        order = orders.refuse(origin, sender, recipient, recipient is not None and names_zone)
        return (replies.SUSPENDED, f"suspension {order}") if order else None

    def _rcpt_refusal(
        self, transaction: MailTransaction, key: str, given: Mailbox, *, may_relay: bool
    ) -> tuple[ServerReply, str] | None:
        """Return the refusal of a recipient and a detail for the log, or None."""
        context = self.context
        if not may_relay:
            may_log_in = context.settings.auth is not ListenerAuth.OFF
            return replies.relaying_denied(self.client_state.client.address, may_log_in=may_log_in), ""
        if context.access is not None:
            reply = context.access.decide(self.client_state.origin, transaction.mail.sender, given)
            if reply is not None:
                return refused(reply, Reason.ACCESS), ""
        recipients = transaction.recipients
        if len(recipients) >= context.settings.max_recipients and key not in recipients:
            return replies.too_many_recipients(context.settings.max_recipients), ""
        if context.orders is not None and context.orders.are_refusing:
            return self._suspended(context.orders, transaction.mail.sender, given)
        return None

    def _add(self, transaction: MailTransaction, key: str, recipient: Recipient, given: Mailbox) -> None:
        transaction.recipients[key] = recipient
        if recipient.address is not given:
            transaction.rewritten.append(("recipient srs", recipient.address))
        transaction.cost += RECIPIENT_COST
        memory = self.context.memory
        memory.used += RECIPIENT_COST
        if memory.full:
            memory.relieve()  # this may end the current session

    def _ask_about(
        self, transaction: MailTransaction, key: str, recipient: Recipient, given: Mailbox
    ) -> ServerReply:
        event = Rcpt(
            client=self.client_state.info,
            sender=transaction.mail.sender,
            recipient=given,
            recipients_so_far=len(transaction.recipients),
            mail=transaction.mail,
            recipients=transaction.recipients,
        )

        def decided(verdict: LookupResult) -> ServerReply:
            refusal = self._changed(transaction, verdict, "RCPT", given=recipient, given_address=given)
            if refusal is not None:
                return refusal
            transaction.decide(verdict.decision, recipient.address)
            if not (isinstance(verdict.decision, Changes) and given in verdict.decision.removed):
                self._add(transaction, key, recipient, given)
            return replies.RECIPIENT_OK

        return self.ask(event, decided, "RCPT", given)

    def new_intake(self, on_room: Callable[[], None]) -> Intake:
        """Create the intake that receives the content, now that the envelope is complete. `on_room`: see
        `Intake`.
        """
        context, transaction, client_state = self.context, self.transaction, self.client_state
        assert transaction is not None
        origin = client_state.origin
        kind: type[Intake] = Intake
        if WholeMessage in context.asked and transaction.unless_repeated is None:
            kind = WholeIntake
        elif context.rewriting is not None:
            context.rewriting.rewrite(transaction, origin)
        if kind is Intake:
            transaction.apply_mode()
        envelope = transaction.envelope(
            context.ids.next(),
            context.clock.now(),
            origin,
            client_state.priority or context.settings.priority,
        )
        return kind(envelope, transaction, client_state, context, on_room)


def _is_for_later(transaction: MailTransaction, refusal: Refusal) -> bool:
    """Return whether to delay a quota refusal until the header shows whether the message repeats an accepted
    one.
    """
    if refusal.reason is not Reason.QUOTA or refusal.reply.is_permanent or not transaction.key_may_follow:
        return False
    if transaction.over_quota is None and not transaction.recipients:
        transaction.over_quota = refusal
    return transaction.over_quota is not None


def _is_route(mailbox: Mailbox, hostname: str) -> bool:
    """Return whether an address has the form `user%domain@relay`, a source route through this relay.
    Elsewhere, % has no meaning.
    """
    local, _, domain = mailbox.rpartition("@")
    return domain.lower() == hostname.lower() and "%" in local.strip("%") and not local.startswith('"')
