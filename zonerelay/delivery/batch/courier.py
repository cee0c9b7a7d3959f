"""Delivers batches to hosts, over idle or new connections, and tries the MX hosts in order.

The courier reads the first chunk of the body and uses an idle connection if there is one. Otherwise it opens
connections to the route's hosts in the order of preference (equal hosts shuffled, RFC 5321 5.1) until every
recipient has a reply or `max_hosts_per_attempt` addresses have been tried.

Policies:

- If an idle connection turns out to be closed before it has answered MAIL, the transaction runs again on a
  new connection and is not counted as an attempt.
- A refusal that may be about the connection (`connection/session_limits.py`) is tried once more on a new
  connection to the same host, or, if there may be too many connections, on the next idle one.
- A failure before the reply to MAIL concerns the host: the courier tries the next one. A later failure is a
  deferral, because the first host may have accepted the message, and a second host must not get it, too.
- Every failure of a host is a deferral, including a greeting with 5yz and a forbidden address. Mail bounces
  only for a peer's 5yz to a recipient or the message, for a message larger than an announced SIZE (5.3.4),
  and if every host of the route lacks an extension and the message is not converted (`batch_state.py`): 8-bit
  content without 8BITMIME (5.6.3), UTF-8 in addresses or header fields without SMTPUTF8 (5.6.7).
- In a zone with sources the batch has one source, and a peer's refusal of the source's address is remembered
  with the source (`source.py`). A refusal of the address bounces no mail and suspends no destination while
  another source is left: the next attempt uses that one. A source whose address this machine lacks, or that
  shares no address family with the hosts, is replaced by the next source at once.
- Hosts that were recently found dead are tried last (`connection/session_limits.py`). In a zone with
  credentials the batch has one credential and uses connections that were logged in with it; while the login
  fails the batch waits (`auth/logins.py`). If no credential is configured and the next hop requires a login,
  no mail bounces (`batch_state.py`).
- A host that refuses BDAT or parameters that it offers gets mail without them for a day (`UsedExtensions`).
- A message that demands TLS and a verified certificate (`require_tls`) has separate connections if other mail
  demands less. A host that does not meet the demand defers only this message (4.7.30).
- If a peer limits transactions with LIMITS (RFC 9422), the courier sends several transactions, and opens
  several connections to the same host as long as each one settles a recipient.
- An unexpected exception is a deferral that says nothing about the host (scope LOCAL), and is passed to the
  event loop's exception handler.

A cancelled delivery aborts its connection, because a late reply could be paired with another message. So does
a delivery whose claim is lost. If no recipient has a reply yet, the delivery ends with that exception.
Otherwise it returns its outcomes, so that mail that a peer has accepted is not sent again.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import KW_ONLY, dataclass
from random import Random

from msgspec import structs

from zonerelay.config.endpoints import join_port
from zonerelay.config.settings import DeliverySettings
from zonerelay.config.units import exact_span
from zonerelay.delivery.auth.logins import Logins, NoLogin
from zonerelay.delivery.batch import batch_state
from zonerelay.delivery.batch.batch_state import BatchState, NoTurnError
from zonerelay.delivery.connection import session_limits
from zonerelay.delivery.connection.pool import AllowanceOf, ConnectionPool
from zonerelay.delivery.connection.session import OutgoingSession, SessionOpener, Slot, TlsFailure
from zonerelay.delivery.peer import ANY_CONNECTION, ConnectionKey, HostFailure, SourceFailure, Terms
from zonerelay.delivery.rewrite.rendering import CheckClaim, ReadBody, Renderer, RenderError
from zonerelay.delivery.source import SourceSelection, from_elsewhere, sent_from
from zonerelay.delivery.tls.plan import TlsPolicy, TlsRequirements, named_after, requirements
from zonerelay.model.bounded import ExpiringSet
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import DeliveryKey
from zonerelay.model.reply import TLS_REQUIRED, Outcome, Reply, Scope, Verdict
from zonerelay.process.tasks import ended
from zonerelay.routing.destinations.route import Batch, MxHost
from zonerelay.routing.dns.answers import Addresses
from zonerelay.routing.dns.resolver import Resolver
from zonerelay.smtp.client.transaction import ClientTransaction, TransactionPhase
from zonerelay.store.contract import ClaimLostError, StoreError
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.events.transcript import SessionRecorder

MAX_ASKED_AGAIN = 3
"""Suspect refusals, without an accepted message in between, until a batch stops trying."""

FEWER_PATIENCE = 10.0
"""Seconds that a batch waits for one of the connections that a host accepts at a time."""

MAX_LACKING = 20
"""Addresses of hosts that lack what the message needs, which one attempt may try."""


@dataclass(eq=False, repr=False)
class SmtpCourier:
    """Delivers batches over SMTP. It owns every outgoing connection."""

    settings: DeliverySettings
    _: KW_ONLY
    hostname: str
    resolver: Resolver
    sources: SourceSelection
    logins: Logins
    read_body: ReadBody
    check_claim: CheckClaim
    renderer: Renderer
    events: Events
    clock: Clock
    random: Random
    shared: AllowanceOf | None = None

    def __post_init__(self) -> None:
        settings, clock = self.settings, self.clock
        self._timeouts = batch_state.phase_timeouts(settings)
        self._order = session_limits.HostOrder(clock, self.random)
        self._opener = SessionOpener(
            settings,
            TlsPolicy(clock, remember_broken=settings.remember_broken_tls),
            hostname=self.hostname,
            events=self.events,
            logins=self.logins,
        )
        self._carried: set[BatchState] = set()
        self._seen_skipped = ExpiringSet[str](clock, session_limits.REMEMBER_FOR)
        self._extensions = session_limits.UsedExtensions(clock)
        self._limits = session_limits.SessionLimits(clock)
        self.pool = ConnectionPool(quit_timeout=settings.quit_timeout, shared=self.shared)

    def learned(self, address: str) -> tuple[str, ...]:
        """Describe how a host at this address (`ip:port`) is treated because of its earlier behavior."""
        lines = []
        if (most := self._limits.most(address)) is not None:
            lines.append(f"connections are closed after {most} messages, because the host rejected more")
        if failure := self._extensions.failure(address):
            lines.append(f"DATA is used instead of BDAT for a day: {failure}")
        if self._extensions.few_parameters(address):
            lines.append("few MAIL and RCPT parameters are used for a day: it rejected some that it offers")
        return tuple(lines)

    def phase_of(self, key: DeliveryKey) -> tuple[str, float] | None:
        """Return the current phase of an attempt and its time limit in seconds (0 if unknown)."""
        for state in self._carried:
            batch = state.batch
            if key.message_id == batch.message.id and any(key == each.key for each in batch.deliveries):
                if state.exchange is None:
                    return (f"a connection to {state.opening}", 0.0) if state.opening else None
                transaction, session = state.exchange
                peer = f"{session.peer.host} [{session.peer.address}]"
                return f"{transaction.phase} of {peer}", session.protocol.time_left
        return None

    def join(self) -> None:
        """Record the active transactions in a transcript that has just begun."""
        for state in self._carried:
            if state.exchange is None:
                continue
            transaction, session = state.exchange
            protocol, peer, before = session.protocol, session.peer, session.protocol.record
            protocol.record = record = self._record(state, peer.host, peer.address, before)
            if record is not None and record is not before:
                left = exact_span(protocol.time_left)
                record.joined(
                    f"waits {left} for {transaction.phase}", transaction.phase is TransactionPhase.BODY
                )

    async def deliver(self, batch: Batch) -> Sequence[Outcome]:
        """Deliver a batch and return one outcome per delivery, in order. Only CancelledError and
        ClaimLostError are raised, and only while no peer has replied for a recipient.
        """
        route = named_after(batch.deliveries, batch.route, batch.zone)
        terms = Terms(batch.zone, route, ANY_CONNECTION)
        now = self.clock.now()
        state = BatchState(terms, batch, self.read_body, self.check_claim, now=now)
        self._carried.add(state)
        try:
            await self._carry(state)
        except StoreError as error:
            if isinstance(error, ClaimLostError) and not state.answered:
                raise
            state.settle_open(_local(batch_state.unreadable(error)))
        except RenderError as error:
            state.settle_open(_local(error.reply))
        except asyncio.CancelledError:
            if not state.answered:
                raise
            state.settle_open(_CUT_SHORT)
        except NoTurnError:
            state.undecided(_NO_TURN)  # the peers' replies so far remain valid
        except NoLogin as failure:
            state.host_failed("", failure)
        except Exception as error:  # noqa: BLE001 - DESIGN rule 3: an unknown error is temporary
            context = {"message": f"delivery of {batch.message.id} failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
            reply = Reply(451, "3.0", f"internal error: {type(error).__name__}")
            state.settle_open(_local(reply))
        finally:
            self._carried.discard(state)
            if not state.body.whole:
                await ended(asyncio.create_task(state.body.close()))  # a stop loses no outcome here
        outcomes = state.outcomes(_NO_HOST)
        if state.address_blamed and self.sources.another_left(state.terms, state.unfit):
            outcomes = [from_elsewhere(outcome) for outcome in outcomes]
        if state.unverified is not None:
            outcomes = [_for_its_tls(outcome, *state.unverified) for outcome in outcomes]
        source = state.terms.key.source
        return outcomes if source is None else [sent_from(source, outcome) for outcome in outcomes]

    async def _carry(self, state: BatchState) -> None:
        batch = state.batch
        if self.renderer.changes(batch.zone, batch.message):
            state.send(await self.renderer.render(batch.zone, batch.message))
        await state.body.open()
        if batch.zone.credentials or batch.zone.next_hop_share:
            state.terms = Terms(batch.zone, state.terms.route, self._next_hop_key(batch))
        if batch.message.envelope.require_tls:
            state.terms = state.terms.verifying()
        if batch.zone.sources:
            await self._attempt_from_sources(state)
        else:
            await self._attempt(state)

    def _next_hop_key(self, batch: Batch) -> ConnectionKey:
        """Return the key of the connections that a batch may use, with its next hop and credential. Raise
        NoLogin.
        """
        zone, credential = batch.zone, None
        if zone.credentials:
            credential = self.logins.credential_for(zone, batch.message.envelope.sender)
        return ConnectionKey(
            credential=credential, host=self._order.first_of(batch.route) if zone.next_hop_share else ""
        )

    async def _attempt(self, state: BatchState) -> None:
        got = self.pool.take(state.terms) or await self.pool.acquire(state.terms)
        slot = got if isinstance(got, Slot) else None
        if not isinstance(got, Slot):
            await self._use(got, state)
        if state.open:
            await self._find_takers(state, slot)

    async def _attempt_from_sources(self, state: BatchState) -> None:
        """Try to deliver from the source chosen for the batch, and from the next one if it cannot be used."""
        batch = state.batch
        while state.open:
            key = self.sources.choose(batch.zone, batch.route, batch.message, state.unfit)
            if key is None or key.source is None:
                reply = Reply(451, "3.5", f"no source of zone {batch.zone.name} can be used now")
                state.host_failed("", HostFailure(reply, asked=False, scope=Scope.LOCAL))
                return
            state.terms = Terms(batch.zone, state.terms.route, state.terms.key.from_source(key))
            state.source_unfit = state.family_missed = False
            await self._attempt(state)
            if not state.source_unfit:
                return
            state.unfit.add(key.source.name)

    async def _find_takers(self, state: BatchState, slot: Slot | None) -> None:
        """Try new connections until all recipients have an outcome or nothing is left to try."""
        terms = state.terms
        try:
            async with aclosing(self._endpoints(state)) as endpoints:
                async for host, ip, plan in endpoints:
                    same_again = True
                    while same_again:
                        slot = slot or await self.pool.reserve(terms)
                        opened = await self._open(state, slot, host, ip, plan)
                        if isinstance(opened, HostFailure):
                            if state.source_unfit or isinstance(opened, NoLogin):
                                return
                            break
                        slot = None  # the session owns it now
                        before, suspect = len(state.open), state.suspect
                        limited = await self._use(opened, state)
                        if not state.open:
                            return
                        is_suspect = state.suspect is not None and state.suspect is not suspect
                        same_again = is_suspect or (limited and len(state.open) < before)
        finally:
            if slot is not None:
                slot.release()

    async def _open(
        self, state: BatchState, slot: Slot, host: MxHost, ip: str, plan: TlsRequirements
    ) -> OutgoingSession | HostFailure:
        """Open a connection and return its session, which owns the slot, or the reason for the failure."""
        terms = state.terms
        state.opening = f"{host.name} [{join_port(ip, host.port)}]"
        slot.record = self._record(state, host.name, join_port(ip, host.port), None)
        try:
            try:
                session = await self._opener.open(terms, host, ip, slot, plan)
            except HostFailure as failure:
                # The host may accept fewer connections than we allow, so its idle ones are closed for this
                # one.
                is_not_now = failure.said is not None and failure.said.is_transient
                if not (is_not_now and await self.pool.clear(terms.route)):
                    raise
                session = await self._opener.open(terms, host, ip, slot, plan)
        except HostFailure as failure:
            self._failed(failure, host, ip, state)
            return failure
        self._order.talked(host, ip)
        if terms.key.source is not None:
            self.sources.bound(terms.key.source, ip)
        self._report_skipped(session, session.skipped)
        self._extensions.allow(session)
        return session

    def _report_skipped(self, session: OutgoingSession, line: str) -> None:
        """Report a line that was skipped because it has no reply code, at most once a day per host."""
        peer = session.peer
        if line and peer.address not in self._seen_skipped:
            self._seen_skipped.add(peer.address)
            self.events.reply_without_code(peer.host, peer.address, line)

    def _record(
        self, state: BatchState, host: str, peer: str, before: SessionRecorder | None
    ) -> SessionRecorder | None:
        """Return the transcript recorder for a connection of this batch, or None if nothing is recorded."""
        if not self.events.transcripts.on:
            return None
        names = {state.terms.route.name, host, peer, *(each.domain for each in state.batch.deliveries)}
        return self.events.transcripts.outbound(names, state.batch.message.id, peer, before)

    def _failed(self, failure: HostFailure, host: MxHost, ip: str, state: BatchState) -> None:
        is_too_many = failure.said is not None and self.pool.open_at(state.terms) > 1
        state.host_failed(host.name, failure, counts=not is_too_many)
        if state.terms.key.verify and isinstance(failure, TlsFailure):
            state.unverified = host.name, failure
        source, said = state.terms.key.source, failure.said
        if source is not None and isinstance(failure, SourceFailure):
            state.source_unfit = self.sources.lost(source, failure)
        elif (
            source is not None and said is not None and self.sources.heard(state.terms, said, failure.address)
        ):
            state.address_blamed = True
            self._order.talked(host, ip)  # the host may be fine for other sources
        else:
            self._order.failed(host, ip, failure)

    async def _endpoints(
        self, state: BatchState
    ) -> AsyncGenerator[tuple[MxHost, str, TlsRequirements], None]:
        """Yield each host and address to try, with its TLS requirements. A host that cannot be found counts
        as tried.

        A host that lacks what the message needs does not count.
        """
        left, lacking = self.settings.max_hosts_per_attempt, MAX_LACKING
        found = False
        dead: list[tuple[MxHost, str, TlsRequirements]] = []
        again = None if state.suspect is None else state.suspect.session.peer
        for host in self._order.hosts(state.terms, again.host if again is not None else ""):
            if left <= 0 or lacking <= 0:
                state.undecided(_MORE_HOSTS)
                break
            try:
                known = await self._addresses_of(host, state)
                plan = await requirements(self.resolver, state.terms, host, known)
            except HostFailure as failure:
                state.host_failed(host.name, failure)
                left -= 1
                continue
            ips: Sequence[str] = known.ips
            if again is not None:
                ips = sorted(ips, key=lambda ip: join_port(ip, host.port) != again.address)
            for ip in ips:
                if left <= 0 or lacking <= 0:
                    break
                if self._order.is_down(host, ip):
                    dead.append((host, ip, plan))
                else:
                    found = True
                    left -= 1
                    state.lacking = False
                    yield host, ip, plan
                    if state.lacking:
                        left += 1
                        lacking -= 1
        for endpoint in dead[:left]:
            found = True
            yield endpoint
        if len(dead) > left:
            state.undecided(_MORE_HOSTS)
        state.source_unfit = state.source_unfit or (state.family_missed and not found)

    async def _addresses_of(self, host: MxHost, state: BatchState) -> Addresses:
        """Return the addresses of a host that the batch's source can reach. Raise HostFailure if there are
        none.
        """
        found = Addresses((host.name,))
        if not host.literal:
            found = await self.resolver.addresses(host.name, ipv6=state.batch.zone.ipv6)
        if found.failure is not None:
            raise HostFailure(found.failure, asked=False)
        key = state.terms.key
        if key.source is None:
            return found
        reachable = self.sources.reachable(key, found.ips)
        if not reachable:
            state.family_missed = True
            text = (
                f"{host.name} has no address in the address family of source {key.source.name} (IPv4 or IPv6)"
            )
            raise HostFailure(Reply(451, "4.4", text), asked=False)
        return structs.replace(found, ips=reachable)

    async def _use(self, session: OutgoingSession, state: BatchState) -> bool:
        """Run transactions on a connection until all recipients have an outcome or no more are possible.

        Return true if the peer's limits ended it and another connection to the host may serve more. If the
        host may have too many connections, an idle one continues.
        """
        while True:
            limited = await self._run(session, state)
            if state.asked_again > MAX_ASKED_AGAIN:
                state.give_up()
            suspect = state.suspect
            if not state.open or suspect is None or not suspect.others:
                return limited
            another = await self.pool.next_idle(state.terms, FEWER_PATIENCE)
            if another is None:
                if self.pool.open_at(state.terms):
                    state.batch.most_connections = suspect.others
                    state.give_up()
                return limited
            session = another

    async def _run(self, session: OutgoingSession, state: BatchState) -> bool:
        """Run transactions as `_use` does, but only on this connection."""
        in_step, transaction = False, None
        protocol = session.protocol
        if self.events.transcripts.on or protocol.record is not None:
            peer = session.peer
            protocol.record = self._record(state, peer.host, peer.address, protocol.record)
        try:
            self._limits.apply(session)
            while session.transactions < session.max_transactions:
                if state.body.spent:
                    await state.reopen_body()
                if state.wants_conversion(session):
                    await state.convert(self.renderer)
                transaction = state.transaction(session)
                if transaction is None:
                    break
                if state.batch.take_turn is not None and not await state.batch.take_turn():
                    in_step = True
                    raise NoTurnError
                session.transactions += 1
                state.exchange = transaction, session
                await batch_state.run_transaction(transaction, protocol, state.body, self._timeouts)
                state.record(transaction, session, suspect=self._is_suspect(transaction, session, state))
                if state.terms.key.source is not None:
                    self._hear(transaction, session, state)
                self._extensions.learn(session, transaction)
                more = state.left_out or transaction.again or (transaction.delivered and transaction.overflow)
                self._report_skipped(session, protocol.skipped)
                if transaction.closing or not more:
                    break
            in_step = transaction is None or not transaction.closing
        finally:
            state.exchange = None
            if in_step:
                self.pool.give_back(session, more=state.batch.more)
            else:
                self.pool.abort(session)
        return in_step and (state.left_out or session.transactions >= session.max_transactions)

    def _is_suspect(
        self, transaction: ClientTransaction, session: OutgoingSession, state: BatchState
    ) -> bool:
        """Return whether the refusal that ended a transaction may be about the connection, which then gets no
        more mail.

        Learn from a transaction that was repeated on another connection.
        """
        others = 0 if transaction.delivered else self.pool.open_at(state.terms) - 1
        before, state.suspect = state.suspect, None
        if before is not None and before.session.peer.address == session.peer.address:
            state.suspect = self._limits.still_suspect(before, session, transaction, others=others)
            if state.suspect is None and before.others and transaction.delivered:
                state.batch.most_connections = before.others
        suspect = self._limits.suspect(session, transaction, others=others)
        if transaction.delivered:
            state.asked_again = 0
        elif suspect is not None:
            state.suspect = suspect
            state.asked_again += 1
        refusal = transaction.refusal if transaction.refused_at is TransactionPhase.FINAL_DOT else None
        is_put_off = refusal is not None and refusal.is_transient and session.delivered > 0
        if suspect is not None or is_put_off:
            session.max_transactions = session.transactions
        return suspect is not None

    def _hear(self, transaction: ClientTransaction, session: OutgoingSession, state: BatchState) -> None:
        """Record replies in which the peer rejects the source address. Recipients of one transaction usually
        share their reply.
        """
        replies = {
            outcome.reply
            for outcome in transaction.outcomes
            if outcome is not None and outcome.verdict is not Verdict.DELIVERED and not outcome.local
        }
        for reply in replies:
            if self.sources.heard(state.terms, reply, session.peer.address):
                state.address_blamed = True


def _for_its_tls(outcome: Outcome, host: str, failure: HostFailure) -> Outcome:
    """Return the outcome for a message that requires stricter TLS than other mail. It applies to the message
    only, because other mail may reach the hosts (RFC 8689 4.2.1).
    """
    if outcome.scope is not Scope.HOST:
        return outcome
    reply = Reply(451, TLS_REQUIRED, failure.reply.text)
    return structs.replace(outcome, reply=reply, scope=Scope.MESSAGE, host=host, peer=failure.address)


def _local(reply: Reply) -> Outcome:
    return Outcome(Verdict.DEFERRED, reply, Scope.LOCAL, local=True, counts=False)


_CUT_SHORT = _local(Reply(451, "3.2", "the relay was stopped before the other hosts were tried"))
_NO_TURN = _local(
    Reply(451, "4.5", "the rate limit of the destination does not allow the other hosts to be tried soon")
)
_MORE_HOSTS = Outcome(
    Verdict.DEFERRED,
    Reply(451, "4.4", "the route has more hosts than are tried in one attempt"),
    Scope.MESSAGE,
    local=True,
)
_NO_HOST = _local(Reply(451, "4.4", "the route has no host to try"))
