"""One connection to a receiver: the sandbox's, with a nature of its own and a strict eye on the client."""

import asyncio
import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Mapping
from random import Random

from tests.support.ports import LOOPBACK
from tests.support.receivers.journal import Arrival, Journal
from tests.support.receivers.ledger import Promise, Tally
from tests.support.receivers.manners import FOLLOWED, Reader, line_problem, message_problem, parameter_problem
from tests.support.receivers.nature import Nature, Point, Tls
from tests.support.sink import Sink
from tests.support.sink_conversation import Conversation, Manners
from zonerelay.sandbox.behaviours import ScriptedReply

ESTABLISHED = 1  # of enum tcp_state, the first octet of TCP_INFO
SAMPLES = 3
BLOCKED = "5.7.1 Service unavailable; Client host [{}] blocked using rbl.example"


class Crowd:
    """Connections that are counted together: those to a receiver, or all."""

    def __init__(self, promise: Promise) -> None:
        self.tally = Tally(promise)
        self.members: set[StrictConversation] = set()

    def enter(self, guest: "StrictConversation") -> None:
        """One whose client has closed it is over, even if that was not noticed yet."""
        gone = sum(each.is_gone for each in self.members) if self.tally.is_full else 0
        self.members.add(guest)
        self.tally.opened(gone=gone)

    def leave(self, guest: "StrictConversation") -> None:
        self.members.discard(guest)
        self.tally.closed()


class Receiver(Sink):
    """What all connections to one address share."""

    def __init__(
        self,
        name: str,
        nature: Nature,
        *,
        host: str = LOOPBACK,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        ehlo_names: Mapping[str, str] | None = None,
        everybody: Crowd | None = None,
    ) -> None:
        manners = Manners(
            greeting=f"220 {name} ESMTP",
            esmtp=nature.esmtp,
            pipelining=nature.pipelining,
            eight_bit_mime=nature.eight_bit_mime,
            dsn=nature.dsn,
            chunking=nature.chunking,
            tls=tls,
            broken_tls=nature.tls in (Tls.GARBAGE, Tls.CLOSED, Tls.REFUSED),
            size=nature.size,
            max_recipients=nature.most_recipients,
            too_many=nature.too_many,
        )
        super().__init__(host=host, port=port, manners=manners)
        self.nature = nature
        self.ehlo_names = ehlo_names or {}
        self.journal = Journal(name)
        self.here = Crowd(nature.promise)
        self.everybody = everybody or Crowd(Promise())
        self.random = Random(name)

    def reader(self) -> asyncio.StreamReader:
        return Reader()

    def conversation(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Conversation:
        assert isinstance(reader, Reader)
        return StrictConversation(self, reader, writer)


class StrictConversation(Conversation):
    def __init__(self, receiver: Receiver, reader: Reader, writer: asyncio.StreamWriter) -> None:
        super().__init__(receiver, reader, writer)
        self._receiver = receiver
        self._nature = receiver.nature
        self._journal = receiver.journal
        self._attentive = reader
        self._socket: socket.socket = writer.get_extra_info("socket")
        self._client: str = writer.get_extra_info("peername")[0]
        self._introduced = False
        self._in_transaction = False
        self._asked_mail = False
        self._messages = 0
        self._transactions = 0

    @property
    def is_gone(self) -> bool:
        try:
            return self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] != ESTABLISHED
        except (OSError, ValueError):  # closed on our side, too
            return True

    async def run(self) -> None:
        crowds = (self._receiver.here, self._receiver.everybody)
        for crowd in crowds:
            crowd.enter(self)
        self._journal.counts["connections"] += 1
        try:
            self._wait("the greeting")
            await super().run()
        except (OSError, EOFError):
            pass  # the client left, or TLS broke
        except Exception as error:
            self._journal.error(f"{error!r} in the receiver itself")
        finally:
            for crowd in crowds:
                crowd.leave(self)

    def _scripted(self, verb: str, argument: str) -> str | None:
        if verb != "BDAT" and not (verb in FOLLOWED and "PIPELINING" in self._offered):
            self._wait(verb)
        self._check(verb, argument)
        if self._chance(self._nature.says_421):
            return "421 4.3.2 not now"
        if self._chance(self._nature.resets):
            self._reset_connection()
            return None
        return self._own_reply(verb) or None

    # The client's manners.

    def _wait(self, after: str) -> None:
        """Nothing may come before it is answered."""
        self._attentive.hush = True
        if self._buffer:
            self._journal.error(f"did not wait for the answer to {after}: {self._buffer[:60]!r}")

    def _check(self, verb: str, argument: str) -> None:
        problem = parameter_problem(argument, self._offered) if verb in ("MAIL", "RCPT") else ""
        if verb in ("EHLO", "HELO"):
            self._introduced = True
            if argument != self._receiver.ehlo_names.get(self._client, argument):
                problem = f"{self._client} calls itself {argument}"
        elif verb == "MAIL":
            if self._in_transaction or not self._introduced:
                problem = "MAIL out of order"
            self._asked_mail = True
            self._count_mail()
        elif verb in ("RCPT", "DATA", "BDAT") and not self._asked_mail:
            problem = f"{verb} without MAIL"
        elif verb not in ("RCPT", "DATA", "BDAT", "RSET", "QUIT", "STARTTLS"):
            problem = f"{verb} is no command of a client"
        if verb == "BDAT" and "CHUNKING" not in self._offered:
            problem = "BDAT without CHUNKING"
        if verb == "STARTTLS" and "STARTTLS" not in self._offered:
            problem = "STARTTLS that is not offered"
        if verb == "QUIT":
            self._journal.counts["quit"] += 1
        if problem:
            self._journal.error(problem)

    def _count_mail(self) -> None:
        self._transactions += 1
        self._receiver.here.tally.mail(time.monotonic())
        self._receiver.here.tally.messages(self._transactions)

    async def _line(self) -> str:
        line = await super()._line()
        problem = line_problem(line.encode())
        if problem:
            self._journal.error(problem)
        return line

    # The receiver's nature.

    async def _greet(self) -> None:
        nature = self._nature
        if nature.silent:
            await self._reader.read()
            self._open = False
            return
        await asyncio.sleep(nature.greets_after)
        greeting = self._manners.greeting
        if nature.most_connections and self._receiver.here.tally.open > nature.most_connections:
            greeting = "421 4.7.0 too many connections from your address"
            self._journal.counts["connections refused"] += 1
        if self._is_blocked(Point.GREETING):
            greeting = f"554 {BLOCKED.format(self._client)}"
        self._open = greeting.startswith("220")
        await self._reply(greeting)

    def _is_blocked(self, point: Point) -> bool:
        blocked = self._nature.blocks_at is point and self._client in self._nature.blocks
        self._journal.counts["blocked"] += blocked
        return blocked

    def _chance(self, part: float) -> bool:
        return bool(part) and self._receiver.random.random() < part

    def _reset_connection(self) -> None:
        self._open = False
        self._journal.counts["resets"] += 1
        with contextlib.suppress(OSError, ValueError):  # the client has left already
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def _own_reply(self, verb: str) -> str:
        """What the nature says to a command; nothing: the usual."""
        nature, journal = self._nature, self._journal
        if verb == "MAIL":
            if self._is_blocked(Point.MAIL):
                return f"550 {BLOCKED.format(self._client)}"
            if nature.rate is not None and journal.is_over(nature.rate):
                journal.counts["over rate"] += 1
                return nature.over_rate
        if verb == "DATA":
            return self._refusal_of_data()
        if verb == "STARTTLS" and nature.tls is Tls.REFUSED:
            return "454 4.7.0 TLS is not available"
        return ""

    def _refusal_of_data(self) -> str:
        reply = self._nature.at_first_data
        return reply if reply and self._recipients and self._journal.is_first("DATA", self._token) else ""

    async def _take_chunk(self, content: bytes, behaviours: list[ScriptedReply], *, last: bool) -> None:
        refusal = self._refusal_of_data()
        if refusal:
            self._chunk_refused = True
            await self._reply(refusal)
        else:
            await super()._take_chunk(content, behaviours, last=last)

    async def _starttls(self, argument: str) -> None:
        self._offered, self._introduced = set(), False
        if self._nature.tls is Tls.CLOSED:
            self._open = False
            await self._send(b"220 2.0.0 go ahead\r\n")
            return
        await super()._starttls(argument)
        self._open = self._open and self._nature.tls is not Tls.ABSENT

    async def _mail(self, argument: str) -> None:
        self._in_transaction = True
        await super()._mail(argument)

    def _reset(self) -> None:
        super()._reset()
        self._in_transaction = self._asked_mail = False

    @property
    def _token(self) -> str:
        return self._mail_from.partition("@")[0].removeprefix("b-")

    def _rcpt_reply(self, recipient: str, behaviour: ScriptedReply) -> str:
        nature, journal = self._nature, self._journal
        if not self._in_transaction:
            return "503 5.5.1 no MAIL"
        if nature.greylist:
            journal.counts[f"asked from {self._client}"] += 1
            other = journal.first_clients.setdefault(recipient, self._client) != self._client
            journal.counts["asked from another address"] += other
            triple = (self._client, self._mail_from, recipient)
            if journal.is_greylisted(triple, nature.greylist):
                return "451 4.7.1 greylisted, please try again later"
        if recipient.startswith("nobody"):
            return "550 5.1.1 no such mailbox"
        if recipient.startswith("full") and journal.is_first("full", recipient):
            return "452 4.2.2 mailbox full"
        return super()._rcpt_reply(recipient, behaviour)

    async def _answer_message(
        self, behaviours: list[ScriptedReply], body: bytes, size: int, digest: str
    ) -> None:
        if "PIPELINING" not in self._offered:
            self._wait("the message")
        problem = message_problem(body, self._offered, is_report=not self._mail_from)
        if problem:
            self._journal.error(f"{problem} ({self._token})")
        self._receiver.here.tally.recipients(len(self._recipients))
        if self._chance(self._nature.resets):
            if self._chance(0.5):
                self._note(body, doubtful=True)
            self._reset_connection()
        elif self._nature.mute_at_first and self._journal.is_first("mute", self._token):
            self._note(body, doubtful=True)
            self._open = False
            await self._reader.read()
        else:
            refusal = self._refusal()
            if not refusal:
                self._note(body)
            await self._reply(refusal or "250 2.0.0 taken")
        self._reset()

    def _refusal(self) -> str:
        if self._is_blocked(Point.DOT):
            return f"550 {BLOCKED.format(self._client)}"
        first = self._nature.at_first_dot
        return first if first and self._journal.is_first("dot", self._token) else ""

    def _note(self, body: bytes, *, doubtful: bool = False) -> None:
        arrivals = self._journal.arrivals
        self._messages += 1
        self._open = self._open and self._messages != self._nature.closes_after
        arrivals.append(
            Arrival(
                token=self._token,
                recipients=tuple(self._recipients),
                host=self._journal.name,
                client=self._client,
                at=time.monotonic(),
                encrypted=self._tls,
                doubtful=doubtful,
                raw=body if len(arrivals) < SAMPLES or not self._mail_from else b"",
            )
        )

    # Octets.

    async def _reply(self, reply: str) -> None:
        await super()._reply(reply)
        if self._attentive.spoke_early:
            self._attentive.spoke_early = False
            self._journal.error(f"spoke before it was answered {reply!r}")

    async def _send(self, data: bytes) -> None:
        nature = self._nature
        if nature.replies_after:
            await asyncio.sleep(nature.replies_after)
        for at in range(len(data) - 1 if nature.octets_apart else 0):
            self._write(data[at : at + 1])
            await asyncio.sleep(nature.octets_apart)
        self._attentive.hush = False
        self._write(data[-1:] if nature.octets_apart else data)
        await self._writer.drain()

    def _write(self, data: bytes) -> None:
        if self._writer.is_closing():
            raise EOFError
        self._writer.write(data)

    async def _more(self) -> None:
        if self._nature.reads_slowly:
            await asyncio.sleep(0.02)
            data = await self._reader.read(8192)
            if not data:
                raise EOFError
            self._buffer += data
        else:
            await super()._more()
