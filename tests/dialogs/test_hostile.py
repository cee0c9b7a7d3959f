"""What somebody may try who reads the source: the account of memory, other people's turns, our own clocks."""

import asyncio
import base64
import tracemalloc
from typing import Any  # numbers of options

import pytest

from tests.support.event_log import EventLog
from tests.support.inbound import House, listening, talking
from tests.support.waiting import until
from zonerelay.config.settings import ListenerAuth, ListenerSettings, UnsafeListener
from zonerelay.inbound import policy
from zonerelay.inbound.access.auth import LoginKind, LoginResult
from zonerelay.inbound.limits import clients as errors
from zonerelay.inbound.limits.memory import FAST, LARGE
from zonerelay.inbound.state.context import SharedContext
from zonerelay.smtp.server.sasl import Credentials


async def nobody_left(house: House) -> None:
    await until(lambda: not house.listener._admission.sessions)
    await asyncio.sleep(0.01)


# Clocks: who does its part is not cut off, who does not is.


@pytest.mark.alone
async def test_the_octets_of_a_refused_chunk_are_not_idling() -> None:
    """Cut off, the client would not hear why it was refused, and come again with all of it."""
    async with talking(idle_timeout=0.2) as (house, talk):
        talk.send(b"BDAT 1000\r\n")
        for _ in range(10):
            talk.send(b"x" * 100)
            await asyncio.sleep(0.05)
        assert await talk.line() == b"503 5.5.1 Send MAIL first"
        assert house.log.reasons() == ["sequence"]
        await asyncio.sleep(0.1)
        assert await talk.ask(b"NOOP") == b"250 2.0.0 OK"


@pytest.mark.alone
@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        ({"idle_timeout": 0.2, "min_data_rate": 1_000_000}, "data-rate"),
        ({"transaction_timeout": 0.2}, "transaction-timeout"),
        ({"idle_timeout": 0.5}, "idle-timeout"),
    ],
)
async def test_a_refused_chunk_has_no_more_time_than_any(limits: dict[str, Any], reason: str) -> None:
    reasons: list[str] = []
    while reasons in ([], ["idle-timeout"]):  # on a busy machine the command itself may come too late
        async with talking(**limits) as (house, talk):
            talk.send(b"BDAT 100000\r\n")
            while house.listener.connections:
                talk.send(b"x")
                await asyncio.sleep(0.6 if reason == "idle-timeout" else 0.05)
            reasons = house.log.reasons()
            await talk.close()
    assert reasons == ["sequence", reason]


async def test_a_body_in_pieces_of_two_octets_takes_the_memory_that_is_accounted() -> None:
    async with talking() as (house, talk):
        await talk.begin()
        session = house.session
        # As the loop would hand them over, from a client that sends them slowly.
        session.data_received(b"Subject: x\r\n\r\n")
        tracemalloc.start()
        for number in range(30_000):
            session.data_received(b"%02d" % (number % 100))
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert 60_000 < house.listener.context.memory.used <= 64 * 1024
        assert taken < 2 * house.listener.context.memory.used


# Secrets: whatever goes wrong with a log-in, the password is nowhere.

PASSWORD = "hunter2-and-more"
RIGHT = base64.b64encode(b"\0app\0" + PASSWORD.encode())
WAYS = {
    "wrong": [b"AUTH PLAIN " + RIGHT],
    "in a line of its own": [b"AUTH PLAIN", RIGHT],
    "in two": [b"AUTH LOGIN", base64.b64encode(b"app"), base64.b64encode(PASSWORD.encode())],
    "as the name": [b"AUTH LOGIN", base64.b64encode(PASSWORD.encode()), base64.b64encode(PASSWORD.encode())],
    "in clear": [b"AUTH LOGIN", b"app", PASSWORD.encode()],
    "as a mechanism": [b"AUTH " + PASSWORD.encode()],
    "behind an unknown mechanism": [b"AUTH CRAM-MD5 " + RIGHT],
    "broken base64": [b"AUTH PLAIN " + RIGHT + b"!"],
    "cancelled": [b"AUTH PLAIN", b"*", RIGHT],
    "as a command": [RIGHT, PASSWORD.encode()],
    "as a name": [b"EHLO " + RIGHT],
    "too long": [b"AUTH PLAIN", RIGHT * 600],
    "with a bare LF": [b"AUTH PLAIN", RIGHT + b"\n"],
    "with a NUL": [b"AUTH PLAIN " + RIGHT + b"\0"],
    "not UTF-8": [b"AUTH PLAIN " + base64.b64encode(b"\0app\0" + PASSWORD.encode() + b"\xff")],
    "of somebody else": [b"AUTH PLAIN " + base64.b64encode(b"root\0app\0" + PASSWORD.encode())],
    "pipelined": [b"AUTH PLAIN " + RIGHT + b"\r\nNOOP"],
    "twice": [b"AUTH PLAIN " + RIGHT, b"AUTH PLAIN " + RIGHT],
}


class Failing:
    """Users in a backend that says too much when it fails."""

    async def check(self, credentials: Credentials, client_address: str, *_: object) -> LoginResult:
        raise RuntimeError(f"no connection for {credentials}")


class Nobody:
    async def check(self, credentials: Credentials, client_address: str, *_: object) -> LoginResult:
        return LoginResult(LoginKind.WRONG, detail="wrong password")


@pytest.mark.parametrize("users", [Failing(), Nobody(), None], ids=["trouble", "wrong", "none"])
@pytest.mark.parametrize("unsafe", [(), (UnsafeListener.CLEARTEXT_AUTH,)], ids=["needs TLS", "in clear"])
@pytest.mark.parametrize("lines", WAYS.values(), ids=WAYS)
async def test_a_password_is_in_no_log_and_in_no_reply(
    lines: list[bytes], unsafe: tuple[UnsafeListener, ...], users: Failing | Nobody | None
) -> None:
    shared = SharedContext(users=users)
    async with talking(auth=ListenerAuth.OPTIONAL, unsafe=unsafe, shared=shared) as (house, talk):
        said = await talk.ask(b"EHLO client")
        for line in lines:
            talk.send(line + b"\r\n")
            await asyncio.sleep(0.005)
        talk.send(b"QUIT\r\n")
        said += await talk.closed()
    shown = repr(house.log.entries) + said.decode()
    for secret in (PASSWORD, RIGHT.decode()):
        assert secret not in shown


# Turns of large bodies: nobody keeps one that does not use it.


async def test_a_client_that_is_being_closed_gives_its_turn_away() -> None:
    async with talking() as (house, talk):
        await talk.begin()
        session = house.session
        turns = house.listener.context.large_bodies
        session.data_received(b"Subject: x\r\n\r\n" + b"y" * LARGE)
        session.data_received(b"y" * FAST)
        assert session.intake in turns._heard
        session.shed()
        assert not turns._heard
        await talk.close()


async def test_a_client_that_does_not_take_replies_does_not_keep_its_turn() -> None:
    async with talking() as (house, talk):
        await talk.begin()
        session = house.session
        session.data_received(b"Subject: x\r\n\r\n" + b"y" * LARGE)
        session.data_received(b"y" * FAST)
        await until(lambda: session.intake is not None and session.intake.backlog == 0)
        session.pause_writing()
        assert session.transport.is_paused
        assert session.intake is not None
        assert not session.intake.held_up, "that is no reason of ours"
        await talk.close()


class Thoughtful:
    """A policy that takes its time over every recipient."""

    asked = frozenset({policy.Rcpt})

    async def ask(self, event: policy.Event) -> policy.Decision:
        await asyncio.sleep(0.06)
        return policy.ACCEPT


@pytest.mark.alone
@pytest.mark.parametrize("pipelined", [False, True])
async def test_the_time_that_a_policy_takes_is_not_the_client_s(pipelined: bool) -> None:
    async with talking(transaction_timeout=0.3, idle_timeout=0.3, policy=Thoughtful()) as (_, talk):
        await talk.ask(b"EHLO x")
        await talk.ask(b"MAIL FROM:<a@example.org>")
        lines = [b"RCPT TO:<b%d@example.com>" % number for number in range(10)]
        if pipelined:
            talk.send(b"\r\n".join(lines) + b"\r\n")
        for line in lines:
            reply = await talk.line() if pipelined else await talk.ask(line)
            assert reply == b"250 2.1.5 Recipient OK"
        await asyncio.sleep(0.1)
        assert (await talk.ask(b"DATA")).startswith(b"354 ")
        assert await talk.line() == b"421 4.4.2 Transaction took too long"


# Our own mistakes.


class LogThatBreaks(EventLog):
    def emit(self, level: str, event: str, fields: dict[str, object]) -> None:
        if event == "refused":
            raise ZeroDivisionError
        super().emit(level, event, fields)


async def test_octets_behind_a_bdat_that_we_fail_over_do_not_run_as_commands() -> None:
    log = LogThatBreaks()
    async with talking(log=log) as (_, talk):
        talk.send(b"BDAT 6 LAST\r\nVRFY x\r\n")
        assert await talk.closed() == b"451 4.3.0 Local error, try again later\r\n"
        assert len(log.named("trouble")) == 1


# The answers to what strangers do wrong come later and later.

STRANGERS = ListenerSettings(address="127.0.0.1:0", allow_networks=(), max_errors=1000)
GUESSES = b"".join(b"RCPT TO:<guess%d@example.com>\r\n" % number for number in range(errors.FREE + 5))


async def guess(house: House, replies: int) -> float:
    """Pipelined RCPTs that are refused; seconds that the answers took."""
    async with await house.connect() as talk:
        await talk.ask(b"EHLO client")
        await talk.ask(b"MAIL FROM:<a@example.org>")
        began = asyncio.get_running_loop().time()
        talk.send(GUESSES)
        for _ in range(replies):
            assert (await talk.reply()).startswith(b"550 5.7.1")
        return asyncio.get_running_loop().time() - began


async def test_refused_recipients_of_a_stranger_wait_longer_each_time_also_on_a_new_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(errors, "STEP", 0.02)
    async with listening(STRANGERS) as house:
        assert await guess(house, errors.FREE + 5) >= (1 + 2 + 3 + 4 + 5) * 0.02
        assert await guess(house, 3) >= (6 + 7 + 8) * 0.02
        assert house.log.reasons().count("relay") >= errors.FREE + 8


async def test_the_delay_of_one_stranger_holds_up_no_other_and_ends_the_session_where_it_has_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(errors, "STEP", 0.5)
    async with listening(STRANGERS, max_errors=errors.FREE + 1) as house:
        async with await house.connect() as slowed, await house.connect() as other:
            slowed.send(b"FOO\r\n" * (errors.FREE + 1))
            for _ in range(errors.FREE):
                assert await slowed.reply() == b"500 5.5.1 Command not recognized"
            last = asyncio.create_task(slowed.reply())
            assert (await other.ask(b"EHLO other")).startswith(b"250")
            assert not last.done()
            assert await last == b"421 4.7.0 Too many errors"
            assert await slowed.closed() == b""
        async with await house.connect() as leaving:
            leaving.send(b"FOO\r\n")
            await asyncio.sleep(0)
            leaving.reset()
        await nobody_left(house)


async def test_errors_of_clients_that_may_relay_have_no_delay() -> None:
    shared = SharedContext()
    async with talking(max_errors=1000, shared=shared) as (_, talk):
        talk.send(b"FOO\r\n" * 100)
        for _ in range(100):
            await talk.reply()
    assert len(shared.error_delays._clients) == 0
