"""One client's connection: the only module that knows aiosmtpd.

Moves bytes between the link to the client and the parts that decide: `doorway` until the greeting,
`LineReader` and `Conversation` for commands, `Bodies` for messages. Everything up to DATA is answered inside
`data_received`, without a task, unless somebody has to be asked; a message costs one task, which waits for
the store. Replies to a pipelined group leave in one write, in order.

What is replaced of aiosmtpd's SMTP, all of it with a reason: its constructor inspects every class on every
connection; its reader ends lines at a bare LF and grows without bound when none comes; it holds
whole bodies; a client that leaves cancels its handler, and a handler's exception becomes a permanent 500
with the exception's text; its AUTH and STARTTLS do not know implicit TLS, and hash on the event loop. What
remains is its place as the loop's SMTP protocol class.

Promises:

- Nothing is read beyond what is bounded: reading pauses while the client does not take our replies,
  while `BACKLOG` octets wait for the store, while more than `MAX_PIPELINED` octets of commands wait,
  and while other large bodies have their turns. What is held is in the account of all sessions.
- Once the end of data has arrived the message is carried to its answer, client or no client.
- Nothing said in clear text before a TLS handshake counts after it (RFC 3207 4.2).
- Trouble in our own code is answered 451 and the session goes on.
- Waiting for our own store, or for whom we ask, is not held against the client.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any

from aiosmtpd.smtp import SMTP

from zonerelay.inbound.limits.memory import TLS_COST
from zonerelay.inbound.session import commands, handshake
from zonerelay.inbound.session.conversation import Conversation
from zonerelay.inbound.session.data import Bodies
from zonerelay.inbound.session.house import House
from zonerelay.inbound.session.timeouts import Deadlines
from zonerelay.inbound.session.transport import Transport
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.context import ListenerContext
from zonerelay.inbound.state.questions import LogIn
from zonerelay.inbound.state.replies import ServerReply, Then
from zonerelay.smtp.server.commands import MAX_LINE
from zonerelay.smtp.server.lines import LineFault, LineReader

MAX_PIPELINED = 64 * 1024
MAX_LINES_AT_ONCE = 500  # then other connections get their turn

# It logs every command line with the addresses in it (rule 7).
logging.getLogger("mail.log").setLevel(logging.CRITICAL + 1)
logging.getLogger("mail.debug").setLevel(logging.CRITICAL + 1)


class Session(SMTP):
    transport: Transport  # type: ignore[assignment]  # aiosmtpd assigns its own only in methods that do not run

    def __init__(self, context: ListenerContext, house: House, loop: asyncio.AbstractEventLoop) -> None:
        # Not super().__init__(): nothing that it prepares is used, and it costs more than a message.
        settings = context.settings
        self.loop = loop
        self.context = context
        self._house = house
        self.lines = LineReader(MAX_LINE)
        self.deadlines = Deadlines(
            loop.time(),
            idle=settings.idle_timeout,
            transaction=settings.transaction_timeout,
            min_rate=settings.min_data_rate,
        )
        self.bodies: Bodies = Bodies(self, context)
        self.greeted = False
        self._running = 0  # tasks
        # The next answer waits for it: a verdict, or a time.
        self._asking: asyncio.Task[None] | asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._charged = 0  # of the account of all sessions: TLS, and lines that wait
        self._welcome = False
        self._closing = False
        self._draining = False
        self.ended = False  # the client has said all it will
        self._blocked = False  # the client does not take our replies
        self._yielded = False  # lines are waiting for their turn

    # The loop calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, but not the base class.
        self.transport = Transport(transport, self.loop)  # type: ignore[arg-type]
        self.client, refusal = self._house.welcome(self, transport.get_extra_info("peername"))
        self.conversation = Conversation(self.context, self.client)
        if refusal is not None:
            self.say_goodbye(refusal)
            return
        self._welcome = True
        context = self.context
        self._timer = self.loop.call_at(self.deadlines.heard + context.first_look, self._look_at_time)
        if context.greets_at_once and not self.client.proxies:
            self.greeted = True
            self.transport.write(context.greeting.banner.wire)
        else:
            handshake.open_to(self)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self.transport.is_wrapped:
            data = handshake.unwrap(self, data)
            if not data or self._closing:
                return
        bodies = self.bodies
        intake = bodies.current
        if intake is not None and not intake.complete:
            self.deadlines.heard = self.loop.time()
            bodies.take(data)
            if self.lines.waiting:
                self.advance()
            return
        if (
            data[0] in handshake.FOREIGN
            and not self.conversation.commands
            and handshake.turns_away(self, data)
        ):
            return
        line = self.lines.only_line(data)
        if line is None or intake is not None or self._blocked or self._asking or bodies.discarding:
            self.lines.feed(data)
            self.advance()
            return
        # The ordinary case: one command, nothing behind it, and nobody waits for anything.
        answer = self._answer(line)
        self.reply(answer.wire, answer)
        if self._draining:
            self._leave_if_done()

    def eof_received(self) -> bool:
        """The client has said all it will, but may still be listening: answer what is owed first."""
        self.ended = True
        return self._owes_answers()

    def connection_lost(self, error: Exception | None) -> None:
        left, self._closing = self.ended or not self._closing, True
        self.transport.lost()
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
        self.bodies.lost(left=left)
        self._hold_nothing()
        if self._welcome:
            self._house.farewell(self, self.client)
        if not self._running:
            self._over()

    def pause_writing(self) -> None:
        self._blocked = True
        self.regulate()

    def resume_writing(self) -> None:
        self._blocked = False
        self.advance()

    def is_now(self, address: str, port: int) -> bool:
        self.client, refusal = self._house.readmit(self.client, address, port)
        if refusal is not None:
            self.say_goodbye(refusal)
        return refusal is None

    # Turns, and the account of memory, call these.

    @property
    def held_up(self) -> bool:
        return self.bodies.are_behind

    def resume_reading(self) -> None:
        self.bodies.behind_others = False
        self.regulate()

    @property
    def must_stay(self) -> bool:
        return self._closing or self.bodies.wait_for_store

    @property
    def held(self) -> int:
        transaction = self.conversation.transaction
        return self._charged + self.bodies.held + (transaction.cost if transaction is not None else 0)

    def charge(self) -> None:
        """Keep the account of all sessions' memory, and relieve it when it is full."""
        held = self.lines.waiting + (TLS_COST if self.transport.has_tls else 0)
        if held == self._charged:
            return
        memory = self.context.memory
        memory.used += held - self._charged
        self._charged = held
        if memory.full:
            memory.relieve()

    def _hold_nothing(self) -> None:
        """But for a message that is here whole."""
        self.lines.clear()
        self.conversation.reset()
        self.context.memory.used -= self._charged
        self._charged = 0

    # The listener calls these.

    def drain(self) -> None:
        """Finish the transaction at hand, then close: 421 at once to a client that is in none."""
        self._draining = True
        self._leave_if_done()

    def shed(self) -> None:
        """End, for memory is short."""
        self.bodies.give_up(replies.TOO_MUCH_MEMORY)

    def abort(self) -> None:
        """Close now, whatever the client is doing. A message that arrived whole is still committed."""
        self._closing = True
        self.transport.abort()

    # Commands.

    def advance(self) -> None:
        """Go on with what has been received, as far as the order of replies allows."""
        self._yielded = False
        if self._closing:
            return  # what it held is out of the account
        self.charge()
        left = MAX_LINES_AT_ONCE
        while self.lines.waiting and self._may_go_on():
            if self.bodies.discarding:
                self.bodies.discard()
                continue
            answered = self._answer_lines(left)
            left -= answered
            if not left:
                self._yielded = True
                self.loop.call_soon(self.advance)
            if not (answered and left):
                break
        if self._closing:
            return
        self.charge()
        self.regulate()
        self._leave_if_done()

    def _may_go_on(self) -> bool:
        busy = self.bodies.current is not None or self._asking is not None
        return not (busy or self._closing or self._blocked)

    def _answer_lines(self, most: int) -> int:
        """ServerReply up to so many lines in one write, up to the first that needs more than an answer."""
        octets: list[bytes] = []
        count = 0
        while count < most and (line := self.lines.next()) is not None:
            answer = self._answer(line)
            count += 1
            octets.append(answer.wire)
            if answer.then is not Then.GO_ON:
                self.reply(b"".join(octets), answer)
                return count
        if octets:
            self.reply(b"".join(octets), replies.OK)
        return count

    def _answer(self, line: bytes | LineFault) -> ServerReply:
        conversation = self.conversation
        try:
            answer = commands.answer(conversation, line, more=self.lines.waiting > 0)
            return conversation.slowed(answer) if conversation.delay else answer
        except Exception as error:  # noqa: BLE001 - rule 3: a mistake of ours is never the client's
            answer = self._trouble(error)
            # What follows may be a chunk, which must not run as commands.
            is_bdat = isinstance(line, bytes) and line[:4].upper() == b"BDAT"
            return replace(answer, then=Then.CLOSE) if is_bdat else answer

    def _trouble(self, error: Exception) -> ServerReply:
        self.context.events.trouble("inbound", error)
        self.conversation.reset()
        return replies.TROUBLE

    def reply(self, octets: bytes, last: ServerReply) -> None:
        """Write replies, and do what the last of the answers asks for."""
        self.deadlines.answered(self.loop.time(), self.conversation.transaction)
        if self.bodies.parked is not None:
            self.bodies.drop_parked()
        if octets:
            self.transport.write(octets)
        if last.then is not Then.GO_ON:
            self._go_on_with(last)

    def _go_on_with(self, answer: ServerReply) -> None:
        """Comparisons, the usual ones first: an enumeration's hash is a Python function."""
        then = answer.then
        if then is Then.TAKE_BODY:
            self.bodies.begin()
        elif then is Then.CLOSE:
            self._close()
        elif then is Then.TAKE_CHUNK:
            self.bodies.begin_chunk()
        elif then is Then.DISCARD:
            self.bodies.discard_chunk(answer)
        elif then is Then.ASK:
            self._asking = self.spawn(self._consult())
            self.deadlines.paused(self.loop.time())
        elif then is Then.HOLD_BACK:
            delay, self.conversation.delay = self.conversation.delay, 0.0
            self._asking = self.loop.call_later(delay, self._say_held_back)
            self.deadlines.paused(self.loop.time())
        elif then is Then.HANDSHAKE:
            handshake.start_tls(self)
        else:
            handshake.readmit(self)

    def message_done(self) -> None:
        """The answer to a message has been given; mostly the client has been waiting for it."""
        if self.lines.waiting or self.transport.is_paused or self.ended or self._draining:
            self.advance()

    async def _consult(self) -> None:
        """Somebody has to be asked before the command can be answered."""
        conversation = self.conversation
        question = conversation.question
        assert question is not None
        verdict = await self.context.consultants.ask(question)
        self._asking = None
        self.deadlines.resumed(self.loop.time())
        if self._closing:
            return
        try:
            answer = conversation.decided(verdict)
            if conversation.delay:
                answer = conversation.slowed(answer)
        except Exception as error:  # noqa: BLE001 - rule 3
            answer = self._trouble(error)
        self.reply(answer.wire, answer)
        self.advance()

    def _say_held_back(self) -> None:
        self._asking = None
        self.deadlines.resumed(self.loop.time())
        answer, self.conversation.held_back = self.conversation.held_back, None
        if self._closing or answer is None:
            return
        self.reply(answer.wire, answer)
        self.advance()

    # Tasks, the end, reading, time.

    @property
    def now(self) -> float:
        return self.loop.time()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:  # Any: asyncio's own words
        task = self.loop.create_task(work)
        self._running += 1
        # Not at the end of the work: a task that is cancelled before it began never gets there.
        task.add_done_callback(self._one_less)
        return task

    def _one_less(self, _: asyncio.Task[None]) -> None:
        self._running -= 1
        if not self._running and self.transport.is_lost:
            self._over()

    def _over(self) -> None:
        self.bodies.part()
        self._house.forget(self)

    def say_goodbye(self, answer: ServerReply, *, detail: str = "") -> None:
        if answer.reason is not None:
            self.conversation.refuse(answer, detail=detail)
        if answer.wire and handshake.is_heard(self):
            self.transport.write(answer.wire)
        self._close()

    def _close(self) -> None:
        self._closing = True
        handle = self.transport.close()
        self._hold_nothing()
        if handle is not None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = handle

    def _owes_answers(self) -> bool:
        asking = self._asking is not None
        if asking and self.ended and not self.lines.waiting and isinstance(self.conversation.question, LogIn):
            asking = False  # no command can follow the log-in, so its hash need not be computed
        ours = self.bodies.wait_for_store or asking
        return not self._closing and (ours or self._yielded or self._blocked)

    def leave_soon(self) -> None:
        self.ended = True
        self.loop.call_soon(self._leave_if_done)

    def _leave_if_done(self) -> None:
        if self._closing or self._owes_answers():
            return
        if self.ended:
            self._close()
        elif self._draining and self.conversation.transaction is None:
            self.say_goodbye(replies.SHUTTING_DOWN)

    def regulate(self) -> None:
        """Read only while there is room for what comes."""
        ours = self.bodies.are_behind
        if ours or self._asking is not None:
            self.deadlines.paused(self.loop.time())
        elif self.deadlines.is_paused:
            self.deadlines.resumed(self.loop.time())
        pause = ours or self._blocked or self.lines.waiting > MAX_PIPELINED
        if pause is not self.transport.is_paused and not self.ended:
            self.transport.pause_reading(pause)

    def _look_at_time(self) -> None:
        now = self.loop.time()
        if self._owes_answers() and not self._blocked:
            self.deadlines.heard = now
        late = self.deadlines.late(now)
        if late is None:
            self._timer = self.loop.call_at(self.deadlines.next_look(now), self._look_at_time)
        else:
            self.bodies.give_up(late)
