"""Runs one transaction on one connection: bytes, bodies and deadlines, but no decisions.

A broken connection, a silent or malformed peer and a body that cannot be read to its end become outcomes of
the transaction, which is DONE afterwards. If the body cannot be read, the final dot is never sent and the
connection is aborted, so that no peer accepts a truncated message.

Before each write, `SentBody.check_claim` checks whether this relay still owns the message: a wait for the
peer, or a pause of this machine, may have outlasted the lease, and then another relay sends it. The end of a
message is written only when everything before it has left this process, because data left in a buffer would
be sent after a pause without another check.
"""

from __future__ import annotations

from zonerelay.config.settings import DeliverySettings
from zonerelay.delivery.connection.client_protocol import (
    ClientProtocol,
    ConnectionLostError,
    ReplyTimeoutError,
)
from zonerelay.delivery.rewrite.rendering import CheckClaim, ReadBody
from zonerelay.model.envelope import Message
from zonerelay.model.reply import Reply
from zonerelay.smtp.client.replies import PeerError
from zonerelay.smtp.client.stuffing import END, DotStuffer, stuffed
from zonerelay.smtp.client.transaction import ClientTransaction, TransactionPhase
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
    """Reads a stored body and sends it in chunks. `open` reads the first chunk before the first command to
    the peer.

    A body of one chunk stays in memory and can be sent again. A longer body is read once, and `spent` says
    that a new object is needed. Every method raises StoreError if the store fails or if the length is not the
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
        """Return the chunk after `head`, and so on, then `b""` at the end."""
        self.spent = True
        return self._count(await anext(self._pieces, b""))

    def check_claim(self) -> None:
        """Raise ClaimLostError if another relay may be sending the message."""
        self._check(self._id)

    async def close(self) -> None:
        """Release the reader. A `whole` body has been read to its end and need not be closed."""
        await self._pieces.aclose()

    def _count(self, piece: bytes) -> bytes:
        self._seen += len(piece)
        if self._seen > self._size or (not piece and self._seen < self._size):
            raise StoreCorruptError(f"the body has {self._seen} bytes instead of {self._size}")
        return piece


async def run_transaction(
    transaction: ClientTransaction, protocol: ClientProtocol, body: SentBody, timeouts: Timeouts
) -> None:
    """Run the transaction until it is DONE. Only CancelledError, ClaimLostError, and exceptions that are bugs
    are raised.
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
    except ReplyTimeoutError:
        transaction.lost(Reply(451, "4.2", f"timed out waiting during {transaction.phase}"))
    except ConnectionLostError:
        transaction.lost(Reply(451, "4.2", f"connection lost during {transaction.phase}"))
    except PeerError as error:
        transaction.lost(Reply(451, "5.0", f"{error} (during {transaction.phase})"))


def unreadable(error: StoreError) -> Reply:
    """Return the deferral for a message that the store cannot read."""
    return Reply(451, "3.0", f"the message could not be read from the store: {error}")


async def _write(command: bytes, protocol: ClientProtocol, body: SentBody, timeout: float) -> None:
    """Write a command, which may be the last BDAT with its chunk. Then the last CRLF waits for the rest."""
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
    """Send a longer body as `_send_whole` does. It may be read while it is sent."""
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
