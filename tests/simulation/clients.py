"""Clients that submit mail over the simulated network, and what they were promised."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from random import Random
from typing import cast

from tests.simulation.loop import ProcessDiedError, SimLoop
from tests.simulation.network import End, Fault, Network
from tests.simulation.parts import Node
from zonerelay.inbound.cleanup import submit as submitting
from zonerelay.inbound.cleanup.submit import Acceptance, Principal, SubmitCall, SubmitOptions
from zonerelay.model.envelope import Mailbox, Recipient
from zonerelay.smtp.server.params import MailCommand

PATIENCE = 120.0


@dataclass
class Submission:
    """One message as its client knows it. `answered` is when its 250 came, `None` before that."""

    tag: str
    sender: str
    recipients: tuple[str, ...]
    body: bytes
    keyed: bool = False
    """Its client has an idempotency key, and repeats it until it has an answer."""
    dot_sent: bool = False
    """The relay may have seen the end of the message."""
    accepted: tuple[str, ...] = ()
    """The recipients for whom RCPT was answered 250."""
    answered: float | None = None
    identity: str = ""
    refused: bool = False
    """The answer was 5yz."""
    node: str = ""

    def note_answer(self, now: float, node: str, code: int, identity: str) -> None:
        self.node, self.refused = node, code >= 500
        if code == 250:
            self.answered, self.identity = now, identity


class _Conversation(asyncio.Protocol):
    def __init__(self) -> None:
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._buffer = b""
        self.end: End

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.end = cast(End, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while b"\r\n" in self._buffer:
            line, self._buffer = self._buffer.split(b"\r\n", 1)
            if line[3:4] != b"-":
                self._lines.put_nowait(line)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lines.put_nowait(None)

    async def reply(self) -> bytes:
        """Raises ConnectionError."""
        try:
            line = await asyncio.wait_for(self._lines.get(), PATIENCE)
        except TimeoutError as error:
            raise ConnectionAbortedError("no reply") from error
        if line is None:
            raise ConnectionAbortedError("the relay has gone")
        return line

    async def ask(self, line: bytes) -> bytes:
        self.end.write(line + b"\r\n")
        return await self.reply()


@dataclass
class Clients:
    """`submit` hands one message in, once."""

    loop: SimLoop
    network: Network
    random: Random
    sometimes: Counter[str]
    submissions: list[Submission] = field(default_factory=list)
    mails_accepted: list[tuple[float, str]] = field(default_factory=list)
    """When MAIL was answered 250, and by which node."""

    async def submit(self, node: Node, submission: Submission, *, fault: Fault | None = None) -> None:
        """Ends when the client knows what became of it, or cannot know."""
        address = node.address
        if address is None:
            return
        if fault is None and self.random.random() < 0.2:
            await self._submit_by_call(node, submission)
            return
        try:
            end, protocol = await self.network.connect(address, _Conversation, fault)
        except ConnectionRefusedError:
            return
        talk = cast(_Conversation, protocol)
        try:
            await self._converse(talk, node, submission)
        except ConnectionError:
            if submission.dot_sent and submission.answered is None:
                self.sometimes["client without an answer after the dot"] += 1
        finally:
            end.abort()

    async def _converse(self, talk: _Conversation, node: Node, submission: Submission) -> None:
        if not (await talk.reply()).startswith(b"220"):
            return
        await talk.ask(b"EHLO client.test")
        size = len(submission.body) if self.random.random() < 0.8 else self.random.randint(1, 500_000)
        mail = b"MAIL FROM:<%b> SIZE=%d" % (submission.sender.encode(), size)
        if not (await talk.ask(mail)).startswith(b"250"):
            return
        self.mails_accepted.append((self.loop.now, node.name))
        asked = [(each, await talk.ask(b"RCPT TO:<%b>" % each.encode())) for each in submission.recipients]
        accepted = tuple(each for each, reply in asked if reply.startswith(b"250"))
        # With a key it comes again with all of them: others would be another message.
        if not accepted or (submission.keyed and accepted != submission.recipients):
            return
        submission.accepted = accepted
        text = submission.body
        if submission.keyed:
            text = b"Idempotency-Key: %b\r\n" % submission.tag.encode() + text
        body = text.replace(b"\r\n.", b"\r\n..")
        if self.random.random() < 0.3:
            await self._send_chunks(talk, submission, text)
        else:
            if not (await talk.ask(b"DATA")).startswith(b"354"):
                return
            await self._send(talk, body)
            submission.dot_sent = True
            talk.end.write(b".\r\n")
        if self.random.random() < 0.05:
            self.sometimes["client left after the dot"] += 1
            raise ConnectionAbortedError("the client leaves")
        code, *_, last = (await talk.reply()).decode().split()
        if code != "250":
            self.sometimes[f"refused with {code} after the dot"] += 1
        submission.note_answer(self.loop.now, node.name, int(code), last)

    async def _send(self, talk: _Conversation, body: bytes) -> None:
        stop = len(body) if self.random.random() < 0.95 else self.random.randrange(len(body))
        for start in range(0, stop, 20_000):
            talk.end.write(body[start : min(stop, start + 20_000)])
            await asyncio.sleep(self.random.uniform(0.0, 0.01))
        if stop < len(body):
            self.sometimes["client left in the body"] += 1
            raise ConnectionAbortedError("the client leaves")

    async def _send_chunks(self, talk: _Conversation, submission: Submission, body: bytes) -> None:
        step = max(self.random.choice((100, 5_000, 70_000, 200_000)), len(body) // 20)
        for start in range(0, len(body), step):
            piece = body[start : start + step]
            last = start + step >= len(body)
            submission.dot_sent = submission.dot_sent or last
            talk.end.write(b"BDAT %d%b\r\n" % (len(piece), b" LAST" if last else b"") + piece)
            if not last and not (await talk.reply()).startswith(b"250"):
                raise ConnectionAbortedError("the chunk was refused")

    async def _submit_by_call(self, node: Node, submission: Submission) -> None:
        """What POST /v1/messages does with a request: 202 is `Acceptance`."""
        assert node.process is not None
        random = self.random
        body = submission.body
        leaves = random.random() < 0.05

        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(body), 20_000):
                await asyncio.sleep(random.uniform(0.0, 0.01))
                if leaves:
                    raise ConnectionAbortedError("the client leaves")
                submission.dot_sent = submission.dot_sent or start + 20_000 >= len(body)
                yield body[start : start + 20_000]

        call = SubmitCall(
            Principal(protocol="HTTP", address="127.0.0.1", helo="client.test"),
            submitting.SubmittedEnvelope(
                MailCommand(Mailbox(submission.sender)),
                [Recipient(address=Mailbox(each)) for each in submission.recipients],
            ),
            SubmitOptions(idempotency_key=submission.tag if submission.keyed else ""),
        )
        result = node.worker.listeners.submit(call, pieces())
        try:
            answer = await node.process.finish(result)
        except (ConnectionError, ProcessDiedError) as error:
            self.sometimes[f"HTTP: {type(error).__name__}"] += 1
            return
        if isinstance(answer, Acceptance):
            self.sometimes["HTTP: 202"] += 1
            submission.accepted = submission.recipients
            submission.note_answer(self.loop.now, node.name, 250, answer.id)
        else:
            self.sometimes[f"HTTP: refused with {answer.reply.code}"] += 1
            submission.note_answer(self.loop.now, node.name, answer.reply.code, "")
