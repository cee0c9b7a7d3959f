"""Reads a stored message as it is in seven bits (`message/conversion`), for hosts that take no other."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, replace

from zonerelay.delivery.rewrite.stored_pieces import ReadBody
from zonerelay.message.conversion.encoding import Plan, SevenBit, Survey
from zonerelay.message.conversion.fields import NotConvertibleError
from zonerelay.model.envelope import Body, Message
from zonerelay.model.message_id import MessageId


@dataclass(frozen=True, slots=True)
class Conversion:
    """How a message is written in seven bits, and the octets that it has then."""

    plan: Plan
    size: int

    def of(self, message: Message) -> Message:
        envelope = replace(message.envelope, body=Body.SEVEN_BIT, smtputf8=False)
        return replace(
            message, envelope=envelope, size=self.size, eight_bit=False, plain_lines=False, body_hash=""
        )

    def reader(self, read_body: ReadBody) -> ReadBody:
        def read(message_id: MessageId) -> AsyncIterator[bytes]:
            return _converted(self.plan, read_body(message_id))

        return read


async def conversion_of(message_id: MessageId, read_body: ReadBody, *, signed_too: bool) -> Conversion:
    """Reads the message twice. Raises NotConvertibleError and StoreError."""
    survey = Survey()
    async for piece in read_body(message_id):
        survey.feed(piece)
    survey.finish()
    if survey.signed and not signed_too:
        raise NotConvertibleError("its author has signed it")
    size = 0
    async with aclosing(_converted(survey.plan, read_body(message_id))) as pieces:
        async for piece in pieces:
            size += len(piece)
    return Conversion(survey.plan, size)


async def _converted(plan: Plan, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yields the message in seven bits. No piece is empty."""
    writer = SevenBit(plan)
    try:
        while piece := await anext(pieces, b""):
            if written := writer.feed(piece):
                yield written
        if written := writer.finish():
            yield written
    finally:
        close = getattr(pieces, "aclose", None)  # generators hold resources, plain iterators need not
        if close is not None:
            await close()
