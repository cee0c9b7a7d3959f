"""Reads a stored message as it is after a conversion (`message/conversion`): in seven bits for hosts that
take no other, and without lines that some hosts refuse.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace

from zonerelay.delivery.rewrite.stored_pieces import ReadBody
from zonerelay.message.conversion.encoding import Encoder, Plan, Survey
from zonerelay.message.conversion.fields import NotConvertibleError
from zonerelay.model.envelope import Body, Message
from zonerelay.model.message_id import MessageId


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a message is written, and the octets that it has then."""

    plan: Plan
    size: int

    def of(self, message: Message) -> Message:
        message = replace(message, size=self.size, plain_lines=False, long_lines=False, body_hash="")
        if not self.plan.seven_bit:
            return message
        envelope = replace(message.envelope, body=Body.SEVEN_BIT, smtputf8=False)
        return replace(message, envelope=envelope, eight_bit=False)

    def reader(self, read_body: ReadBody) -> ReadBody:
        def read(message_id: MessageId) -> AsyncIterator[bytes]:
            return _converted(self.plan, read_body(message_id))

        return read


async def conversion_of(
    message_id: MessageId, read_body: ReadBody, *, seven_bit: bool, signed_too: bool
) -> Conversion | None:
    """Reads the message once, or twice where it has to be converted; returns `None` where it has not. Raises
    NotConvertibleError and StoreError.
    """
    survey = Survey(seven_bit=seven_bit)
    pieces = read_body(message_id)
    try:
        async for piece in pieces:
            survey.feed(piece)
    finally:
        await _close(pieces)
    survey.finish()
    if not survey.plan.needed:
        return None
    if survey.signed and not signed_too:
        raise NotConvertibleError("its author has signed it")
    size = 0
    async with aclosing(_converted(survey.plan, read_body(message_id))) as written:
        async for piece in written:
            size += len(piece)
    return Conversion(survey.plan, size)


async def _converted(plan: Plan, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yields the message as it is written. No piece is empty."""
    writer = Encoder(plan)
    try:
        while piece := await anext(pieces, b""):
            if written := writer.feed(piece):
                yield written
        if written := writer.finish():
            yield written
    finally:
        await _close(pieces)


async def _close(pieces: AsyncIterator[bytes]) -> None:
    close = getattr(pieces, "aclose", None)  # generators hold resources, plain iterators need not
    if close is not None:
        await close()
