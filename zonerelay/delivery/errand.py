"""One batch on its way: its progress, its body, and the transaction that fits the next peer.

Here it is decided who is asked at a peer: who is still open, whom the peer's extensions can serve, and how
many its limits allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from zonerelay.config.models import ZoneSettings
from zonerelay.delivery.chunking import chunked
from zonerelay.delivery.exchange import Body, ReadBody
from zonerelay.delivery.limits import within_limits
from zonerelay.delivery.progress import Progress
from zonerelay.delivery.session import Session
from zonerelay.delivery.way import Terms
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.routing.nexthop import Route
from zonerelay.smtp.extensions import NO_LIMITS
from zonerelay.smtp.transaction import Transaction, needs_smtputf8, too_large


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


class Errand:
    """`source_unfit`: its source has no address here, or none in common with the hosts. `family_missed`: that
    is so with one host at least. `address_blamed`: somebody has refused the source's address for what it is.
    """

    __slots__ = (
        "_asking",
        "_read_body",
        "address_blamed",
        "batch",
        "body",
        "family_missed",
        "left_out",
        "progress",
        "source_unfit",
        "terms",
    )

    def __init__(self, terms: Terms, batch: Batch, read_body: ReadBody) -> None:
        self.batch = batch
        self.terms = terms
        self.progress = Progress(batch.deliveries)
        self.body = Body(read_body, batch.message)
        self._read_body = read_body
        self._asking: list[int] = []
        self.source_unfit = False
        self.family_missed = False
        self.address_blamed = False
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
