"""One client's connection: the only module that knows aiosmtpd, and the only one here with a socket.

Moves bytes between the transport and the parts that decide: `LineReader` and `Dialog` for commands,
`Intake` for a body. Everything up to DATA is answered inside `data_received`, without a task; a message
costs one task, which waits for the store. Replies to a pipelined group leave in one write, in order.

What is replaced of aiosmtpd's SMTP, all of it with a reason: its constructor inspects every class on every
connection; its reader ends lines at a bare LF and grows without bound when none comes; it holds
whole bodies; a client that leaves cancels its handler, and a handler's exception becomes a permanent 500
with the exception's text. What remains is its place as the loop's SMTP protocol class.

Promises:

- Nothing is read beyond what is bounded: reading pauses while the client does not take our replies,
  while `BACKLOG` octets wait for the store, and while more than `MAX_PIPELINED` octets of commands wait;
  and while other large bodies have their turns.
- Once the end of data has arrived the message is carried to its answer, client or no client.
- Trouble in our own code is answered 451 and the session goes on.
- Waiting for our own store is not held against the client.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from aiosmtpd.smtp import SMTP

from zonerelay.inbound import answers
from zonerelay.inbound.access import Client, Reason
from zonerelay.inbound.answers import Answer, Then
from zonerelay.inbound.deadlines import Deadlines
from zonerelay.inbound.dialog import Dialog
from zonerelay.inbound.intake import BACKLOG, Intake
from zonerelay.inbound.reception import Reception
from zonerelay.smtp.commands import MAX_LINE, TLS_HELLO
from zonerelay.smtp.lines import LineFault, LineReader

MAX_PIPELINED = 64 * 1024
MAX_LINES_PER_TURN = 500  # then other connections get their turn
LINGER = 10.0  # seconds for a client to take our last words before it is cut off

# It logs every command line with the addresses in it (rule 7).
logging.getLogger("mail.log").setLevel(logging.CRITICAL + 1)
logging.getLogger("mail.debug").setLevel(logging.CRITICAL + 1)


class House(Protocol):
    """Who keeps the sessions: the listener."""

    def welcome(self, session: Session, peer: object) -> tuple[Client, Answer | None]:
        """Identify and count a connection, or say why not."""

    def farewell(self, client: Client) -> None:
        """The connection is gone: called once for every welcome without a refusal."""

    def forget(self, session: Session) -> None:
        """The connection is gone and nothing of it is still running."""


_NOBODY = Client("", 0, may_relay=False)


class Session(SMTP):
    def __init__(self, reception: Reception, house: House, loop: asyncio.AbstractEventLoop) -> None:
        # Not super().__init__(): nothing that it prepares is used, and it costs more than a message.
        settings = reception.settings
        self.loop = loop
        self._reception = reception
        self._house = house
        self._lines = LineReader(MAX_LINE)
        self._deadlines = Deadlines(
            loop.time(), idle=settings.idle_timeout, transaction=settings.transaction_timeout
        )
        self._wire: asyncio.Transport | None = None
        self._client = _NOBODY
        self._intake: Intake | None = None
        self._storing: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._welcome = False
        self._closing = False
        self._draining = False
        self._ended = False  # the client has half-closed
        self._blocked = False  # the client does not take our replies
        self._paused = False  # we do not read
        self._out_of_turn = False  # other large bodies are read first
        self._yielded = False  # lines are waiting for their turn

    # The loop calls these.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods, but not the base class.
        self._wire = transport  # type: ignore[assignment]
        self._client, refusal = self._house.welcome(self, transport.get_extra_info("peername"))
        self.start_over()
        if refusal is not None:
            self._say_goodbye(refusal)
            return
        self._welcome = True
        deadlines = self._deadlines
        self._timer = self.loop.call_at(deadlines.next_look(deadlines.heard), self._look_at_time)
        self._write(self._reception.greeting)

    def start_over(self) -> None:
        """A new conversation on this connection; input that has not been answered is discarded.

        What RFC 3207 4.2 asks for after a TLS handshake: nothing said in clear text may count.
        """
        self._lines.clear()
        self._dialog = Dialog(self._reception, self._client)

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        intake = self._intake
        if intake is not None and not intake.complete:
            self._take_body(intake, data)
            return
        if not self._dialog.commands and data.startswith(TLS_HELLO):
            self._say_goodbye(answers.NOT_SMTP)
            return
        line = self._lines.only_line(data)
        if line is None or intake is not None or self._blocked:
            self._lines.feed(data)
            self._advance()
            return
        # The ordinary case: one command, nothing behind it, and nobody waits for anything.
        answer = self._answer(line)
        self._reply(answer.wire, answer.then)
        if self._draining:
            self._leave_if_done()

    def eof_received(self) -> bool:
        """The client has said all it will, but may still be listening: answer what is owed first."""
        self._ended = True
        return self._owes_answers()

    def connection_lost(self, error: Exception | None) -> None:
        left, self._closing = not self._closing, True
        self._wire = None
        self._lines.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._reception.turns.leave(self)
        if self._intake is not None and not self._intake.complete:
            self._abandon(self._intake, left=left)
        if self._welcome:
            self._house.farewell(self._client)
        if self._storing is None:
            self._house.forget(self)

    def pause_writing(self) -> None:
        self._blocked = True
        self._regulate()

    def resume_writing(self) -> None:
        self._blocked = False
        self._advance()

    # Turns call these.

    @property
    def held_up(self) -> bool:
        return self._paused

    def take_turn(self) -> None:
        self._out_of_turn = False
        self._regulate()

    # The listener calls these.

    def drain(self) -> None:
        """Finish the transaction at hand, then close: 421 at once to a client that is in none."""
        self._draining = True
        self._leave_if_done()

    def abort(self) -> None:
        """Close now, whatever the client is doing. A message that arrived whole is still committed."""
        self._closing = True
        if self._wire is not None:
            self._wire.abort()

    # Commands.

    def _advance(self) -> None:
        """Answer the lines that are there, as far as the order of replies allows."""
        self._yielded = False
        if self._closing:
            return
        if self._lines.waiting and self._intake is None and not self._blocked:
            self._answer_lines()
        self._regulate()
        self._leave_if_done()

    def _answer_lines(self) -> None:
        replies: list[bytes] = []
        then = Then.GO_ON
        while (line := self._lines.next()) is not None:
            answer = self._answer(line)
            replies.append(answer.wire)
            then = answer.then
            if then is not Then.GO_ON:
                break
            if len(replies) == MAX_LINES_PER_TURN:
                self._yielded = True
                self.loop.call_soon(self._advance)
                break
        if replies:
            self._reply(b"".join(replies), then)

    def _reply(self, replies: bytes, then: Then) -> None:
        self._deadlines.answered(self.loop.time(), in_transaction=self._dialog.in_transaction)
        if self._wire is not None:
            self._wire.write(replies)
        if then is Then.GO_ON:
            return
        if then is Then.TAKE_BODY:
            self._intake = Intake(self._dialog.envelope(), self._reception, self._regulate)
        elif then is Then.CLOSE:
            self._close()

    def _answer(self, line: bytes | LineFault) -> Answer:
        try:
            return self._dialog.answer(line, more=self._lines.waiting > 0)
        except Exception as error:  # noqa: BLE001 - rule 3: a mistake of ours is never the client's
            self._reception.events.trouble("inbound", error)
            self._dialog.reset()
            return answers.TROUBLE

    # Bodies.

    def _take_body(self, intake: Intake, data: bytes) -> None:
        self._deadlines.heard = self.loop.time()
        intake.feed(data)
        if intake.complete:
            self._deadlines.complete()
            self._reception.turns.leave(self)
            if intake.rest:
                self._lines.feed(intake.rest)
        elif intake.hopeless:
            self._say_goodbye(answers.MUCH_TOO_BIG, intake)
            return
        elif intake.is_large:
            self._out_of_turn = not self._reception.turns.may_read(self, len(data), self._deadlines.heard)
        if self._storing is None:
            if intake.refusal is None:
                if intake.worth_storing:
                    self._storing = self.loop.create_task(self._store(intake))
            elif intake.complete:
                self._finish(intake, intake.refusal)
                return
        self._regulate()

    async def _store(self, intake: Intake) -> None:
        try:
            answer = await intake.store()
            self._storing = None
            # A refusal in the middle of a body waits for its end.
            if intake.complete:
                self._finish(intake, answer)
        except Exception as error:  # noqa: BLE001 - nobody awaits this task
            self._reception.events.trouble("inbound", error, message_id=intake.envelope.id)
            self.abort()
        finally:
            self._storing = None
            if self._wire is None:
                self._house.forget(self)

    def _finish(self, intake: Intake, answer: Answer) -> None:
        """The transaction is over: answer it, and go on with what the client has sent meanwhile."""
        self._intake = None
        if answer.reason is not None:
            self._refuse(answer, intake)
        self._dialog.reset()
        if self._wire is None or self._wire.is_closing():
            if answer.reason is None:
                self._reception.events.reply_lost(intake.envelope.id, intake.envelope.origin)
            return
        self._deadlines.answered(self.loop.time(), in_transaction=False)
        self._write(answer.wire)
        if self._lines.waiting or self._paused or self._ended or self._draining:
            self._advance()

    def _abandon(self, intake: Intake, *, left: bool) -> None:
        """No end of data will come: the message does not exist."""
        self._intake = None
        if left:
            gone = Answer(answers.CLIENT_LEFT, b"", reason=Reason.CLIENT_LEFT)
            self._refuse(gone, intake)
        if self._storing is not None:
            self._storing.cancel()

    def _refuse(self, answer: Answer, intake: Intake | None) -> None:
        if answer.reason is None:
            return
        if intake is None:
            self._dialog.refuse(answer)
            return
        envelope = intake.envelope
        self._dialog.refuse(
            answer, "DATA", message_id=envelope.id, mailbox=envelope.sender, detail=intake.detail
        )

    # Writing, reading, time.

    def _write(self, data: bytes) -> None:
        if self._wire is not None:
            self._wire.write(data)

    def _say_goodbye(self, answer: Answer, intake: Intake | None = None) -> None:
        self._refuse(answer, intake)
        self._write(answer.wire)
        self._close()

    def _close(self) -> None:
        self._closing = True
        self._lines.clear()
        wire = self._wire
        if wire is None:
            return
        if wire.get_write_buffer_size():
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.loop.call_later(LINGER, wire.abort)
        wire.close()

    def _owes_answers(self) -> bool:
        waits_for_store = self._intake is not None and self._intake.complete
        return not self._closing and (waits_for_store or self._yielded or self._blocked)

    def _leave_if_done(self) -> None:
        if self._closing or self._owes_answers():
            return
        if self._ended:
            self._close()
        elif self._draining and not self._dialog.in_transaction:
            self._say_goodbye(answers.SHUTTING_DOWN)

    def _regulate(self) -> None:
        """Read only while there is room for what comes."""
        intake = self._intake
        pause = (
            self._blocked
            or self._lines.waiting > MAX_PIPELINED
            or self._out_of_turn
            or (intake is not None and intake.backlog > BACKLOG)
        )
        if pause is self._paused or self._wire is None or self._ended:
            return
        self._paused = pause
        if pause:
            self._wire.pause_reading()
        else:
            self._wire.resume_reading()

    def _look_at_time(self) -> None:
        now = self.loop.time()
        if self._out_of_turn or (self._owes_answers() and not self._blocked):
            self._deadlines.heard = now
        late = self._deadlines.late(now)
        if late is None:
            self._timer = self.loop.call_at(self._deadlines.next_look(now), self._look_at_time)
            return
        self._say_goodbye(late, self._intake)
