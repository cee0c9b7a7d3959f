"""What a handler of aiosmtpd may make of an envelope, which is what its client may; what its body costs."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiosmtpd.smtp import Envelope, Session

from tests.support.event_log import EventLog, events_into
from tests.support.inbound import House, Talk, talking
from tests.support.waiting import until
from zonerelay.config.settings import AccessAction, AccessSettings, BareLineEnds, SrsSettings
from zonerelay.inbound.access.networks import AccessRules
from zonerelay.inbound.limits.memory import SESSION_COST, SessionMemory
from zonerelay.inbound.policy import PolicyContext
from zonerelay.inbound.policy.aiosmtpd_handler import HandlerPolicy
from zonerelay.inbound.policy.api import WholeMessage
from zonerelay.inbound.policy.runner import MAX_THREADS, PolicyRunner
from zonerelay.inbound.state.context import SharedContext
from zonerelay.message.srs import Srs
from zonerelay.model.clock import ManualClock
from zonerelay.model.envelope import Mailbox

BODY = b"Subject: x\r\n\r\n" + b"y" * 70 + b"\r\n"


class Changing:
    """Does `change` to the envelope at `step`."""

    def __init__(self, step: str, change: Callable[[Envelope], None]) -> None:
        self._step = step
        self._change = change

    async def handle_RCPT(
        self, server: object, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        envelope.rcpt_tos.append(address)
        if self._step == "RCPT":
            self._change(envelope)
        return "250 OK"

    async def handle_DATA(self, server: object, session: Session, envelope: Envelope) -> str:
        if self._step == "DATA":
            self._change(envelope)
        return "250 OK"


class Waiting:
    """Waits within handle_DATA."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.sizes: list[int] = []

    async def handle_DATA(self, server: object, session: Session, envelope: Envelope) -> str:
        assert envelope.content is not None
        self.sizes.append(len(envelope.content))
        envelope.rcpt_tos += ["more@example.com"]
        while not self.go_on.is_set():
            await asyncio.sleep(0.01)
        return "250 OK"


@asynccontextmanager
async def handled(
    handler: object, *, timeout: float = 5.0, **more: Any
) -> AsyncIterator[tuple[House, Talk]]:  # Any: as of `talking`
    log, clock = EventLog(), ManualClock()
    runner = PolicyRunner(
        HandlerPolicy(handler, PolicyContext()), timeout=timeout, events=events_into(log, clock), zones=tuple
    )
    try:
        async with talking(policy=runner, log=log, clock=clock, **more) as (house, talk):
            yield house, talk
    finally:
        await runner.close()


def adding(*addresses: str) -> Callable[[Envelope], None]:
    return lambda envelope: envelope.rcpt_tos.extend(addresses)


def from_sender(address: str) -> Callable[[Envelope], None]:
    return lambda envelope: setattr(envelope, "mail_from", address)


ACCESS = AccessRules(
    [
        AccessSettings(action=AccessAction.REFUSE, recipient=("closed.test",)),
        AccessSettings(action=AccessAction.REFUSE, sender=("bad@example.org",)),
    ]
)


@pytest.mark.parametrize("step", ["RCPT", "DATA"])
@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        (adding("x@closed.test"), b"550 5.7.1 Access denied"),
        (from_sender("bad@example.org"), b"550 5.7.1 Access denied"),
        (
            adding("c@d.test", "d@d.test"),
            b"452 4.5.3 More than 2 recipients; send the rest in another message",
        ),
        (adding("no address"), b"451 4.3.0 Policy not available now"),
        (adding("j\u00fcrgen@example.com"), b"451 4.3.0 Policy not available now"),
    ],
)
async def test_the_relays_rules_hold_for_what_a_handler_names(
    step: str, change: Callable[[Envelope], None], refusal: bytes
) -> None:
    shared = SharedContext(access=ACCESS)
    async with handled(Changing(step, change), shared=shared, max_recipients=2) as (house, talk):
        await talk.ask(b"EHLO x")
        await talk.ask(b"MAIL FROM:<a@example.org>")
        answer = await talk.ask(b"RCPT TO:<b@example.com>")
        if step == "DATA":
            assert answer.startswith(b"250")
            await talk.ask(b"DATA")
            answer = await talk.ask(BODY + b".")
        assert answer == refusal
        assert house.store.stored == []
        (refused,) = house.log.named("refused")
        assert refused["detail"]


async def test_a_stranger_gets_no_other_recipient() -> None:
    """A client that may write to an address of SRS only, and a handler that would send it elsewhere."""
    srs = Srs(SrsSettings(domain="srs.example"), ("0123456789abcdef",))
    given = srs.forward(Mailbox("ann@first.example"), ManualClock().now())
    elsewhere = Changing("RCPT", adding("victim@elsewhere.test"))
    async with handled(elsewhere, shared=SharedContext(srs=srs), allow_networks=()) as (_, talk):
        await talk.ask(b"EHLO x")
        await talk.ask(b"MAIL FROM:<>")
        assert await talk.ask(f"RCPT TO:<{given}>".encode()) == b"550 5.7.1 Relaying denied"


async def test_a_refused_change_is_gone_from_the_envelope() -> None:
    seen: list[list[str]] = []

    def change(envelope: Envelope) -> None:
        seen.append(list(envelope.rcpt_tos))
        if envelope.rcpt_tos[-1] == "bad@example.com":
            envelope.rcpt_tos.append("x@closed.test")

    async with handled(Changing("RCPT", change), shared=SharedContext(access=ACCESS)) as (house, talk):
        await talk.ask(b"EHLO x")
        await talk.ask(b"MAIL FROM:<a@example.org>")
        for name in (b"one", b"bad", b"two"):
            await talk.ask(b"RCPT TO:<" + name + b"@example.com>")
        await talk.ask(b"DATA")
        assert (await talk.ask(BODY + b".")).startswith(b"250")
    assert seen[2] == ["one@example.com", "two@example.com"]
    assert [each.recipient for each in house.store.stored[0].deliveries] == seen[2]


class Remembering:
    """Keeps something of its own in the envelope and the session, and leaves a mess where it refuses."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    async def handle_MAIL(
        self, server: object, session: Any, envelope: Any, address: str, options: list[str]
    ) -> str:  # Any: with attributes of its own
        session.messages = getattr(session, "messages", 0) + 1
        envelope.first = address
        envelope.mail_from = address
        return "250 OK"

    async def handle_RCPT(
        self, server: object, session: Any, envelope: Any, address: str, options: list[str]
    ) -> str:
        envelope.rcpt_tos.append(address)
        if address.startswith("bad"):
            envelope.content, envelope.mail_from = b"mine", "other@example.org"
            envelope.mail_options.append("SIZE=1")
            return "550 5.1.1 No"
        self.seen.append((session.messages, envelope.first, envelope.mail_from, list(envelope.rcpt_tos)))
        assert (envelope.content, envelope.mail_options) == (None, [])
        return "250 OK"

    async def handle_DATA(self, server: object, session: Any, envelope: Any) -> str:
        envelope.content = b""
        return "250 OK"


async def test_envelopes_keep_what_a_handler_puts_into_them_until_the_message_ends() -> None:
    handler = Remembering()
    async with handled(handler) as (house, talk):
        await talk.ask(b"EHLO x")
        for sender in (b"a@example.org", b"b@example.org"):
            await talk.ask(b"MAIL FROM:<" + sender + b">")
            assert await talk.ask(b"RCPT TO:<bad@example.com>") == b"550 5.1.1 No"
            assert await talk.ask(b"RCPT TO:<one@example.com>") == b"250 2.1.5 Recipient OK"
            await talk.ask(b"DATA")
            assert (await talk.ask(BODY + b".")).startswith(b"250")
    assert handler.seen == [
        (1, "a@example.org", "a@example.org", ["one@example.com"]),
        (2, "b@example.org", "b@example.org", ["one@example.com"]),
    ]
    assert b"y" * 70 not in house.store.stored[0].body


async def test_bare_line_ends_are_refused_of_clients_and_made_good_of_handlers() -> None:
    seen: list[object] = []

    def change(envelope: Envelope) -> None:
        seen.append(envelope.content)
        envelope.content = "Subject: y\n\n.\nende\u0308\n"

    async with handled(Changing("DATA", change), bare_line_ends=BareLineEnds.REJECT) as (house, talk):
        await talk.begin()
        assert await talk.ask(b"Subject: x\n\nbody\r\n.") == b"550 5.6.0 Bare <CR> or <LF> in message"
        assert seen == []
        await talk.begin()
        assert (await talk.ask(BODY + b".")).startswith(b"250")
    (stored,) = house.store.stored
    assert stored.body.endswith("Subject: y\r\n\r\n.\r\nende\u0308\r\n".encode())
    assert stored.message.eight_bit


async def test_a_whole_body_counts_twice_in_the_memory_of_sessions() -> None:
    handler, memory = Waiting(), SessionMemory(10_000_000)
    body = BODY * 5000
    async with handled(handler, shared=SharedContext(memory=memory)) as (house, talk):
        await talk.begin()
        talk.send(body + b".\r\n")
        await until(lambda: bool(handler.sizes))
        assert memory.used >= 2 * len(body)
        assert memory.used < 2 * len(body) + SESSION_COST
        handler.go_on.set()
        assert (await talk.reply()).startswith(b"250")
    assert handler.sizes == [len(body)]
    assert memory.used == 0
    assert house.store.stored[0].body.endswith(body)


async def test_a_client_that_leaves_while_the_handler_thinks_has_sent_its_message() -> None:
    handler, memory = Waiting(), SessionMemory(10_000_000)
    async with handled(handler, shared=SharedContext(memory=memory)) as (house, talk):
        await talk.begin()
        talk.send(BODY + b".\r\n")
        await until(lambda: bool(handler.sizes))
        await talk.close()
        handler.go_on.set()
        await until(lambda: bool(house.store.stored))
    assert memory.used == 0
    assert len(house.store.stored[0].deliveries) == 2


def whole_messages() -> int:
    gc.collect()
    return sum(isinstance(each, WholeMessage) for each in gc.get_objects())


class Stuck:
    """Hangs in every thread that there is."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.asked = 0

    def handle_DATA(self, server: object, session: Session, envelope: Envelope) -> str:
        self.asked += 1
        self.released.wait(60)
        return "250 OK"


async def test_messages_do_not_pile_up_behind_a_hook_that_hangs() -> None:
    handler = Stuck()

    async def send(house: House) -> bytes:
        talk = await house.connect()
        await talk.begin()
        answer = await talk.ask(BODY + b".")
        await talk.close()
        return answer

    async with handled(handler, timeout=0.3) as (house, _):
        answers = await asyncio.gather(*(send(house) for _ in range(MAX_THREADS + 4)))
        assert set(answers) == {b"451 4.3.0 Policy not available now"}
        assert whole_messages() <= MAX_THREADS
        assert await send(house) == answers[0]
        assert house.log.named("policy-failed")[-1]["kind"] == "busy"
        handler.released.set()
        await until(lambda: whole_messages() == 0)
        assert handler.asked == MAX_THREADS
        assert (await send(house)).startswith(b"250")
    assert len(house.store.stored) == 1


async def test_when_memory_is_short_a_body_that_waits_to_be_whole_is_given_up() -> None:
    memory = SessionMemory(400_000)
    async with handled(Waiting(), shared=SharedContext(memory=memory)) as (_, talk):
        await talk.begin()
        talk.send(BODY * 4000)
        assert await talk.reply() == b"421 4.3.2 Too busy, try again later"
    assert memory.used == 0
