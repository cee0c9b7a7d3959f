"""Decides when BDAT replaces DATA (RFC 3030), and remembers hosts that had trouble with BDAT.

The decision is made once for each connection, so mail to peers without CHUNKING pays nothing. The memory
holds addresses for REMEMBER_FOR seconds (`peer/expiring_set.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from zonerelay.delivery.batch.transaction_io import SentBody
from zonerelay.delivery.connection.session import Session
from zonerelay.delivery.peer.expiring_set import ExpiringSet
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.smtp.client.chunk_lines import as_chunk
from zonerelay.smtp.client.chunked import ChunkedTransaction, can_be_chunked
from zonerelay.smtp.client.transaction import BdatTrouble, Transaction

REMEMBER_FOR = 24 * 3600.0


class Chunking:
    """One per worker."""

    def __init__(self, clock: Clock) -> None:
        self._without_bdat = {trouble: ExpiringSet(clock, REMEMBER_FOR) for trouble in BdatTrouble}

    def trouble(self, address: str) -> str:
        """Returns why a host (`ip:port`) gets DATA instead of BDAT, `""` if it does not."""
        return next((trouble for trouble, hosts in self._without_bdat.items() if address in hosts), "")

    def allow(self, session: Session) -> None:
        """Settles whether a new session uses BDAT."""
        address = session.peer.address
        session.chunking = (
            session.terms.zone.chunking and session.capabilities.chunking and not self.trouble(address)
        )
        if session.chunking:
            surplus = self._without_bdat[BdatTrouble.SURPLUS]
            session.protocol.on_surplus = functools.partial(surplus.add, address)

    def learn(self, session: Session, transaction: Transaction) -> None:
        """Learns from a finished transaction on a session with `chunking`."""
        if transaction.trouble is not None:
            session.chunking = False
            self._without_bdat[transaction.trouble].add(session.peer.address)
        elif isinstance(transaction, ChunkedTransaction) and transaction.bdat_taken:
            session.bdat_taken = True


def chunked(
    session: Session, message: Message, deliveries: Sequence[Delivery], body: SentBody
) -> Transaction | None:
    """Returns the transaction with BDAT, `None` for a body that goes with DATA."""
    if not (body.whole and can_be_chunked(body.head)):
        return None
    content = as_chunk(body.head, plain=body.plain_lines)
    return ChunkedTransaction(
        message,
        deliveries,
        session.capabilities,
        session.peer,
        content=content,
        probe=not session.bdat_taken,
    )
