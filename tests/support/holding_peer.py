"""A receiver that holds its first conversations at chosen points until it is told to go on.

A test sees how many copies have arrived, wherever the relay that sends them was stopped meanwhile.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from tests.support.sink import Sink
from tests.support.sink_conversation import Conversation, Manners
from tests.support.submit import tokens
from tests.support.waiting import until

PATIENCE = 120.0


class Hold(StrEnum):
    """The reply that is held back; BODY: the body is not read to its end."""

    GREETING = "greeting"
    MAIL = "MAIL"
    RCPT = "RCPT"
    DATA = "DATA"
    BODY = "body"
    END = "end of the body"
    BDAT = "BDAT"


class HoldingPeer(Sink):
    """Connection number n is held at the n-th of `holds`; later ones at nothing."""

    def __init__(self, holds: Sequence[Hold]) -> None:
        super().__init__(manners=Manners(greeting="220 peer.test ESMTP", pipelining=False, smtputf8=False))
        self.held: list[Hold] = []
        self.ended: list[Hold] = []
        self._holds = holds
        self._left = list(holds)
        self._go_on = asyncio.Event()

    @property
    def copies(self) -> Counter[str]:
        """By the token of the message."""
        return tokens(self.messages)

    def release(self) -> None:
        self._go_on.set()

    async def until_held(self) -> None:
        await until(lambda: len(self.held) == len(self._holds), seconds=PATIENCE)

    async def until_ended(self) -> None:
        """Waits until the relay has closed every connection that was held."""
        await until(lambda: len(self.ended) == len(self._holds), seconds=PATIENCE)

    async def until_arrived(self, wanted: set[str]) -> None:
        await until(lambda: wanted <= self.copies.keys(), seconds=PATIENCE)

    async def hold(self, at: Hold) -> None:
        """Waits for `release`."""
        self.held.append(at)
        await self._go_on.wait()

    def conversation(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Conversation:
        if not self._left:
            return super().conversation(reader, writer)
        return _HeldConversation(self, self._left.pop(0), reader, writer)


class _HeldConversation(Conversation):
    def __init__(
        self, peer: HoldingPeer, hold: Hold, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        super().__init__(peer, reader, writer)
        self._manners = replace(self._manners, chunking=hold is Hold.BDAT)
        self._peer, self._hold = peer, hold
        self._at: str = Hold.GREETING

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            self._peer.ended.append(self._hold)

    async def _command(self, verb: str, argument: str) -> None:
        self._at = verb
        await super()._command(verb, argument)

    async def _body(self) -> tuple[bytes, int, str]:
        await self._reach(Hold.BODY)
        read = await super()._body()
        self._at = Hold.END
        return read

    async def _reply(self, reply: str) -> None:
        await self._reach(self._at)
        await super()._reply(reply)

    async def _reach(self, point: str) -> None:
        if point == self._hold and self._hold not in self._peer.held:
            await self._peer.hold(self._hold)
