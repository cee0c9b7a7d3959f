"""Holds the state of one batch during an attempt: its progress, its body, and the transaction for the next
peer.

The state decides which recipients a transaction names: those without a final outcome that the peer's
extensions can serve, and no more than the peer's limits (LIMITS, RFC 9422) allow. For a peer that lacks
8BITMIME or SMTPUTF8 the message is converted if the zone says so (RFC 6152 3 and RFC 6531 3.6 leave the
choice to the relay), and that form is sent from then on. What cannot be converted is bounced. In its first
`PATIENCE` seconds it is bounced only by a host that has accepted mail, because some hosts in front of others
(greylisting daemons) offer less than those behind them.

MAILMAX is `OutgoingSession.max_transactions`. RCPTDOMAINMAX counts the domains of all recipients that were
named on a connection (RFC 9422 4.3), accepted or not. A host that announces no RCPTDOMAINMAX gets one domain
in a transaction, unless the zone says that domains mix: of several domains Google accepts the first and
replies 451 4.3.0 for the others.

A next hop that replies 530 (RFC 4954 6, RFC 3207 4) requires a login or TLS that the zone does not configure.
The reply is about the configuration, not about the mail: the recipients are deferred with scope HOST instead
of bounced, until an operator has corrected it. An MX host that replies 530 refuses the mail, because the
relay has no credentials for it.

It holds the outcomes while the courier goes from connection to connection, by the position of the recipient
in the batch. A recipient is *open* until a peer has replied for it. An open recipient may have a *tentative*
outcome, which it gets if no connection is left to try.

`run_transaction` runs one transaction on one connection: bytes, bodies and deadlines, but no decisions. A
broken connection, a silent or malformed peer and a body that cannot be read to its end become outcomes of the
transaction, which is DONE afterwards. If the body cannot be read, the final dot is never sent and the
connection is aborted, so that no peer accepts a truncated message.

Before each write, `SentBody.check_claim` checks whether this relay still owns the message: a wait for the
peer, or a pause of this machine, may have outlasted the lease, and then another relay sends it. The end of a
message is written only when everything before it has left this process, because data left in a buffer would
be sent after a pause without another check.
"""

from collections.abc import Sequence

from msgspec import structs

from zonerelay.config.settings import DeliverySettings
from zonerelay.delivery.auth.logins import NO_PASSWORDS
from zonerelay.delivery.connection.session import ClientProtocol, ConnectionLostError, OutgoingSession
from zonerelay.delivery.connection.session_limits import Suspect
from zonerelay.delivery.peer import HostFailure, Terms
from zonerelay.delivery.rewrite.rendering import CheckClaim, ReadBody, RenderedMessage, Renderer
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.reply import Outcome, Reply, Scope, Verdict
from zonerelay.routing.destinations.route import Batch
from zonerelay.smtp.client import transaction as transactions
from zonerelay.smtp.client.extensions import NO_LIMITS
from zonerelay.smtp.client.replies import PeerError
from zonerelay.smtp.client.stuffing import END, DotStuffer, as_chunk, stuffed
from zonerelay.smtp.client.transaction import ClientTransaction, Peer, TransactionPhase
from zonerelay.store.contract import ClaimLostError, StoreCorruptError, StoreError

MOST_AT_ONCE = 16 * 1024
"""Bytes that the system's buffer for a connection accepts when everything before them was acknowledged."""

Timeouts = dict[TransactionPhase, float]


def phase_timeouts(settings: DeliverySettings) -> Timeouts:
    return {
        TransactionPhase.MAIL: settings.mail_timeout,
        TransactionPhase.RCPT: settings.rcpt_timeout,
        TransactionPhase.DATA: settings.data_timeout,
        TransactionPhase.BODY: settings.block_timeout,
        TransactionPhase.FINAL_DOT: settings.final_dot_timeout,
        TransactionPhase.LONE_DOT: settings.data_timeout,
        TransactionPhase.FIRST_CHUNK: settings.data_timeout,
        TransactionPhase.LAST_CHUNK: settings.final_dot_timeout,
        TransactionPhase.RSET: settings.mail_timeout,
    }


class SentBody:
    """Reads the body of a stored message and sends it in chunks. `open` reads the first chunk before the
    first command to the peer.

    A body of one chunk stays in memory and can be sent again. A longer body is read once, and `spent` is true
    if a new object is needed. Every method raises StoreError if the store fails or if the length is not the
    message's. Then the message must not be completed.
    """

    __slots__ = ("_check", "_id", "_pieces", "_seen", "_size", "head", "plain_lines", "spent", "whole")

    def __init__(self, read_body: ReadBody, message: Message, check_claim: CheckClaim) -> None:
        self.head = b""
        self.whole = False
        """Whether `head` is the complete body."""
        self.spent = False
        self.plain_lines = message.plain_lines
        self._size = message.size
        self._seen = 0
        self._id, self._check = message.id, check_claim
        self._pieces = read_body(message.id)

    async def open(self) -> None:
        head = self.head = self._count(await anext(self._pieces, b""))
        if len(head) == self._size:
            self._count(await anext(self._pieces, b""))
            self.whole = True

    async def next(self) -> bytes:
        """Return the next chunk of the body (the first one is `head`), or `b""` at the end."""
        self.spent = True
        return self._count(await anext(self._pieces, b""))

    def check_claim(self) -> None:
        """Raise ClaimLostError if another relay may be sending the message."""
        self._check(self._id)

    async def close(self) -> None:
        """Close the reader of the body. A `whole` body has been read to its end and need not be closed."""
        await self._pieces.aclose()

    def _count(self, piece: bytes) -> bytes:
        self._seen += len(piece)
        if self._seen > self._size or (not piece and self._seen < self._size):
            raise StoreCorruptError(f"the body has {self._seen} bytes instead of {self._size}")
        return piece


async def run_transaction(
    transaction: ClientTransaction, protocol: ClientProtocol, body: SentBody, timeouts: Timeouts
) -> None:
    """Run a transaction on a connection until its phase is DONE. Only CancelledError, ClaimLostError, and
    exceptions that are bugs are raised.
    """
    try:
        body.check_claim()
        protocol.write(transaction.begin())
        while (phase := transaction.phase) is not TransactionPhase.DONE:
            if phase is TransactionPhase.BODY and (
                _send_whole(body, protocol)
                if body.whole and len(body.head) <= MOST_AT_ONCE
                else await _send(body, protocol, timeouts[phase])
            ):
                transaction.body_sent()
                phase = transaction.phase
            reply = protocol.next_reply() or await protocol.reply(timeouts[phase])
            command = transaction.receive(reply)
            # When something is written or nothing is left to do, every command has its reply.
            if (command or transaction.phase is TransactionPhase.DONE) and protocol.heard:
                transaction.surplus(protocol.next_reply())
            elif command:
                await _write(command, protocol, body, timeouts[phase])
    except ClaimLostError:
        protocol.abort()
        raise
    except StoreError as error:
        protocol.abort()
        transaction.abandon(unreadable(error))
    except ConnectionLostError as error:
        transaction.lost(
            Reply(451, "4.2", f"{error} during {transaction.phase}"), skipped=bool(protocol.skipped)
        )
    except PeerError as error:
        transaction.lost(Reply(451, "5.0", f"{error} (during {transaction.phase})"))


def unreadable(error: StoreError) -> Reply:
    """Return the reply with which deliveries of a message that cannot be read are deferred."""
    return Reply(451, "3.0", f"the message could not be read from the store: {error}")


async def _write(command: bytes, protocol: ClientProtocol, body: SentBody, timeout: float) -> None:
    """Write an SMTP command. If it is the last BDAT with its chunk, the last CRLF is written only after all
    other bytes were sent.
    """
    if len(command) > MOST_AT_ONCE:
        body.check_claim()
        protocol.write(command[:-2])
        await protocol.flush(timeout)
        command = command[-2:]
    body.check_claim()
    protocol.write(command)


def _send_whole(body: SentBody, protocol: ClientProtocol) -> bool:
    """Write the body and the final dot. Return false, without writing, if the peer has already replied."""
    if protocol.heard:
        return False
    body.check_claim()
    protocol.write(stuffed(body.head, plain=body.plain_lines))
    return True


async def _send(body: SentBody, protocol: ClientProtocol, timeout: float) -> bool:
    """Send a body of more than one chunk, and the final dot. The body may be read while it is sent. Return
    false if the peer has already replied.
    """
    stuffer = DotStuffer(plain=body.plain_lines)
    piece = stuffer.feed(body.head)
    while not body.whole and (following := await body.next()):
        if protocol.heard:
            return False
        body.check_claim()
        protocol.write(piece)
        await protocol.drain(timeout)
        piece = stuffer.feed(following)
    piece += stuffer.finish()
    if len(piece) > MOST_AT_ONCE and not protocol.heard:
        body.check_claim()
        protocol.write(piece[: -len(END)])
        piece = END
    # A message that is lost before this returns was certainly not complete, so it is not in doubt.
    await protocol.flush(timeout)
    if protocol.heard:
        return False
    body.check_claim()
    protocol.write(piece)
    return True


OVERFLOW = Reply(452, "5.3", "more recipients or commands than the peer accepts in one transaction")
CLOSING = 421
NO_8BITMIME = Reply(550, "6.3", "the host does not support 8BITMIME, which the message requires")
NO_SMTPUTF8 = Reply(
    550, "6.7", "the host does not support SMTPUTF8, which the addresses or the header require"
)

MAY_CHANGE = "the host has never accepted mail from this relay and is retried for an hour"


def _without_attempt(outcome: Outcome) -> Outcome:
    if outcome.verdict is Verdict.DEFERRED:
        return structs.replace(outcome, scope=Scope.MESSAGE, counts=False)
    reply = outcome.reply
    text = (
        "the host rejected the command on a reused connection, and no other connection could be "
        f"tried: {reply}"
    )
    return structs.replace(
        outcome,
        verdict=Verdict.DEFERRED,
        reply=Reply(451, reply.detail, text),
        scope=Scope.MESSAGE,
        local=True,
        counts=False,
    )


PATIENCE = 3600.0


class NoTurnError(Exception):
    """The rate limit does not allow another transaction soon."""


class BatchState:
    """The state of one batch during an attempt. `message` is what is sent: the stored message, or the zone's
    rendition of it.

    `source_unfit` is true if this machine lacks the source's address, or if the source shares no address
    family with the hosts. `family_missed` is true if the source shares no address family with at least one
    host. `unfit` are the names of the sources that were excluded for these reasons. `address_blamed` is true
    if a peer has refused the source's address because of its reputation.
    """

    def __init__(
        self, terms: Terms, batch: Batch, read_body: ReadBody, check_claim: CheckClaim, *, now: float
    ) -> None:
        self.batch = batch
        self.message = batch.message
        self.terms = terms
        self.open = list(range(len(batch.deliveries)))
        """The positions of the recipients for which no peer has replied."""
        self._known: list[Outcome | None] = [None] * len(batch.deliveries)
        self._tentative: list[Outcome | None] = [None] * len(batch.deliveries)
        self.body = SentBody(read_body, batch.message, check_claim)
        self._read_body, self._check_claim = read_body, check_claim
        self._asking: list[int] = []
        self.unfit: set[str] = set()
        self.source_unfit = False
        self.family_missed = False
        self.address_blamed = False
        self.left_out = False
        """Whether the peer's limits excluded a recipient from the latest transaction."""
        self._is_young = now < batch.message.envelope.created + PATIENCE
        self._conversion_tried = False
        self.lacking = False
        """Whether a peer lacks an extension that a recipient needs."""
        self.suspect: Suspect | None = None
        """The latest refusal that may be about its connection, until another connection has
        shown the cause.
        """
        self.asked_again = 0
        """Suspect refusals since the latest accepted message."""
        self.opening = ""
        """The host and the address of the latest connection that was opened."""
        self.exchange: tuple[ClientTransaction, OutgoingSession] | None = None
        """The transaction in progress, and its connection."""
        self.unverified: tuple[str, HostFailure] | None = None
        """The latest host whose TLS does not meet the message's demand, although other mail demands less."""

    def send(self, rendered: RenderedMessage) -> None:
        """Send this message, as modified for the zone, instead of the stored one. Call it before anything is
        sent.
        """
        self.message, self._read_body = rendered.message, rendered.read_body
        self.body = SentBody(self._read_body, self.message, self._check_claim)

    def wants_conversion(self, session: OutgoingSession) -> bool:
        """Return whether this peer accepts the message only as 7-bit, and no conversion was tried yet."""
        message, capabilities = self.message, session.capabilities
        if self._conversion_tried:
            return False
        return (message.eight_bit and not capabilities.eight_bit_mime) or (
            not capabilities.smtputf8
            and message.envelope.sender.isascii()
            and transactions.needs_smtputf8(message)
        )

    async def convert(self, renderer: Renderer) -> None:
        """Convert the message to 7-bit, if the zone allows it and no content is lost. Raise StoreError and
        RenderError.
        """
        self._conversion_tried = True
        rendered = await renderer.in_seven_bits(self.batch.zone, self.batch.message)
        if rendered is not None:
            await self.body.close()
            self.send(rendered)
            await self.body.open()

    def transaction(self, session: OutgoingSession) -> ClientTransaction | None:
        """Return a transaction for the recipients without an outcome that this peer can serve, or None if
        there are none.
        """
        asking = self._servable(session)
        self.left_out = False
        if session.capabilities.limits is not NO_LIMITS or not self.batch.zone.mixes_domains:
            asking = self._within_limits(asking, session)
        self._asking = asking
        if not asking:
            return None
        deliveries: Sequence[Delivery] = self.batch.deliveries
        if len(asking) < len(deliveries):
            deliveries = [deliveries[index] for index in asking]
        common, body = (self.message, deliveries, session.capabilities, session.peer), self.body
        if session.chunking and body.whole and transactions.can_be_chunked(body.head):
            content = as_chunk(body.head, plain=body.plain_lines)
            return transactions.ChunkedTransaction(*common, content=content, probe=not session.bdat_taken)
        return ClientTransaction(*common)

    async def reopen_body(self) -> None:
        """Read the body again from its beginning. Raise StoreError."""
        await self.body.close()
        self.body = SentBody(self._read_body, self.message, self._check_claim)
        await self.body.open()

    def record(
        self, transaction: ClientTransaction, session: OutgoingSession, *, suspect: bool = False
    ) -> None:
        """Record the outcomes of a finished transaction. `suspect` is its refusal if that may be about the
        connection.
        """
        if not transaction.delivered and self.batch.zone.next_hop:
            transaction.outcomes = without_auth_bounces(
                transaction.outcomes, self.batch.zone.name, require_tls=self.message.envelope.require_tls
            )
        if suspect:
            self._suspect(transaction)
        else:
            self._record(transaction, session.peer)

    # Outcomes

    @property
    def answered(self) -> bool:
        """Whether a recipient has a final outcome."""
        return len(self.open) < len(self._known)

    def settle_open(self, outcome: Outcome) -> None:
        """Record this final outcome for every recipient that has none yet."""
        for index in self.open:
            self._known[index] = outcome
        self.open = []

    def host_failed(self, host: str, failure: HostFailure, *, counts: bool = True) -> None:
        """Record that a host could not be used. A later such host replaces the outcome of an earlier one. If
        `counts` is false, it is not counted as an attempt.

        An error of the relay itself (scope LOCAL) does not replace a deferral by a host.
        """
        outcome = Outcome(
            Verdict.DEFERRED,
            failure.reply,
            failure.scope,
            host=host,
            peer=failure.address,
            local=True,
            counts=counts and failure.asked,
        )
        if failure.scope is not Scope.LOCAL:
            self._suppose(outcome)
        else:
            self.undecided(outcome)

    def give_up(self) -> None:
        """Make tentative outcomes final, for the recipients without a final outcome."""
        for index in self.open:
            self._known[index] = self._tentative[index]
        self.open = []

    def undecided(self, outcome: Outcome) -> None:
        """Record this deferral for recipients that no host has deferred, if some hosts were not tried."""
        for index in self.open:
            known = self._tentative[index]
            if known is None or known.verdict is Verdict.BOUNCED:
                self._tentative[index] = outcome

    def _refuse_open(self, reply: Reply, peer: Peer) -> None:
        """Bounce the remaining recipients without sending the message, because the peer announced that it
        would refuse it.
        """
        self.settle_open(
            Outcome(Verdict.BOUNCED, reply, Scope.MESSAGE, peer.host, peer.address, peer.tls, local=True)
        )

    def _unsupported(self, indices: Sequence[int], reply: Reply, peer: Peer, *, for_now: bool) -> None:
        """Record that this host lacks an extension that the recipients require. The bounce is final only if
        every host of the route lacks it. If `for_now` is true, the host may offer more later, so the
        recipients are deferred.
        """
        verdict = Verdict.BOUNCED
        if for_now:
            verdict, reply = Verdict.DEFERRED, Reply(451, reply.detail, f"{reply.text}; {MAY_CHANGE}")
        outcome = Outcome(verdict, reply, Scope.RECIPIENT, peer.host, peer.address, peer.tls, local=True)
        for index in indices:
            if self._tentative[index] is None:
                self._tentative[index] = outcome

    def _record(self, transaction: ClientTransaction, peer: Peer) -> None:
        """Record the outcomes of a finished transaction."""
        if transaction.unanswered:
            self._suppose(transaction.outcomes[0])
            return
        outcomes = transaction.outcomes
        if len(outcomes) == len(self._known) and not (transaction.overflow or transaction.again):
            self._known, self.open = outcomes, []
            return
        for index, outcome in zip(self._asking, outcomes, strict=True):
            self._known[index] = outcome
        self.open = [index for index in self.open if self._known[index] is None]
        if transaction.overflow or transaction.again:
            self._leave_out([index for index in self._asking if self._known[index] is None], peer)

    def _suspect(self, transaction: ClientTransaction) -> None:
        """Record the outcomes of a transaction that may have been refused because of the connection.
        Recipients without a reply of their own stay open.

        They are deferred without an attempt if nothing is left to try, even after a permanent refusal.
        """
        refusal = transaction.refusal
        everyone = (
            transaction.refused_at is TransactionPhase.RCPT
            and refusal is not None
            and refusal.code != CLOSING
        )
        for index, outcome in zip(self._asking, transaction.outcomes, strict=True):
            if outcome is not None and outcome.scope is Scope.RECIPIENT and outcome.counts and not everyone:
                self._known[index] = outcome
            else:
                self._tentative[index] = None if outcome is None else _without_attempt(outcome)
        self.open = [index for index in self.open if self._known[index] is None]

    def _leave_out(self, indices: Sequence[int], peer: Peer) -> None:
        """Record that these recipients were left out of the transaction and need another one."""
        later = Outcome(
            Verdict.DEFERRED, OVERFLOW, Scope.RECIPIENT, peer.host, peer.address, peer.tls, counts=False
        )
        for index in indices:
            self._tentative[index] = later

    def outcomes(self, otherwise: Outcome) -> list[Outcome]:
        """Return the final outcomes of all recipients in order, with `otherwise` for those without one. If a
        host has replied for some recipients, the others get no outcome of scope HOST.
        """
        answered = self.answered
        for index in self.open:
            outcome = self._tentative[index] or otherwise
            if answered and outcome.scope is Scope.HOST:
                outcome = structs.replace(outcome, scope=Scope.MESSAGE)
            self._known[index] = outcome
        return [outcome or otherwise for outcome in self._known]

    def _suppose(self, outcome: Outcome | None) -> None:
        for index in self.open:
            self._tentative[index] = outcome

    # The recipients of a transaction

    def _servable(self, session: OutgoingSession) -> list[int]:
        message, capabilities = self.message, session.capabilities
        refusal = transactions.too_large(message, capabilities)
        if refusal is not None:
            self._refuse_open(refusal, session.peer)
            return self.open
        servable = self.open
        if not capabilities.smtputf8 and not self._is_ascii():
            servable = self._without_smtputf8(session)
        if message.eight_bit and not capabilities.eight_bit_mime:
            self._unsupported(servable, NO_8BITMIME, session.peer, for_now=self._for_now(session))
            self.lacking = True
            return []
        return servable

    def _without_smtputf8(self, session: OutgoingSession) -> list[int]:
        wanted, needy = self.open, self.open
        if not transactions.needs_smtputf8(self.message):
            needy = [index for index in wanted if not self.batch.deliveries[index].recipient.isascii()]
        self._unsupported(needy, NO_SMTPUTF8, session.peer, for_now=self._for_now(session))
        self.lacking = self.lacking or bool(needy)
        return [index for index in wanted if index not in needy] if needy else wanted

    def _for_now(self, session: OutgoingSession) -> bool:
        return self._is_young and not session.has_taken_mail

    def _within_limits(self, servable: list[int], session: OutgoingSession) -> list[int]:
        """Return the recipients that the next transaction may have under the peer's limits, possibly none."""
        zone, deliveries, limits = self.batch.zone, self.batch.deliveries, session.capabilities.limits
        most = self.batch.rcptdomainmax = limits.rcptdomainmax
        asking = servable
        if not (zone.mixes_domains or (zone.mix_domains is None and most is not None)):
            asking = _of_one_domain(session.domains, deliveries, servable, most)
        elif most is not None:
            asking = [each for each in servable if _has_room(session.domains, deliveries[each].domain, most)]
        asking = asking[: limits.rcptmax]
        self.left_out = len(asking) < len(servable)
        if self.left_out:
            self._leave_out([index for index in servable if index not in asking], session.peer)
        return asking

    def _is_ascii(self) -> bool:
        for delivery in self.batch.deliveries:
            if not delivery.recipient.isascii():
                return False
        envelope = self.message.envelope
        return envelope.sender.isascii() and not envelope.smtputf8


WANTS_MORE = 530


PASSWORDS_OFF = "7.30"
"""Microsoft accepts no password for this login. RFC 8689 5 has the same code for mail that demands TLS."""


def without_auth_bounces(
    outcomes: Sequence[Outcome | None], zone: str, *, require_tls: bool
) -> list[Outcome | None]:
    """Replace bounces because of a missing or wrong login at a next hop by deferrals. `require_tls` is true
    if the message requires TLS on every hop.
    """
    return [None if each is None else _without_auth_bounce(each, zone, require_tls) for each in outcomes]


def _without_auth_bounce(outcome: Outcome, zone: str, require_tls: bool) -> Outcome:
    said = outcome.reply
    if outcome.verdict is not Verdict.BOUNCED:
        return outcome
    if said.code == WANTS_MORE:
        detail = said.detail or "7.0"
        text = f"the next hop requires a login or TLS, for which zone {zone} is not configured: {said}"
    elif said.detail == PASSWORDS_OFF and not require_tls:
        detail = "7.0"
        text = f"the next hop rejected a login of zone {zone}: {said}; {NO_PASSWORDS}"
    else:
        return outcome
    return structs.replace(
        outcome,
        verdict=Verdict.DEFERRED,
        reply=Reply(451, detail, text),
        scope=Scope.HOST,
        local=True,
        counts=False,
    )


def _of_one_domain(
    domains: set[str], deliveries: Sequence[Delivery], wanted: list[int], most: int | None
) -> list[int]:
    """Return the recipients in the first domain that the limit on domains per connection allows."""
    if len(wanted) == 1 and most is None:  # the usual case
        return wanted
    for index in wanted:
        domain = deliveries[index].domain
        if most is None or _has_room(domains, domain, most):
            return [each for each in wanted if deliveries[each].domain == domain]
    return []


def _has_room(domains: set[str], domain: str, most: int) -> bool:
    """Return whether RCPT commands for this domain may be sent on the connection; a new domain is counted."""
    if len(domains) < most:
        domains.add(domain)
    return domain in domains
