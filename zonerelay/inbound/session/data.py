"""The bodies of one session: from 354, or from BDAT, to the answer about the message.

Owns which message is being read, which one waits between two of its chunks, and how many octets of a refused
chunk are still to be dropped. Feeds `Intake` and runs its `store`; answers when that is done.

Promise: once the end of data has arrived the message is carried to its answer, client or no client. What
was begun and cannot end any more is aborted in the store, and leaves the account of memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol

from zonerelay.inbound.cleanup.intake import BACKLOG, Intake
from zonerelay.inbound.limits.large_bodies import Reader
from zonerelay.inbound.refusal import Reason
from zonerelay.inbound.session.conversation import Conversation
from zonerelay.inbound.session.timeouts import Deadlines
from zonerelay.inbound.session.transport import Transport
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.context import ListenerContext
from zonerelay.inbound.state.replies import ServerReply, Then
from zonerelay.smtp.server.lines import LineReader


class Speaker(Reader, Protocol):
    """The session, as far as bodies go."""

    transport: Transport
    lines: LineReader
    deadlines: Deadlines
    conversation: Conversation

    @property
    def now(self) -> float:
        """The loop's time."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:  # Any: asyncio's own words
        """Run it; the session is not forgotten before it ends."""

    def regulate(self) -> None:
        """Read, or do not, by what is held."""

    def message_done(self) -> None:
        """Go on with the commands that wait."""

    def say_goodbye(self, answer: ServerReply, *, detail: str = "") -> None: ...

    def abort(self) -> None: ...


class Bodies:
    __slots__ = (
        "_context",
        "_owed",
        "_session",
        "behind_others",
        "current",
        "discarding",
        "parked",
    )

    def __init__(self, session: Speaker, context: ListenerContext) -> None:
        self._session = session
        self._context = context
        self.current: Intake | None = None  # being read, or waiting for the store
        self.parked: Intake | None = None  # between two chunks
        self.discarding = 0
        self._owed = replies.OK  # once the octets are discarded
        self.behind_others = False  # other large bodies are read first

    @property
    def wait_for_store(self) -> bool:
        return self.current is not None and self.current.complete

    @property
    def are_behind(self) -> bool:
        """Reading must stop for a reason of ours."""
        intake = self.current or self.parked
        return self.behind_others or (intake is not None and intake.backlog > BACKLOG)

    @property
    def held(self) -> int:
        """Octets in memory."""
        return sum(intake.held for intake in (self.current, self.parked) if intake is not None)

    # What a command has begun.

    def begin(self) -> None:
        """DATA has been answered 354."""
        self.current = self._new_intake()
        deadlines = self._session.deadlines
        deadlines.body_began(deadlines.heard)

    def begin_chunk(self) -> None:
        """BDAT: its octets are next, and some of them may be here."""
        session = self._session
        intake, self.parked = self.parked or self._new_intake(), None
        self.current = intake
        size, last = session.conversation.chunk
        intake.begin_chunk(size, last=last)
        session.deadlines.body_began(session.deadlines.heard)
        self.take(session.lines.take(size))

    def discard_chunk(self, owed: ServerReply) -> None:
        """BDAT was refused: its octets are dropped before that is said."""
        session = self._session
        self._owed = owed
        self.discarding = session.conversation.chunk[0]
        session.deadlines.body_began(session.now)
        self.discard()

    def discard(self) -> None:
        """Drop what is here."""
        session = self._session
        dropped = len(session.lines.take(self.discarding))
        self.discarding -= dropped
        session.deadlines.body_came(dropped, session.now)
        if not self.discarding:
            session.deadlines.complete()
            session.transport.write(self._owed.reply.encode())

    def _new_intake(self) -> Intake:
        conversation, context = self._session.conversation, self._context
        transaction = conversation.transaction
        assert transaction is not None
        origin = conversation.client_state.origin
        if context.rewriting is not None:
            context.rewriting.rewrite(transaction, origin)
        envelope = transaction.envelope(
            context.ids.next(),
            context.clock.now(),
            origin,
            conversation.client_state.priority or context.settings.priority,
        )
        return Intake(envelope, transaction, conversation.client_state, context, self._session.regulate)

    # Octets.

    def take(self, data: bytes) -> None:
        """Octets of the body at hand; what follows its end goes to the lines."""
        intake, session = self.current, self._session
        assert intake is not None
        deadlines = session.deadlines
        deadlines.octets += len(data)
        intake.feed(data)
        if intake.complete or intake.chunk_done:
            self._context.large_bodies.leave(session)
            self.behind_others = False
            if intake.rest:
                session.lines.feed(intake.rest)
            if intake.complete:
                deadlines.complete()
        elif intake.hopeless:
            self.give_up(replies.MUCH_TOO_BIG)
            return
        elif intake.is_large:
            self.behind_others = not self._context.large_bodies.may_read(session, len(data), deadlines.heard)
        if intake.task is None and intake.refusal is None and intake.worth_storing:
            intake.task = session.spawn(self._store(intake))
        if not intake.complete:
            self._go_on(intake)
        elif intake.refusal is not None and intake.task is None:
            self._finish(intake, intake.refusal)
        if not intake.complete or session.lines.waiting or session.transport.is_paused:
            session.regulate()

    def _go_on(self, intake: Intake) -> None:
        """More is to come."""
        if intake.chunk_done:
            self._park(intake)
        if self._context.memory.full:
            self._context.memory.relieve()

    def _park(self, intake: Intake) -> None:
        session = self._session
        self.current = None
        session.deadlines.chunk_complete(session.now)
        if intake.refusal is None:
            self.parked = intake
            session.transport.write(replies.chunk_taken(session.conversation.chunk[0]).wire)
        else:
            self._finish(intake, intake.refusal)

    async def _store(self, intake: Intake) -> None:
        session = self._session
        try:
            answer = await intake.store()
            intake.task = None
            # A refusal in the middle of a body waits for its end.
            if intake.complete:
                self._finish(intake, answer)
                session.message_done()
            else:
                session.regulate()  # what was held back is dropped now, so there is room
        except Exception as error:  # noqa: BLE001 - nobody awaits this task
            self._context.events.trouble("inbound", error, message_id=intake.envelope.id)
            session.abort()
        finally:
            intake.task = None

    # Ends.

    def _finish(self, intake: Intake, answer: ServerReply) -> None:
        """The transaction is over: answer it."""
        session = self._session
        self.current = None
        if intake.held:
            intake.release()
        if answer.reason is not None:
            self._refuse(intake, answer)
        session.conversation.reset()
        if not session.transport.is_open:
            if answer.reason is None:
                self._context.events.reply_lost(intake.envelope.id, intake.envelope.origin)
            return
        session.deadlines.answered(session.now, None)
        session.transport.write(answer.wire)
        if answer.then is Then.CLOSE:
            session.say_goodbye(ServerReply(answer.reply, b""))

    def give_up(self, answer: ServerReply) -> None:
        """The client is told why, and that is the end of the session; a message that is here whole stays."""
        intake = self.current or self.parked
        if intake is None or intake.complete:
            self._session.say_goodbye(answer)
            return
        self._refuse(intake, answer)
        self._abort(intake)
        self._session.say_goodbye(ServerReply(answer.reply, answer.wire))

    def drop_parked(self) -> None:
        """Unless its transaction goes on: commands may have ended that, and have begun another one."""
        parked = self.parked
        if parked is not None and parked.transaction is not self._session.conversation.transaction:
            self._abort(parked)

    def lost(self, *, left: bool) -> None:
        """The connection is gone; `left`: because of the client."""
        for intake in (self.current, self.parked):
            if intake is None or intake.complete:
                continue
            if left:
                self._refuse(intake, ServerReply(replies.CLIENT_LEFT, b"", reason=Reason.CLIENT_LEFT))
            self._abort(intake)

    def part(self) -> None:
        """The session is over. The two refer to each other: parted, they need no garbage collector."""
        del self._session

    def _abort(self, intake: Intake) -> None:
        """No end of data will come: the message does not exist."""
        self.current = self.parked = None
        self._context.large_bodies.leave(self._session)
        if intake.task is not None:
            intake.task.cancel()
        intake.release()

    def _refuse(self, intake: Intake, answer: ServerReply) -> None:
        envelope = intake.envelope
        self._session.conversation.refuse(
            answer,
            "BDAT" if intake.is_chunked else "DATA",
            message_id=envelope.id,
            mailbox=envelope.sender,
            detail=intake.detail,
        )
