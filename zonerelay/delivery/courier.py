"""Carries batches to hosts: the next hop's order of events, from an idle connection to the last MX host.

For one batch: read the first piece of the body, use an idle connection if there is one, otherwise
open connections to the route's hosts in the order of preference (equal ones shuffled, RFC 5321 5.1) until
every recipient has an answer or `max_hosts_per_attempt` addresses have been tried.

Policies:

- An idle connection that turns out to be closed before it answered MAIL costs nothing: the
  transaction runs again on a fresh one.
- Before MAIL is answered, whatever fails concerns the host: the next one is tried. Afterwards a failure
  is a deferral, because a second host would be asked to take what the first may have taken.
- All failures of hosts are deferrals, also a 5yz greeting and addresses that are not allowed. Bounced is
  only what a peer refuses with 5yz, and what it announced it would: a message beyond
  its SIZE (5.3.4), an address that needs SMTPUTF8 where no host of the route has it (5.6.7).
- What a peer limits with LIMITS (RFC 9422) is sent in several transactions, and on several connections to the
  same host as long as each one brings somebody further.
- Unknown trouble is a deferral of scope LOCAL, and goes to the event loop's exception handler.

A cancelled delivery aborts its connection: a reply that came late could be paired with another message.
"""

from __future__ import annotations

import asyncio
import random as random_module
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from itertools import groupby
from typing import Protocol

from zonerelay.config.models import DeliverySettings, ZoneSettings
from zonerelay.delivery.chunking import Chunking, chunked
from zonerelay.delivery.exchange import Body, ReadBody, carry_out, phase_timeouts, unreadable
from zonerelay.delivery.limits import within_limits
from zonerelay.delivery.pool import Pool
from zonerelay.delivery.progress import Progress
from zonerelay.delivery.session import Session, SessionOpener
from zonerelay.delivery.slots import Slot
from zonerelay.delivery.sources import HostTrouble
from zonerelay.delivery.tls import TlsPolicy
from zonerelay.delivery.way import ANY_WAY, Terms
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.model.outcome import Outcome, Scope, Verdict
from zonerelay.model.reply import Reply
from zonerelay.routing.nexthop import Addresses, MxHost, Route
from zonerelay.smtp.extensions import NO_LIMITS
from zonerelay.smtp.transaction import Transaction, needs_smtputf8, too_large
from zonerelay.store.base import StoreError


class AddressLookup(Protocol):
    """Where the addresses of an MX host come from."""

    async def addresses(self, name: str, *, ipv6: bool) -> Addresses:
        """Most wanted first; `failure` when there are none. Raises nothing but CancelledError."""


class Batch(Protocol):
    """Deliveries of one message to one route, as the scheduler puts them together."""

    @property
    def zone(self) -> ZoneSettings: ...

    @property
    def route(self) -> Route: ...

    @property
    def message(self) -> Message: ...

    @property
    def deliveries(self) -> tuple[Delivery, ...]: ...


class SmtpCourier:
    """One per worker: owns every outgoing connection."""

    def __init__(
        self,
        settings: DeliverySettings,
        *,
        hostname: str,
        addresses: AddressLookup,
        read_body: ReadBody,
        clock: Clock,
        random: random_module.Random,
    ) -> None:
        self._max_hosts = settings.max_hosts_per_attempt
        self._timeouts = phase_timeouts(settings)
        self._addresses = addresses
        self._read_body = read_body
        self._random = random
        tls = TlsPolicy(clock, remember_broken=settings.remember_broken_tls)
        self._opener = SessionOpener(settings, tls, hostname=hostname)
        self._chunking = Chunking(clock)
        self._pool = Pool(quit_timeout=settings.quit_timeout)

    async def deliver(self, batch: Batch) -> Sequence[Outcome]:
        """One outcome per delivery, in order. Raises nothing but CancelledError."""
        errand = _Errand(Terms(batch.zone, batch.route, ANY_WAY), batch, self._read_body)
        progress = errand.progress
        try:
            await errand.body.open()
            session = self._pool.take(errand.terms)
            if session is not None:
                await self._use(session, errand)
            if progress.open:
                await self._find_takers(errand, reused=session is not None)
        except StoreError as error:
            progress.settle_open(_local(unreadable(error)))
        except Exception as error:  # noqa: BLE001  DESIGN rule 3: unknown trouble is temporary
            context = {"message": f"delivery of {batch.message.id} failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
            reply = Reply(451, "3.0", f"internal error: {type(error).__name__}")
            progress.settle_open(_local(reply))
        finally:
            if not errand.body.whole:
                await errand.body.close()
        return progress.outcomes(_NO_HOST)

    async def close(self) -> None:
        """Say goodbye to idle peers, within `quit_timeout`; active sessions end when they are done."""
        await self._pool.close()

    def close_idle(self) -> None:
        self._pool.close_idle()

    def open_connections(self, zone: str) -> int:
        return self._pool.open_connections(zone)

    async def _find_takers(self, errand: _Errand, *, reused: bool) -> None:
        """Go from connection to connection until nobody is open or nothing is left to try.

        `reused`: a connection that was idle has been tried; only fresh ones are, from here on.
        """
        terms = errand.terms
        slot: Slot | None = None
        if not reused:
            got = await self._pool.acquire(terms)
            if isinstance(got, Slot):
                slot = got
            else:
                await self._use(got, errand)
                if not errand.progress.open:
                    return
        try:
            async with aclosing(self._endpoints(errand)) as endpoints:
                async for host, ip in endpoints:
                    same_again = True
                    while same_again:
                        slot = slot or await self._pool.reserve(terms)
                        try:
                            session = await self._opener.open(terms, host, ip, slot)
                        except HostTrouble as trouble:
                            errand.progress.host_failed(host.name, trouble)
                            break
                        slot = None  # the session's now
                        self._chunking.allow(session)
                        before = len(errand.progress.open)
                        limited = await self._use(session, errand)
                        if not errand.progress.open:
                            return
                        same_again = limited and len(errand.progress.open) < before
        finally:
            if slot is not None:
                slot.release()

    async def _endpoints(self, errand: _Errand) -> AsyncGenerator[tuple[MxHost, str], None]:
        """Hosts and addresses to try; a host that cannot be found counts as one that was tried."""
        left = self._max_hosts
        for host in self._in_order(errand.batch.route.hosts):
            ips = await self._addresses_of(host, errand)
            for ip in ips[:left]:
                yield host, ip
            left -= max(len(ips), 1)
            if left <= 0:
                return

    def _in_order(self, hosts: tuple[MxHost, ...]) -> Iterator[MxHost]:
        for _, equal in groupby(hosts, key=lambda host: host.preference):
            group = list(equal)
            self._random.shuffle(group)
            yield from group

    async def _addresses_of(self, host: MxHost, errand: _Errand) -> tuple[str, ...]:
        if host.literal:
            return (host.name,)
        found = await self._addresses.addresses(host.name, ipv6=errand.batch.zone.ipv6)
        if not found.ips:
            reply = found.failure.reply if found.failure else Reply(451, "4.3", "no address")
            # Transient even if the name does not exist: the MX record names it, and may be corrected.
            reply = Reply(451, reply.detail if reply.is_transient else "4.3", f"{host.name}: {reply.text}")
            errand.progress.host_failed(host.name, HostTrouble(reply, asked=False))
        return found.ips

    async def _use(self, session: Session, errand: _Errand) -> bool:
        """Run transactions on a connection until nobody is open or it is good for nothing more.

        True when the peer's limits ended it and another connection to it may serve more.
        """
        in_step = False
        try:
            while True:
                if errand.body.spent:
                    await errand.reopen_body()
                transaction = errand.transaction(session)
                if transaction is None:
                    break
                session.transactions += 1
                await carry_out(transaction, session.wire, errand.body, self._timeouts)
                errand.record(transaction, session)
                if session.chunking:
                    self._chunking.learn(session, transaction)
                more = (
                    errand.left_out or transaction.again or (transaction.delivered and transaction.overflow)
                )
                if transaction.closing or not more or session.transactions >= session.max_transactions:
                    break
            in_step = transaction is None or not transaction.closing
        finally:
            if in_step:
                self._pool.give_back(session)
            else:
                session.wire.abort()
        return in_step and (errand.left_out or session.transactions >= session.max_transactions)


class _Errand:
    """One batch on its way: its progress, its body, and the transaction that fits the next peer."""

    __slots__ = ("_asking", "_read_body", "batch", "body", "left_out", "progress", "terms")

    def __init__(self, terms: Terms, batch: Batch, read_body: ReadBody) -> None:
        self.batch = batch
        self.terms = terms
        self.progress = Progress(batch.deliveries)
        self.body = Body(read_body, batch.message)
        self._read_body = read_body
        self._asking: list[int] = []
        self.left_out = False
        """True when the peer's limits kept somebody out of the latest transaction."""

    def transaction(self, session: Session) -> Transaction | None:
        """For those who are open and whom this peer can serve; `None` when there are none."""
        batch = self.batch
        asking = self._servable(session)
        self.left_out = False
        if session.capabilities.limits is not NO_LIMITS:
            asking = self._within_limits(asking, session)
        self._asking = asking
        if not asking:
            return None
        deliveries: Sequence[Delivery] = batch.deliveries
        if len(asking) < len(deliveries):
            deliveries = [deliveries[index] for index in asking]
        if session.chunking:
            transaction = chunked(session, batch.message, deliveries, self.body)
            if transaction is not None:
                return transaction
        return Transaction(batch.message, deliveries, session.capabilities, session.peer)

    async def reopen_body(self) -> None:
        await self.body.close()
        self.body = Body(self._read_body, self.batch.message)
        await self.body.open()

    def record(self, transaction: Transaction, session: Session) -> None:
        self.progress.record(self._asking, transaction, session.peer)

    def _servable(self, session: Session) -> list[int]:
        message, progress, capabilities = self.batch.message, self.progress, session.capabilities
        refusal = too_large(message, capabilities)
        if refusal is not None:
            progress.refuse_open(refusal, session.peer)
        elif not capabilities.smtputf8 and not self._is_ascii():
            sender_needs = needs_smtputf8(message.envelope.sender)
            needy = [
                i for i in progress.open if sender_needs or needs_smtputf8(self.batch.deliveries[i].recipient)
            ]
            if needy:
                progress.unsupported(needy, session.peer)
                return [index for index in progress.open if index not in needy]
        return progress.open

    def _within_limits(self, servable: list[int], session: Session) -> list[int]:
        asking = within_limits(session, self.batch.deliveries, servable)
        self.left_out = len(asking) < len(servable)
        if self.left_out:
            self.progress.left_out([index for index in servable if index not in asking], session.peer)
        return asking

    def _is_ascii(self) -> bool:
        for delivery in self.batch.deliveries:
            if not delivery.recipient.isascii():
                return False
        return self.batch.message.envelope.sender.isascii()


def _local(reply: Reply) -> Outcome:
    return Outcome(Verdict.DEFERRED, reply, Scope.LOCAL, local=True, counts=False)


_NO_HOST = _local(Reply(451, "4.4", "the route has no host to try"))
