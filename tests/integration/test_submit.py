"""`submit`: what it accepts, what it refuses, and what is left of a message that does not end."""

import asyncio
import runpy
import smtplib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.support.inbound import House, listening
from tests.support.loop_turns import loop_turns
from tests.support.ports import free_port
from tests.support.waiting import until
from zonerelay.config.settings import ListenerSettings
from zonerelay.control.socket import bind
from zonerelay.inbound import policy
from zonerelay.inbound.cleanup import submit as submission
from zonerelay.inbound.cleanup.intake import LIST
from zonerelay.inbound.cleanup.submit import Acceptance, Rejection, SubmitCall, SubmitOptions
from zonerelay.inbound.listen.submit_socket import SubmitClient, SubmitSocket
from zonerelay.inbound.refusal import Reason
from zonerelay.model.envelope import Mailbox, Recipient
from zonerelay.smtp.server.params import MailCommand
from zonerelay.store.contract import Unhealthy

HERE = submission.Principal(protocol="TEST", address="127.0.0.1", helo="[127.0.0.1]")
MESSAGE = b"Subject: x\r\n\r\n.one\r\n.\r\ntwo\r\n"
LINE = b"x" * 998 + b"\r\n"


def to(*recipients: str) -> submission.SubmittedEnvelope:
    people = tuple(Recipient(address=Mailbox(each)) for each in recipients)
    return submission.SubmittedEnvelope(MailCommand(Mailbox("a@example.org")), people)


ZOE = to("zoe@example.net")
DEFAULT = SubmitOptions()


async def cut(data: bytes, size: int) -> AsyncIterator[bytes]:
    for at in range(0, len(data), size):
        yield data[at : at + size]
        await asyncio.sleep(0)


@dataclass(frozen=True)
class Way:
    """The call in this process, or over a socket."""

    house: House
    submit: submission.Submit

    async def accept(self, pieces: submission.Pieces, options: SubmitOptions = DEFAULT) -> bytes:
        """Return the message as it is stored, behind the fields of our own."""
        result = await self.submit(SubmitCall(HERE, ZOE, options), pieces)
        assert isinstance(result, Acceptance)
        stored = self.house.store.stored[-1]
        assert stored.message.envelope.id == result.id
        return stored.body

    async def refuse(
        self, envelope: submission.SubmittedEnvelope, pieces: submission.Pieces, options: SubmitOptions
    ) -> Rejection:
        result = await self.submit(SubmitCall(HERE, envelope, options), pieces)
        assert isinstance(result, Rejection)
        assert not self.house.store.stored
        return result


@pytest.fixture
async def house() -> AsyncIterator[House]:
    settings = ListenerSettings(address="127.0.0.1:0", max_message_size=4 * 1024**2, max_recipients=2)
    async with listening(settings) as house:
        yield house


@pytest.fixture
async def over_socket(house: House, tmp_path: Path) -> AsyncIterator[submission.Submit]:
    path = tmp_path / "submit.sock"
    server = SubmitSocket(house.listener.submissions.submit)
    await server.start(bind(path))
    yield SubmitClient(lambda: [tmp_path / "nobody.sock", path]).submit
    server.close()
    await server.drain()


@pytest.fixture(params=["here", "socket"])
def way(request: pytest.FixtureRequest, house: House, over_socket: submission.Submit) -> Way:
    return Way(house, house.listener.submissions.submit if request.param == "here" else over_socket)


async def test_a_message_is_stored_as_it_came(way: Way) -> None:
    assert (await way.accept([MESSAGE])).endswith(MESSAGE)
    assert (await way.accept(cut(MESSAGE, 1))).endswith(MESSAGE)
    large = b"Subject: x\r\n\r\n" + LINE * 3000
    assert (await way.accept(cut(large, 65_536))).endswith(large)
    stored = way.house.store.stored[-1]
    assert stored.message.envelope.origin.protocol == "TEST"
    assert b"Received: from [127.0.0.1] ([127.0.0.1])" in stored.body
    assert [each.recipient for each in stored.deliveries] == ["zoe@example.net"]


async def test_options_say_what_smtp_says_in_the_header(way: Way) -> None:
    await way.accept([MESSAGE], SubmitOptions(notes=("tag=a",), idempotency_key="k"))
    assert "tag=a" in way.house.store.stored[0].message.trace
    first = await way.submit(SubmitCall(HERE, ZOE, SubmitOptions(idempotency_key="k")), [MESSAGE])
    assert isinstance(first, Acceptance)
    assert first.id == way.house.store.stored[0].message.envelope.id
    assert len(way.house.store.stored) == 1


async def test_other_work_runs_while_a_long_list_is_refused(house: House) -> None:
    many = to(*(f"{number}@example.net" for number in range(50 * LIST)))
    assert await loop_turns(house.listener.submissions.submit(SubmitCall(HERE, many), [MESSAGE])) > 50


class Deliberate:
    """A policy that decides about the second recipient when it is told to."""

    asked = frozenset({policy.Rcpt})

    def __init__(self) -> None:
        self.reached, self.go = asyncio.Event(), asyncio.Event()

    async def ask(self, event: policy.Event) -> policy.Decision:
        assert isinstance(event, policy.Rcpt)
        if event.recipients_so_far:
            self.reached.set()
            await self.go.wait()
        return policy.ACCEPT


class Session:
    """Another holder of memory, with less than an open envelope has."""

    held, must_stay, is_shed = 1, False, False

    def shed(self) -> None:
        self.is_shed = True


async def test_an_envelope_that_cannot_be_ended_does_not_protect_others_when_memory_is_short() -> None:
    slow, other = Deliberate(), Session()
    async with listening(ListenerSettings(address="127.0.0.1:0"), policy=slow) as house:
        call = SubmitCall(HERE, to("a@example.net", "b@example.net"))
        submitting = asyncio.create_task(house.listener.submissions.submit(call, [MESSAGE]))
        await slow.reached.wait()
        memory = house.listener.context.memory
        memory.holders.add(other)
        memory.relieve()
        assert other.is_shed
        memory.holders.discard(other)
        slow.go.set()
        assert isinstance(await submitting, Acceptance)


async def test_one_refused_recipient_refuses_the_message_unless_it_is_partial(way: Way) -> None:
    three = to("a@example.net", "b@example.net", "c@example.net")
    refused = await way.refuse(three, never(), SubmitOptions())
    assert refused.reason is Reason.RECIPIENTS
    assert list(refused.recipients) == ["c@example.net"]
    result = await way.submit(SubmitCall(HERE, three, SubmitOptions(partial=True)), [MESSAGE])
    assert isinstance(result, Acceptance)
    assert list(result.refused) == ["c@example.net"]
    assert len(way.house.store.stored[0].deliveries) == 2


async def test_a_repetition_has_the_recipients_and_the_message_id_of_the_first_answer(way: Way) -> None:
    """Other recipients were refused by then: the message was sent twice to those of the first."""
    options = SubmitOptions(partial=True, idempotency_key="k")
    one, other = (b"Message-ID: <%b@example.org>\r\n" % left + MESSAGE for left in (b"one", b"other"))
    first = await way.submit(
        SubmitCall(HERE, to("a@example.net", "b@example.net", "c@example.net"), options), [one]
    )
    again = await way.submit(
        SubmitCall(HERE, to("c@example.net", "b@example.net", "a@example.net"), options), [other]
    )
    assert isinstance(first, Acceptance)
    assert isinstance(again, Acceptance)
    assert (again.id, again.refused, again.message_id) == (first.id, first.refused, "<one@example.org>")
    assert list(first.refused) == ["c@example.net"]


async def test_a_client_that_may_not_relay_is_refused(way: Way) -> None:
    foreign = submission.Principal(protocol="TEST", address="192.0.2.1")
    result = await way.submit(SubmitCall(foreign, ZOE), never())
    assert isinstance(result, Rejection)
    assert result.reason is Reason.RELAY
    result = await way.submit(SubmitCall(structs.replace(foreign, user="nobody"), ZOE), never())
    assert isinstance(result, Rejection)
    assert result.reason is Reason.AUTH_FAILURE
    result = await way.submit(SubmitCall(structs.replace(foreign, may_relay=True), ZOE), [MESSAGE])
    assert isinstance(result, Acceptance)


async def test_a_message_that_is_too_large_is_read_no_further(way: Way) -> None:
    read = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal read
        yield b"Subject: x\r\n\r\n"
        while True:
            read += 64_000
            yield LINE * 64
            await asyncio.sleep(0)

    refused = await way.refuse(ZOE, pieces(), SubmitOptions())
    assert refused.reason is Reason.SIZE
    assert refused.reply.text == "Message exceeds 4 MB, the limit of this listener"
    assert read < 40_000_000


async def test_what_the_pieces_raise_is_raised_and_nothing_is_stored(way: Way) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"Subject: x\r\n\r\n" + LINE * 100
        raise OSError("the file is gone")

    with pytest.raises(OSError, match="the file is gone"):
        await way.submit(SubmitCall(HERE, ZOE), pieces())
    await until(lambda: way.house.log.reasons() == ["client-left"])
    assert not way.house.store.stored


async def test_a_store_that_fails_is_a_refusal_for_now(way: Way) -> None:
    way.house.store.sick = Unhealthy.WRITE_FAILED
    refused = await way.refuse(ZOE, never(), SubmitOptions())
    assert (refused.reason, refused.of_sender, refused.reply.code) == (Reason.STORE, True, 451)
    way.house.store.sick = None

    async def fail() -> None:
        raise RuntimeError("a bug")

    way.house.store.before_commit = fail
    assert (await way.refuse(ZOE, [MESSAGE], SubmitOptions())).reason is Reason.LOCAL_ERROR


async def test_a_caller_that_leaves_after_the_last_piece_does_not_undo_the_commit(way: Way) -> None:
    committing, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        committing.set()
        await go_on.wait()

    way.house.store.before_commit = wait
    calling = asyncio.ensure_future(way.submit(SubmitCall(HERE, ZOE), [MESSAGE]))
    await committing.wait()
    calling.cancel()
    await asyncio.wait([calling])
    draining = asyncio.ensure_future(way.house.listener.submissions.drain(0.0))
    await asyncio.sleep(0)
    assert not draining.done()
    go_on.set()
    await draining
    assert len(way.house.store.stored) == 1


async def test_a_listener_that_stops_gives_up_what_is_not_here_whole(way: Way) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"Subject: x\r\n\r\n"
        begun.set()
        await go_on.wait()

    calling = asyncio.ensure_future(way.submit(SubmitCall(HERE, ZOE), pieces()))
    await begun.wait()
    await way.house.listener.submissions.drain(0.01)
    assert not way.house.store.stored
    go_on.set()
    result = await calling
    assert isinstance(result, Rejection)
    assert result.reason is Reason.SHUTDOWN
    assert (await way.refuse(ZOE, never(), SubmitOptions())).reason is Reason.SHUTDOWN


async def never() -> AsyncIterator[bytes]:
    raise AssertionError("the envelope is refused")
    yield b""


# ---- docs/examples/aiosmtpd_listener.py: a Controller of aiosmtpd that streams through `submit` -----


EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "docs/examples/aiosmtpd_listener.py"))
LARGE = b"Subject: x\r\n\r\n.dot\r\n" + (b"x" * 70 + b"\r\n") * 30_000


class Served:
    def __init__(self, house: House, port: int) -> None:
        self.house = house
        self._port = port

    async def send(self, body: bytes, *recipients: str) -> Any:  # Any: smtplib's
        """Return the reply to DATA, or those of the recipients that it stands for."""

        def send() -> Any:
            with smtplib.SMTP("127.0.0.1", self._port, timeout=30) as client:
                client.ehlo("client.test")
                client.mail("a@example.org", ["BODY=8BITMIME"])
                for each in recipients:
                    assert client.rcpt(each)[0] == 250
                try:
                    return client.data(body)
                except smtplib.SMTPDataError as error:
                    return error.smtp_code, error.smtp_error
                finally:
                    assert client.noop()[0] == 250

        return await asyncio.to_thread(send)


@pytest.fixture
async def served(house: House, over_socket: submission.Submit) -> AsyncIterator[Served]:
    controller = EXAMPLE["ListenerController"](over_socket, hostname="127.0.0.1", port=free_port())
    await asyncio.to_thread(controller.start)
    yield Served(house, controller.port)
    await asyncio.to_thread(controller.stop)


async def test_a_message_streams_and_is_acknowledged_after_the_commit(served: Served) -> None:
    committing, go_on = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        committing.set()
        await go_on.wait()

    served.house.store.before_commit = wait
    sending = asyncio.ensure_future(served.send(LARGE, "zoe@example.net"))
    await committing.wait()
    assert not sending.done()
    go_on.set()
    code, text = await sending
    (stored,) = served.house.store.stored
    assert (code, text.decode()) == (250, f"2.0.0 OK queued as {stored.message.envelope.id}")
    assert stored.body.endswith(LARGE)
    assert stored.message.envelope.origin.helo == "client.test"


async def test_refusals_are_those_of_the_relay(served: Served) -> None:
    code, text = await served.send(LARGE * 2, "zoe@example.net")
    assert (code, text) == (552, b"5.3.4 Message exceeds 4 MB, the limit of this listener")
    code, text = await served.send(b"x", "a@example.net", "b@example.net", "c@example.net")
    assert (code, text[:6]) == (452, b"4.5.3 ")
    assert not served.house.store.stored
