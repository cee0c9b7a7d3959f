"""While somebody is asked (a password, the policy): what comes meanwhile waits, and who leaves leaves."""

import asyncio
import base64
from collections.abc import Collection

import pytest

from tests.support.inbound import Talk, listening, talking
from tests.support.waiting import until
from zonerelay.config.credentials.file import User
from zonerelay.config.settings import ListenerAuth, ListenerSettings, UnsafeListener
from zonerelay.inbound.access.auth import LoginKind, LoginResult
from zonerelay.inbound.policy import ACCEPT, Decision, Event, Helo, Mail, Rcpt
from zonerelay.inbound.state.context import SharedContext
from zonerelay.smtp.server.sasl import Credentials

PLAIN = b"AUTH PLAIN " + base64.b64encode(b"\0app\0secret")
ENVELOPE = b"MAIL FROM:<a@example.org>\r\nRCPT TO:<b@example.com>\r\n"


class Gate:
    """Whoever is asked: answers when the gate is opened. A policy and the users at once."""

    def __init__(self, asked: Collection[type[Event]] = (), decision: Decision = ACCEPT) -> None:
        self.asked = frozenset(asked)
        self.questions: list[Event | Credentials] = []
        self.cancelled = 0
        self._decision = decision
        self._open = asyncio.Event()

    async def ask(self, event: Event) -> Decision:
        await self._wait(event)
        return self._decision

    async def check(self, credentials: Credentials, client_address: str, *_: object) -> LoginResult:
        await self._wait(credentials)
        return LoginResult(LoginKind.OK, User(credentials.user, "", ()))

    async def _wait(self, question: Event | Credentials) -> None:
        self.questions.append(question)
        try:
            await self._open.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def reached(self) -> None:
        await until(lambda: bool(self.questions))

    def open(self) -> None:
        self._open.set()


WITH_AUTH = ListenerSettings(
    address="127.0.0.1:0", auth=ListenerAuth.OPTIONAL, unsafe=(UnsafeListener.CLEARTEXT_AUTH,)
)


async def silent(talk: Talk) -> None:
    """Nothing is answered yet."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.03):
            await talk.reader.read(1)


# Leaving.


@pytest.mark.parametrize("event", [None, Helo, Mail, Rcpt], ids=["password", "helo", "mail", "rcpt"])
@pytest.mark.parametrize("abruptly", [False, True])
async def test_leaving_while_somebody_is_asked(event: type[Event] | None, abruptly: bool) -> None:
    gate = Gate([event] if event else [])
    async with listening(WITH_AUTH, policy=gate, shared=SharedContext(users=gate)) as house:
        talk = await house.connect()
        talk.send(b"EHLO x\r\n")
        await asyncio.sleep(0.01)
        talk.send(ENVELOPE if event else PLAIN + b"\r\n")
        await gate.reached()
        await talk.leave(abruptly=abruptly)
        if not abruptly:
            # It has only said that it will say no more, as far as anybody can see.
            gate.open()
        await house.gone()
        await until(lambda: not house.listener._admission.sessions)
        assert (gate.cancelled, house.store.begun) == (abruptly, 0)
        assert house.log.named("trouble") == []


async def test_half_closing_behind_a_log_in_gives_it_up() -> None:
    """Nothing can follow it: the hash of a password is not computed for nobody."""
    gate = Gate()
    async with listening(WITH_AUTH, shared=SharedContext(users=gate)) as house:
        talk = await house.connect()
        await talk.ask(b"EHLO client")
        talk.send(PLAIN + b"\r\n")
        await until(lambda: bool(gate.questions))
        talk.writer.write_eof()
        await until(lambda: gate.cancelled == 1)
        assert await talk.closed() == b""
        await talk.close()


# What comes meanwhile.


async def test_each_question_of_a_group_waits_for_the_one_before() -> None:
    gate = Gate([Mail, Rcpt])
    async with talking(policy=gate) as (_, talk):
        await talk.ask(b"EHLO x")
        talk.send(b"MAIL FROM:<a@example.org>\r\nRCPT TO:<b@example.com>\r\nRCPT TO:<c@example.com>\r\n")
        await gate.reached()
        await silent(talk)
        assert [type(question) for question in gate.questions] == [Mail]
        gate.open()
        assert [(await talk.line())[:9] for _ in range(3)] == [b"250 2.1.0", b"250 2.1.5", b"250 2.1.5"]
        assert [type(question) for question in gate.questions] == [Mail, Rcpt, Rcpt]


# Time, stopping, memory.


async def test_a_bug_behind_a_question_is_temporary() -> None:
    class Broken(Gate):
        async def ask(self, event: Event) -> Decision:
            raise ZeroDivisionError("/secret/path")

    async with talking(policy=Broken([Mail])) as (house, talk):
        assert (await talk.ask(b"EHLO x")).startswith(b"250-")
        assert await talk.ask(b"MAIL FROM:<a@example.org>") == b"451 4.3.0 Local error, try again later"
        assert len(house.log.named("trouble")) == 1
        assert await talk.ask(b"NOOP") == b"250 2.0.0 OK"
