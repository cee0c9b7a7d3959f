"""Decides when BDAT replaces DATA (RFC 3030), and remembers hosts that offer CHUNKING but do not know BDAT.

The decision is made once for each connection, so mail to peers without CHUNKING pays nothing. The memory
holds addresses for REMEMBER_FOR seconds (`peer/expiring_set.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from zonerelay.config.settings import InDoubt
from zonerelay.delivery.batch.transaction_io import SentBody
from zonerelay.delivery.connection.session import Session
from zonerelay.delivery.peer.expiring_set import ExpiringSet
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.smtp.client.chunk_lines import as_chunk
from zonerelay.smtp.client.chunked import ChunkedTransaction, can_be_chunked
from zonerelay.smtp.client.transaction import Transaction

REMEMBER_FOR = 24 * 3600.0

LATELY = 1.0
"""Seconds. A connection that was idle for longer may be closed by now, so a transaction that cannot be
repeated does not risk it.
"""


class Chunking:
    """One per worker."""

    def __init__(self, clock: Clock) -> None:
        self._without_bdat = ExpiringSet(clock, REMEMBER_FOR)

    def allow(self, session: Session) -> None:
        """Settles whether a new session uses BDAT."""
        session.chunking = (
            session.terms.zone.chunking
            and session.capabilities.chunking
            and session.peer.address not in self._without_bdat
        )

    def learn(self, session: Session, transaction: Transaction) -> None:
        """Learns from a finished transaction on a session with `chunking`."""
        if not isinstance(transaction, ChunkedTransaction):
            return
        if transaction.unknown:
            session.chunking = False
            self._without_bdat.add(session.peer.address)
        elif transaction.bdat_taken:
            session.bdat_taken = True


def chunked(
    session: Session, message: Message, deliveries: Sequence[Delivery], body: SentBody
) -> Transaction | None:
    """Returns the transaction with BDAT, `None` for a body that only DATA can carry.

    The transaction is one write when the body is one piece, the connection has taken a BDAT before and is
    warm, and the zone accepts that more mail is in doubt then (`smtp/client/chunked.py`).
    """
    head = body.head
    if not can_be_chunked(head):
        return None
    at_once = (
        body.whole
        and session.bdat_taken
        and session.terms.zone.in_doubt is InDoubt.RETRY
        and (not session.idle_until or _is_warm(session))
    )
    content = as_chunk(head, plain=body.plain_lines) if at_once else head[:1]
    return ChunkedTransaction(
        message, deliveries, session.capabilities, session.peer, content=content, at_once=at_once
    )


def _is_warm(session: Session) -> bool:
    idle_since = session.idle_until - session.terms.zone.connection_idle_timeout
    return asyncio.get_running_loop().time() < idle_since + LATELY
