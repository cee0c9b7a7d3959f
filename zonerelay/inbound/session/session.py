"""One SMTP session, from the connection to its end.

It owns the state of one connection: its handshakes (PROXY, TLS), the unread input, the message being
received, the pending reply, and one timer. `transport` removes the PROXY header and decrypts, `conversation`
answers lines, and `Intake` brings a message to the store. Commands up to DATA are answered inside
`data_received`, without a task, unless a lookup is needed. A message needs one task, which waits for the
store. The replies to a pipelined group are sent in order, in one write.

A session begins with a PROXY header, exactly once and from listed peers only. On a listener with implicit
TLS, the handshake follows; then comes the greeting. After a handshake, and when the client turns out to be
another one, a new `Conversation` begins and the earlier state is discarded.

Promises:

- Input is bounded. Reading pauses while the client does not read replies, while `BACKLOG` bytes wait for the
  store, while more than `MAX_PIPELINED` bytes of commands wait, and while other large bodies are read. The
  memory of a session is counted in the memory account of all sessions.
- When the end of data has arrived, the message is stored and answered, even if the client disconnects. A
  message that can no longer be completed is aborted in the store, and its memory is released.
- Nothing that was sent unencrypted before a TLS handshake has an effect after it (RFC 3207 4.2).
- An error in our own code is answered with 451, and the session continues.
- Time spent waiting for our store, or for a lookup, does not count against the client.
"""

import asyncio
import enum
from collections.abc import Coroutine
from typing import Any

from msgspec import structs

from zonerelay.config.settings import ListenerTls
from zonerelay.inbound.cleanup.intake import Intake
from zonerelay.inbound.limits.memory import TLS_COST
from zonerelay.inbound.session.admission import Admission
from zonerelay.inbound.session.conversation import Conversation
from zonerelay.inbound.session.transport import Deadlines, Transport
from zonerelay.inbound.state import replies
from zonerelay.inbound.state.context import ListenerContext
from zonerelay.inbound.state.replies import NextAction, ServerReply
from zonerelay.inbound.tls.channel import TlsInfo
from zonerelay.smtp.server.commands import MAX_LINE, TLS_HELLO, LineFault, LineReader
from zonerelay.smtp.server.proxy_protocol import ProxyHeader, looks_like_proxy
from zonerelay.telemetry.events.transcript import SessionRecorder

MAX_PIPELINED = 64 * 1024
MAX_LINES_AT_ONCE = 100  # then other connections are served

_FOREIGN = frozenset(b"\x16P\r")
"""First bytes of other protocols: a TLS hello, and PROXY headers of both versions."""


class SessionPhase(enum.IntEnum):
    """The phase of a session, from the handshake to its end; a session never returns to an earlier phase."""

    OPENING = enum.auto()
    """Handshakes, before the greeting."""
    GREETED = enum.auto()
    DRAINING = enum.auto()
    """The session ends with the current mail transaction."""
    ENDED = enum.auto()
    """The client sends nothing more, and still gets the replies that it is owed."""
    LEFT = enum.auto()
    """The session closes, or is closed, because the client has disconnected."""
    CLOSED = enum.auto()
    """The session closes, or is closed, for a reason of ours."""


_DRAINING, _LEFT = SessionPhase.DRAINING, SessionPhase.LEFT


class Session(asyncio.Protocol):
    """One SMTP session with its connection. `intake` is the message that is being received or stored.
    `discarding` bytes of a refused BDAT chunk are still to be discarded; then the reply `owed` is sent.
    """

    transport: Transport

    def __init__(
        self, context: ListenerContext, admission: "Admission[Session]", loop: asyncio.AbstractEventLoop
    ) -> None:
        self.loop = loop
        self.context = context
        self._admission = admission
        self.lines = LineReader(MAX_LINE)
        self.deadlines = Deadlines(loop.time(), context.settings)
        self.phase = SessionPhase.OPENING
        self.intake: Intake | None = None
        self.discarding = 0
        self.owed: ServerReply = replies.OK
        self._running = 0  # tasks
        # The next reply waits for it: a verdict, a delay, or other connections.
        self._asking: asyncio.Task[None] | asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._charged = 0  # in the memory account of all sessions: TLS, and unread lines
        self._transcripts = context.events.transcripts
        self._record: SessionRecorder | None = None

    # The event loop calls the following methods.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, but not the base class.
        self.transport = Transport(transport, self.loop)  # type: ignore[arg-type]
        self.client, refusal = self._admission.welcome(self, transport.get_extra_info("peername"))
        self.conversation = Conversation(self.context, self.client)
        if self._transcripts.on:
            self._read_along()
        if refusal is not None:
            self.say_goodbye(refusal)
            return
        context = self.context
        self._timer = self.loop.call_at(self.deadlines.heard + context.first_look, self._look_at_time)
        if self.client.proxies:
            self.deadlines.began_handshake(self.loop.time())
            self.transport.expect_proxy_header()
        elif context.greets_at_once:
            self.phase = SessionPhase.GREETED
            self.transport.write(context.greeting.banner.wire)
        else:
            self._open()

    def data_received(self, data: bytes) -> None:
        if self.phase >= _LEFT:
            return
        if self.transport.is_wrapped:
            data = self.transport.unwrap(data, self)
            if not data or self.phase >= _LEFT:
                return
        intake = self.intake
        if intake is not None and not (intake.complete or intake.chunk_done):
            self.deadlines.heard = self.loop.time()
            self._take_body(intake, data)
            if self.lines.waiting:
                self.advance()
            return
        if data[0] in _FOREIGN and not self.conversation.commands and self._turns_away(data):
            return
        line = self.lines.only_line(data)
        if line is None or intake is not None or self._asking or self.discarding or self.transport.is_blocked:
            self.lines.feed(data)
            self.advance()
            return
        # The common case: one command with nothing after it, and no reply is pending.
        answer = self._answer(line)
        self._reply(answer.wire, answer)
        if self.phase is _DRAINING:
            self._leave_if_done()

    def eof_received(self) -> bool:
        """Send the pending replies, because the client may still be reading although it has closed its
        side.
        """
        self.phase = max(self.phase, SessionPhase.ENDED)
        return self._owes_replies()

    def connection_lost(self, error: Exception | None) -> None:
        if self.phase is not SessionPhase.CLOSED:
            self.phase = SessionPhase.LEFT
        if self._record is not None:
            self._record.note("the connection was closed")
        self.transport.lost()
        if self._timer is not None:
            self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
        self._abort_body()
        self._hold_nothing()
        self._admission.farewell(self, self.client)
        if not self._running:
            self._admission.forget(self)

    def pause_writing(self) -> None:
        self.transport.is_blocked = True
        self._regulate()

    def resume_writing(self) -> None:
        self.transport.is_blocked = False
        self.advance()

    # The listener calls the following methods.

    def drain(self) -> None:
        """Finish the current mail transaction, and close the session. Without one, close immediately with
        421.
        """
        self.phase = max(self.phase, SessionPhase.DRAINING)
        self._leave_if_done()

    def abort(self) -> None:
        """Close the connection immediately. A message that has arrived completely is still committed."""
        self._end()
        self.transport.abort()

    # `SessionMemory` calls the following methods.

    @property
    def held(self) -> int:
        """Bytes that this session has added to the memory that all sessions use."""
        transaction = self.conversation.transaction
        intake = 0 if self.intake is None else self.intake.held
        return self._charged + (transaction.cost if transaction is not None else 0) + intake

    @property
    def must_stay(self) -> bool:
        return self.phase >= _LEFT or self.waits_for_store

    def shed(self) -> None:
        """End the session with 421, because memory is short."""
        self._give_up(replies.TOO_MUCH_MEMORY)

    @property
    def waits_for_store(self) -> bool:
        """Whether a message has arrived completely and its reply has not been sent."""
        return self.intake is not None and self.intake.complete

    # Handshakes and the greeting.

    def _open(self) -> None:
        """Start TLS or send the greeting, now that the client has been identified."""
        if self.context.settings.tls is ListenerTls.IMPLICIT:
            self._start_tls()
        else:
            self._greet()

    def _greet(self) -> None:
        if self.phase is SessionPhase.OPENING:
            self.phase = SessionPhase.GREETED
        if self._transcripts.on:
            self._read_along()
        answer = self.conversation.connect()
        self._reply(answer.wire, answer)

    def _start_tls(self) -> None:
        """Start a TLS handshake. Unencrypted input that has not been answered is discarded (RFC 3207 4.2)."""
        certificates = self.context.certificates
        assert certificates is not None
        self.lines.clear()
        self.deadlines.began_handshake(self.loop.time())
        self.transport.start_tls(certificates.channel())
        self._charge()

    def named(self, header: ProxyHeader) -> bool:
        """Start the session for the client that the PROXY header names. Return False if it is refused."""
        self.deadlines.established(self.loop.time())
        if not self._is_now(header.address, header.port):
            return False
        self.conversation = Conversation(self.context, self.client)
        self._open()
        return True

    def encrypted(self, info: TlsInfo) -> None:
        """Start a new conversation after the TLS handshake."""
        self.deadlines.established(self.loop.time())
        self.context.events.metrics.tls_sessions.add((info.version,))
        if self._record is not None:
            self._record.note(f"encrypted with {info.version}")
        before = self.conversation
        self.conversation = Conversation(self.context, self.client, info)
        self.conversation.go_on_from(before)
        if self.phase is SessionPhase.OPENING:
            self._greet()

    def client_ended(self) -> None:
        if self.phase < SessionPhase.ENDED:
            self.phase = SessionPhase.ENDED
            self.loop.call_soon(self._leave_if_done)

    def _readmit(self) -> None:
        """Continue the session for the client that XCLIENT names. Attributes that it does not name stay
        (XCLIENT_README).
        """
        xclient, before = self.conversation.xclient, self.conversation.client_state
        assert xclient is not None
        client = self.client
        address = client.address if xclient.address is None else xclient.address
        port = client.port if xclient.port is None else xclient.port
        if self._is_now(address, port):
            # The certificate belongs to the server in front, not to the client that it names.
            tls = before.tls if before.tls is None else structs.replace(before.tls, certificate="")
            self.conversation = Conversation(self.context, self.client, tls)
            self.conversation.client_state.take_over(before, xclient)
            self._greet()

    def _is_now(self, address: str, port: int) -> bool:
        """Count the connection for the client at this address, which PROXY or XCLIENT has named. Return False
        if the client is refused, which ends the session.
        """
        self.client, refusal = self._admission.readmit(self.client, address, port)
        if refusal is not None:
            self.say_goodbye(refusal)
        return refusal is None

    def _turns_away(self, data: bytes) -> bool:
        """End the session if its first bytes belong to another protocol, such as TLS."""
        if data.startswith(TLS_HELLO):
            self.say_goodbye(replies.NOT_SMTP)
            return True
        if looks_like_proxy(data):
            self.say_goodbye(replies.NO_PROXY)
            return True
        return False

    def _read_along(self, line: bytes | LineFault = b"") -> None:
        """Record a command line in the transcripts that include this client."""
        record = self._record = self._transcripts.inbound(self.client.address, self._record)
        if record is None:
            return
        self.transport.overhear(self._overheard)
        if isinstance(line, LineFault):
            record.note(f"a line: {line.value}")
        elif line:
            record.command(line, secret=self.conversation.exchange is not None)

    def _overheard(self, octets: bytes) -> None:
        if self._record is not None:
            self._record.replies(octets)

    # Commands.

    def advance(self) -> None:
        """Process received input until none is left, or until a reply has to wait."""
        if self.phase >= _LEFT:
            return  # its memory is already released
        self._charge()
        left = MAX_LINES_AT_ONCE
        while self.lines.waiting and self._may_go_on():
            if self.discarding:
                self._discard()
                continue
            answered = self._answer_lines(left)
            left -= answered
            if not left and self._asking is None:
                self._asking = self.loop.call_soon(self._take_turn)
            if not (answered and left):
                break
        if self.phase >= _LEFT:
            return
        self._charge()
        self._regulate()
        self._leave_if_done()

    def _take_turn(self) -> None:
        """Continue processing, after the event loop has served other connections."""
        self._asking = None
        self.advance()

    def _may_go_on(self) -> bool:
        intake = self.intake
        busy = self._asking is not None or (intake is not None and not intake.chunk_done)
        return not (busy or self.phase >= _LEFT or self.transport.is_blocked)

    def _answer_lines(self, most: int) -> int:
        """Answer up to `most` pipelined commands with one write, stopping at the first that needs more than a
        reply.
        """
        octets: list[bytes] = []
        count = 0
        while count < most and (line := self.lines.next()) is not None:
            answer = self._answer(line)
            count += 1
            octets.append(answer.wire)
            if answer.then is not NextAction.GO_ON:
                self._reply(b"".join(octets), answer)
                return count
        if octets:
            self._reply(b"".join(octets), replies.OK)
        return count

    def _answer(self, line: bytes | LineFault) -> ServerReply:
        conversation = self.conversation
        if self._transcripts.on:
            self._read_along(line)
        try:
            answer = conversation.answer(line, more=self.lines.waiting > 0)
            return conversation.slowed(answer) if conversation.delay else answer
        except Exception as error:  # noqa: BLE001 - rule 3: our own errors are never the client's
            answer = self._trouble(error)
            # The following bytes may be a chunk, which must not run as commands.
            is_bdat = isinstance(line, bytes) and line[:4].upper() == b"BDAT"
            return structs.replace(answer, then=NextAction.CLOSE) if is_bdat else answer

    def _trouble(self, error: Exception) -> ServerReply:
        self.context.events.error("inbound", error)
        self.conversation.reset()
        return replies.LOCAL_ERROR

    def _reply(self, octets: bytes, last: ServerReply) -> None:
        """Write replies, and start the action that follows the last of them."""
        self.deadlines.answered(self.loop.time(), self.conversation.transaction)
        intake = self.intake
        if intake is not None and intake.transaction is not self.conversation.transaction:
            # Between two chunks, commands have ended its transaction, and perhaps started another one.
            self._abort(intake)
        if octets:
            self.transport.write(octets)
        if last.then is not NextAction.GO_ON:
            self._go_on_with(last)

    def _go_on_with(self, answer: ServerReply) -> None:
        """Start the action that follows a reply, such as receiving the message. Comparisons are used because
        an enum's hash is a Python function.
        """
        then = answer.then
        if then is NextAction.TAKE_BODY:
            self.intake = self.conversation.new_intake(self._regulate)
            self.deadlines.body_began(self.deadlines.heard)
        elif then is NextAction.CLOSE:
            self._close()
        elif then is NextAction.TAKE_CHUNK:
            self._begin_chunk()
        elif then is NextAction.DISCARD:
            self.owed, self.discarding = answer, self.conversation.chunk[0]
            self.deadlines.body_began(self.loop.time())
            self._discard()
        elif then is NextAction.ASK:
            self._asking = self._spawn(self._ask())
            self.deadlines.paused(self.loop.time())
        elif then is NextAction.HANDSHAKE:
            self._start_tls()
        else:
            self._readmit()

    async def _ask(self) -> None:
        """Perform the lookup on which the reply to a command depends."""
        conversation = self.conversation
        question = conversation.question
        assert question is not None
        verdict = await self.context.ask(question)
        self._asking = None
        self.deadlines.resumed(self.loop.time())
        if self.phase >= _LEFT:
            return
        try:
            answer = conversation.decided(verdict)
            if conversation.delay:
                answer = conversation.slowed(answer)
        except Exception as error:  # noqa: BLE001 - rule 3
            answer = self._trouble(error)
        self._reply(answer.wire, answer)
        self.advance()

    # The message: from 354, or from BDAT, to its reply.

    def _begin_chunk(self) -> None:
        """Start receiving the bytes of a BDAT chunk."""
        intake = self.intake = self.intake or self.conversation.new_intake(self._regulate)
        size, last = self.conversation.chunk
        intake.begin_chunk(size, last=last)
        self.deadlines.body_began(self.deadlines.heard)
        self._take_body(intake, self.lines.take(size))

    def _discard(self) -> None:
        """Discard the bytes of a refused BDAT chunk, and send its reply after the last one."""
        dropped = len(self.lines.take(self.discarding))
        self.discarding -= dropped
        self.deadlines.octets += dropped
        self.deadlines.heard = self.loop.time()
        if not self.discarding:
            self.deadlines.complete()
            self.transport.write(self.owed.later)

    def _take_body(self, intake: Intake, data: bytes) -> None:
        """Pass received bytes to the message. The bytes after its end are commands."""
        deadlines = self.deadlines
        deadlines.octets += len(data)
        intake.feed(data)
        if intake.complete or intake.chunk_done:
            if intake.body.rest:
                self.lines.feed(intake.body.rest)
            if intake.complete:
                deadlines.complete()
        elif intake.hopeless:
            self._give_up(replies.much_too_big(self.context.settings.max_message_size))
            return
        if intake.task is None and intake.refusal is None and intake.worth_storing:
            intake.task = self._spawn(self._store(intake))
        if not intake.complete:
            if intake.chunk_done:
                self._answer_chunk(intake)
            if self.context.memory.full:
                self.context.memory.relieve()
        elif intake.refusal is not None and intake.task is None:
            self._finish_refused(intake)
        if not intake.complete or self.lines.waiting or self.transport.is_paused:
            self._regulate()

    def _answer_chunk(self, intake: Intake) -> None:
        """Reply to a BDAT chunk that is not the last one."""
        self.deadlines.chunk_complete(self.loop.time())
        if intake.refusal is None:
            self.transport.write(replies.chunk_taken(self.conversation.chunk[0]))
        else:
            self._finish_refused(intake)

    async def _store(self, intake: Intake) -> None:
        try:
            accepted = await intake.store()
            intake.task = None
            # A refusal in the middle of a body is sent after its end.
            if not intake.complete:
                self._regulate()  # the backlog was discarded, so reading can continue
                return
            if accepted is None:
                self._finish_refused(intake)
            else:
                self._finish(intake, replies.queued(accepted))
            # Usually the client has been waiting for the reply.
            if self.lines.waiting or self.transport.is_paused or self.phase > SessionPhase.GREETED:
                self.advance()
        except Exception as error:  # noqa: BLE001 - no caller awaits this task
            self.context.events.error("inbound", error, message_id=intake.envelope.id)
            self.abort()
        finally:
            intake.task = None

    def _finish(self, intake: Intake, wire: bytes) -> None:
        """End the mail transaction, and send its reply."""
        self.intake = None
        if self._record is not None:
            self._record.note(f"the message: {intake.size} bytes, not shown")
        if intake.held or not intake.complete:
            intake.release()
        self.conversation.reset()
        if self.transport.is_open:
            self.deadlines.answered(self.loop.time(), None)
            self.transport.write(wire)
        elif intake.refusal is None:
            self.context.events.reply_lost(intake.envelope.id, intake.envelope.origin)

    def _finish_refused(self, intake: Intake) -> None:
        answer = intake.refusal
        assert answer is not None
        self._refuse(intake, answer)
        self._finish(intake, answer.wire)
        if answer.then is NextAction.CLOSE and self.transport.is_open:
            self.say_goodbye(ServerReply(answer.reply, b""))

    def _give_up(self, answer: ServerReply) -> None:
        """End the session with this reply. A message that has arrived completely is still stored."""
        intake = self.intake
        if intake is not None and not intake.complete:
            self._refuse(intake, answer)
            self._abort(intake)
            answer = ServerReply(answer.reply, answer.wire)
        self.say_goodbye(answer)

    def _abort_body(self) -> None:
        """Discard an incomplete message, because the connection is closed."""
        intake = self.intake
        if intake is None or intake.complete:
            return
        if self.phase is SessionPhase.LEFT:
            self._refuse(intake, replies.CLIENT_LEFT)
        self._abort(intake)

    def _abort(self, intake: Intake) -> None:
        """Discard an incomplete message, because the rest of it will not arrive."""
        self.intake = None
        if intake.task is not None:
            intake.task.cancel()
        intake.release()

    def _refuse(self, intake: Intake, answer: ServerReply) -> None:
        command = "BDAT" if intake.transaction.chunked else "DATA"
        self.conversation.refuse_content(intake, answer, command)

    # Tasks, memory, closing, reading, time.

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:  # asyncio's own annotation
        """Start a task of this session. The listener keeps the session until the task ends."""
        task = self.loop.create_task(work)
        self._running += 1
        # Not in the task itself: a task that is cancelled before it starts never gets there.
        task.add_done_callback(self._one_less)
        return task

    def _one_less(self, _: asyncio.Task[None]) -> None:
        self._running -= 1
        if not self._running and self.transport.is_lost:
            self._admission.forget(self)

    def _charge(self) -> None:
        """Add the change of this session's memory use to the total, and free memory if too much is used."""
        held = self.lines.waiting + (TLS_COST if self.transport.has_tls else 0)
        if held == self._charged:
            return
        memory = self.context.memory
        memory.used += held - self._charged
        self._charged = held
        if memory.full:
            memory.relieve()

    def _hold_nothing(self) -> None:
        """Release the memory of this session, except that of a message that has arrived completely."""
        self.lines.clear()
        self.conversation.reset()
        self.context.memory.used -= self._charged
        self._charged = 0

    def say_goodbye(self, answer: ServerReply, *, detail: str = "") -> None:
        if answer.reason is not None:
            self.conversation.refuse(answer, detail=detail)
        # Before its handshake, a client that expects TLS could not read the reply.
        is_heard = self.transport.secured is not None or self.context.settings.tls is not ListenerTls.IMPLICIT
        if answer.wire and is_heard:
            self.transport.write(answer.wire)
        self._close()

    def _end(self) -> None:
        if self.phase < SessionPhase.LEFT:
            self.phase = SessionPhase.LEFT if self.phase is SessionPhase.ENDED else SessionPhase.CLOSED

    def _close(self) -> None:
        self._end()
        handle = self.transport.close()
        self._hold_nothing()
        if handle is not None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = handle

    def _owes_replies(self) -> bool:
        asking = self._asking is not None
        if asking and self.phase is SessionPhase.ENDED and not self.lines.waiting:
            # No command can follow a login, so its hash need not be computed.
            asking = not self.conversation.logs_in
        owed = self.waits_for_store or asking or self.transport.is_blocked
        return owed and self.phase < SessionPhase.LEFT

    def _leave_if_done(self) -> None:
        if self.phase >= SessionPhase.LEFT or self._owes_replies():
            return
        if self.phase is SessionPhase.ENDED:
            self._close()
        elif self.phase is SessionPhase.DRAINING and self.conversation.transaction is None:
            self.say_goodbye(replies.SHUTTING_DOWN)

    def _regulate(self) -> None:
        """Pause reading from the client while there is no capacity for more input, and resume it
        afterwards.
        """
        ours = self.intake is not None and self.intake.held_up
        if ours or self._asking is not None:
            self.deadlines.paused(self.loop.time())
        elif self.deadlines.paused_at is not None:
            self.deadlines.resumed(self.loop.time())
        transport = self.transport
        pause = ours or transport.is_blocked or self.lines.waiting > MAX_PIPELINED
        if pause is not transport.is_paused and self.phase < SessionPhase.ENDED:
            transport.pause_reading(pause)

    def _look_at_time(self) -> None:
        now = self.loop.time()
        if self._owes_replies() and not self.transport.is_blocked:
            self.deadlines.heard = now
        late = self.deadlines.late(now)
        if late is None:
            self._timer = self.loop.call_at(self.deadlines.next_look(now), self._look_at_time)
        else:
            self._give_up(late)
