"""Holds a whole message in memory for an aiosmtpd handler, before any of it is stored.

The body waits in memory. The memory account of all sessions counts it twice: first the received buffer and
the whole message, then the whole message and the data for the store. The listener's size limit is at most
`policy_max_size`, and a larger message is refused without calling the handler, so no handler gets a part of a
message.

If the handler accepts, its changes to the envelope are checked and applied. Then [[rewrite]] applies, and the
message (from the client or from the handler) is processed like every message: size, header, loop check, DKIM
hash, store.
"""

from __future__ import annotations

from collections.abc import Callable

from zonerelay.config.settings import BareLineEnds
from zonerelay.inbound.cleanup.intake import Intake
from zonerelay.inbound.policy.api import Changes, WholeMessage
from zonerelay.inbound.state import changed_envelope, replies
from zonerelay.inbound.state.client_state import ClientState
from zonerelay.inbound.state.context import ListenerContext
from zonerelay.inbound.state.permissions import apply_mode
from zonerelay.inbound.state.replies import ServerReply
from zonerelay.inbound.state.transaction import MailTransaction
from zonerelay.model.envelope import Envelope
from zonerelay.model.message_id import MessageId
from zonerelay.smtp.server.line_ends import ChunkReader
from zonerelay.store.contract import CHUNK_SIZE, MessageWriter

COPIES = 2
SLICE = 4 * CHUNK_SIZE  # bytes that are processed in one iteration of the event loop


class WholeIntake(Intake):
    """Holds a message in memory for an aiosmtpd handler."""

    def __init__(
        self,
        envelope: Envelope,
        transaction: MailTransaction,
        client_state: ClientState,
        context: ListenerContext,
        on_room: Callable[[], None],
    ) -> None:
        super().__init__(envelope, transaction, client_state, context, on_room)
        self._gathered = bytearray()  # a list of bytes objects would use forty times the counted memory
        self._whole = b""
        self._counted = 0  # bytes of the received buffer, then of the whole message
        # The header is parsed in the message that the handler accepts.
        self._later, self._scanner = self._scanner, None
        self._gathers = True

    async def store(self) -> MessageId | None:
        try:
            await self._ask_handler()
        except Exception as error:  # noqa: BLE001 - rule 3
            self._fail(error)
        return await super().store() if self.refusal is None else None

    def _take(self, piece: bytes) -> None:
        if not self._gathers:
            super()._take(piece)
            return
        self._counted += len(piece)
        if self._counted > self._settings.max_message_size:
            self.refuse(replies.too_big(self._settings.max_message_size))
        elif self._body.has_bare and self._settings.bare_line_ends is BareLineEnds.REJECT:
            self.refuse(replies.BARE_LINE_ENDS, self._line_ends())
        else:
            self._gathered += piece
            self._charge()

    def _charge(self) -> None:
        super()._charge()
        extra = COPIES * self._counted
        self._context.memory.used += extra
        self.held += extra

    def refuse(self, answer: ServerReply, detail: str = "") -> None:
        self._gathered, self._whole, self._counted = bytearray(), b"", 0
        super().refuse(answer, detail)

    async def _ask_handler(self) -> None:
        context, client_state, transaction = self._context, self._client_state, self.transaction
        self._whole, self._gathered, self._gathers = bytes(self._gathered), bytearray(), False
        event = WholeMessage(
            client=client_state.info,
            mail=transaction.mail,
            recipients=transaction.recipients,
            content=self._whole,
        )
        verdict = await context.consultants.ask(event)
        if self._refused_by(verdict):
            return
        changes = verdict.decision
        if isinstance(changes, Changes):
            failed = None
            if changes.of_envelope:
                failed = changed_envelope.apply(
                    changes, transaction, client_state, context, step=WholeMessage.step
                )
            if failed is not None:
                self.refuse(*failed)
                return
            if changes.content is not None:
                self._whole, self._counted = changes.content, len(changes.content)
                self._body = ChunkReader()
                self._body.begin(len(self._whole), last=True)
        origin = client_state.origin
        if context.rewriting is not None:
            context.rewriting.rewrite(transaction, origin)
        apply_mode(transaction)
        before = self.envelope
        self.envelope = transaction.envelope(before.id, before.created, origin, before.priority)
        self._scanner = self._later
        self._charge()

    async def _commit(self, writer: MessageWriter) -> MessageId | None:
        """Pass the whole message to the store, then commit it."""
        for at in range(0, max(len(self._whole), 1), SLICE):
            piece = self._whole[at : at + SLICE]
            is_made = isinstance(self._body, ChunkReader) and not self._body.done
            self._take(self._body.feed(piece) if is_made else piece)
            if self.refusal is None and self._ready:
                await self._write(writer)
            if self.refusal is not None:
                return None
        if self._scanner is not None:
            self._begin_body(self._scanner, self._scanner.finish())
        if self.refusal is None and self._ready:
            await self._write(writer)
        return await super()._commit(writer) if self.refusal is None else None
