"""Carries one transaction out on one connection: bytes, bodies and deadlines, but no decisions.

A broken connection, a silent or confused peer and a body that cannot be read to its end become
outcomes of the transaction, which is DONE afterwards. When the body cannot be read the
final dot is never sent and the connection is aborted, so no peer takes a cut message.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

from zonerelay.config.models import DeliverySettings
from zonerelay.delivery.wire import SilentError, Wire, WireError
from zonerelay.model.envelope import Message
from zonerelay.model.message_id import MessageId
from zonerelay.model.reply import Reply
from zonerelay.smtp.replies import PeerError
from zonerelay.smtp.stuffing import DotStuffer, PlainLines
from zonerelay.smtp.transaction import Phase, Transaction
from zonerelay.store.base import StoreCorruptError, StoreError

ReadBody = Callable[[MessageId], AsyncIterator[bytes]]
Timeouts = dict[Phase, float]


def phase_timeouts(settings: DeliverySettings) -> Timeouts:
    return {
        Phase.MAIL: settings.mail_timeout,
        Phase.RCPT: settings.rcpt_timeout,
        Phase.DATA: settings.data_timeout,
        Phase.BODY: settings.block_timeout,
        Phase.FINAL_DOT: settings.final_dot_timeout,
        Phase.LONE_DOT: settings.data_timeout,
        Phase.RSET: settings.mail_timeout,
    }


class Body:
    """A stored body on its way out. `open` reads the first piece before the peer is bothered.

    A body of one piece is in memory then and can be sent again; a longer one is read once, and
    `spent` tells that a new Body is needed. Every method raises StoreError when the store
    fails or when the length is not the message's: a message must not be completed then.
    """

    def __init__(self, read_body: ReadBody, message: Message) -> None:
        self.head = b""
        self.spent = False
        self.plain_lines = message.plain_lines
        self._size = message.size
        self._seen = 0
        self._pieces = read_body(message.id)

    async def open(self) -> None:
        self.head = await self._next()
        if self.whole:
            await self._next()

    @property
    def whole(self) -> bool:
        """True when `head` is all there is."""
        return len(self.head) == self._size

    async def next(self) -> bytes:
        """What follows `head`, piece by piece; `b""` at the end."""
        self.spent = True
        return await self._next()

    async def close(self) -> None:
        close = getattr(self._pieces, "aclose", None)  # generators hold resources, plain iterators need not
        if close is not None:
            await close()

    async def _next(self) -> bytes:
        piece = await anext(self._pieces, b"")
        self._seen += len(piece)
        if self._seen > self._size or (not piece and self._seen < self._size):
            raise StoreCorruptError(f"the body has {self._seen} octets instead of {self._size}")
        return piece


async def carry_out(transaction: Transaction, wire: Wire, body: Body, timeouts: Timeouts) -> None:
    """Run the transaction until it is DONE. Raises nothing but CancelledError and our own bugs."""
    try:
        wire.write(transaction.begin())
        while transaction.phase is not Phase.DONE:
            if transaction.phase is Phase.BODY and await _send(body, wire, timeouts[Phase.BODY]):
                transaction.body_sent()
            command = transaction.receive(await wire.reply(timeouts[transaction.phase]))
            if command:
                wire.write(command)
    except StoreError as error:
        wire.abort()
        transaction.abandon(unreadable(error))
    except SilentError:
        phase = transaction.phase.value
        transaction.lost(Reply(451, SilentError.detail, f"timed out waiting during {phase}"))
    except WireError:
        phase = transaction.phase.value
        transaction.lost(Reply(451, WireError.detail, f"connection lost during {phase}"))
    except PeerError as error:
        transaction.lost(Reply(451, "5.0", f"{error} (during {transaction.phase.value})"))


def unreadable(error: StoreError) -> Reply:
    return Reply(451, "3.0", f"the message could not be read from the store: {error}")


async def _send(body: Body, wire: Wire, timeout: float) -> bool:
    """True when the final dot was written, false when the peer answered before it."""
    stuffer = PlainLines() if body.plain_lines else DotStuffer()
    piece = stuffer.feed(body.head)
    if not body.whole:
        while following := await body.next():
            if wire.heard:
                return False
            wire.write(piece)
            await wire.drain(timeout)
            piece = stuffer.feed(following)
        # What is lost before this returns was certainly not complete, so it is not in doubt.
        await wire.flush(timeout)
    if wire.heard:
        return False
    wire.write(piece + stuffer.finish())
    return True
