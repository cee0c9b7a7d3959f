"""Decides which of a host's extensions are used: BDAT instead of DATA (RFC 3030), and the optional parameters
of a message (SIZE, BODY for a body of 7 bits, RET, ENVID, NOTIFY, ORCPT, an unnecessary SMTPUTF8).

Some hosts offer an extension and then refuse it. For `REMEMBER_FOR` seconds such a host gets mail without it
(`ExpiringSet`). The decision is made once for each connection, so that mail to other hosts has no cost.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from zonerelay.delivery.batch.transaction_io import SentBody
from zonerelay.delivery.connection.session import OutgoingSession
from zonerelay.delivery.peer import ExpiringSet
from zonerelay.model.clock import Clock
from zonerelay.model.delivery import Delivery
from zonerelay.model.envelope import Message
from zonerelay.smtp.client.stuffing import as_chunk
from zonerelay.smtp.client.transaction import (
    BdatFailure,
    ChunkedTransaction,
    ClientTransaction,
    can_be_chunked,
)

REMEMBER_FOR = 24 * 3600.0


class UsedExtensions:
    """Remembers which extensions of a host work."""

    def __init__(self, clock: Clock) -> None:
        self._without_bdat = {failure: ExpiringSet(clock, REMEMBER_FOR) for failure in BdatFailure}
        self._few_parameters = ExpiringSet(clock, REMEMBER_FOR)
        self._took_mail = ExpiringSet(clock, REMEMBER_FOR)

    def failure(self, address: str) -> str:
        """Return the reason why a host (`ip:port`) is sent DATA instead of BDAT, or `""`."""
        return next((failure for failure, hosts in self._without_bdat.items() if address in hosts), "")

    def few_parameters(self, address: str) -> bool:
        """Return true if a host has refused parameters that it offers, and accepted mail without them."""
        return address in self._few_parameters

    def allow(self, session: OutgoingSession) -> None:
        """Remove extensions that the host does not support correctly from a new session."""
        address = session.peer.address
        session.has_taken_mail = address in self._took_mail
        if self.few_parameters(address):
            session.capabilities = replace(session.capabilities, few_parameters=True)
        session.chunking = (
            session.terms.zone.chunking and session.capabilities.chunking and not self.failure(address)
        )
        if session.chunking:
            surplus = self._without_bdat[BdatFailure.SURPLUS]
            session.protocol.on_surplus = functools.partial(surplus.add, address)

    def learn(self, session: OutgoingSession, transaction: ClientTransaction) -> None:
        """Learn from a finished transaction."""
        if transaction.parameters_refused:
            session.capabilities = replace(session.capabilities, few_parameters=True)
        elif session.capabilities.few_parameters and transaction.delivered:
            self._few_parameters.add(session.peer.address)
        if transaction.delivered and not session.has_taken_mail:
            session.has_taken_mail = True
            self._took_mail.add(session.peer.address)
        if not session.chunking:
            return
        if transaction.bdat_failure is not None:
            session.chunking = False
            self._without_bdat[transaction.bdat_failure].add(session.peer.address)
        elif isinstance(transaction, ChunkedTransaction) and transaction.bdat_taken:
            session.bdat_taken = True


def chunked(
    session: OutgoingSession, message: Message, deliveries: Sequence[Delivery], body: SentBody
) -> ClientTransaction | None:
    """Return the transaction with BDAT, or None for a body that is sent with DATA."""
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
