"""Whatever clients do and wherever they stop: mail and memory are accounted for, and nothing is left."""

import asyncio
import base64
import ipaddress
import random

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.fuzz.visitors import Client, Crowd
from zonerelay.config import settings as options
from zonerelay.config.settings import BareLineEnds, ListenerAuth, ListenerSettings, ListenerTls
from zonerelay.inbound.state import replies

EVERYBODY = (ipaddress.ip_network("192.0.2.0/24"),)
NEAR, BALANCER, FAR = "192.0.2.1", "192.0.2.200", "198.51.100.1"
ROOMY, TIGHT = 1 << 30, 90_000

PLAIN = base64.b64encode(b"\0app\0secret")
TRANSACTION = b"MAIL FROM:<a@example.org>\r\nRCPT TO:<b@example.com>\r\n"
BODIES = [
    b"Subject: x\r\n\r\nbody\r\n.\r\n",
    b"Subject: x\r\n.\r\nRSET\r\n" + TRANSACTION,
    b"X-Old: y\r\n",
    b"z" * 70_000,
    b"\r\n" + b"z" * 150_000,
    b".\r\n",
    b"\r\n.\r\n",
    b"X: y\r\n" * 2000,
    b"\r\nbare\n.\r\n.\r\n" + b"NOOP\r\n" * 600,
]
CHUNKS = [
    b"BDAT 14 LAST\r\nSubject: x\r\n\r\n",
    b"BDAT 14\r\nSubject: x\r\n\r\nBDAT 0 LAST\r\n" + TRANSACTION,
    b"BDAT 5\r\nSubje",
    b"BDAT 0\r\n",
    b"BDAT 5 LAST\r\nct: x",
    b"BDAT 70000\r\n",
    b"BDAT 70000 LAST\r\n" + b"z" * 70_000,
    b"BDAT 9999999\r\n",
    b"RSET\r\n" + TRANSACTION + b"BDAT 3\r\nabc",
]
OTHERS = [
    b"EHLO x\r\n", b"HELO x\r\n", TRANSACTION, b"MAIL FROM:<a@example.org> HOLDFOR=60\r\n", b"DATA\r\n",
    b"RSET\r\n", b"NOOP\r\n", b"QUIT\r\n", b"STARTTLS\r\n", b"AUTH LOGIN\r\n", PLAIN + b"\r\n", b"*\r\n",
    b"XCLIENT ADDR=192.0.2.9 LOGIN=app\r\n", b"XCLIENT ADDR=198.51.100.9\r\n", b"XCLIENT NAME=x\r\n",
    b"\n", b"\r", b"x", b"NOOP\r\n" * 600, b"NOOP\r\n" * 11_000,
    TRANSACTION + b"RCPT TO:<c@example.com>\r\n" * 30,
    b"PROXY UNKNOWN\r\n", b"PROXY TCP4 192.0.2.8 192.0.2.1",
]  # fmt: skip

RARE = [
    "come", "reload", "raw", "any", "end-tls", "half-close", "block", "unblock", "drain", "lose",
    "abort", "late",
]  # fmt: skip
ACTIONS = [*["next"] * 60, *["turn"] * 6, *["turns"] * 6, *RARE]


def settings(dice: random.Random) -> ListenerSettings:
    return ListenerSettings(
        tls=dice.choice([ListenerTls.NONE, *ListenerTls]),
        require_tls=dice.random() < 0.2,
        auth=dice.choice([ListenerAuth.OFF, *ListenerAuth]),
        unsafe=dice.choice([(), *[(options.UnsafeListener.CLEARTEXT_AUTH,)] * 2]),
        allow_networks=dice.choice([EVERYBODY, EVERYBODY, EVERYBODY, ()]),
        proxy_networks=dice.choice([(), (ipaddress.ip_network("192.0.2.128/25"),)]),
        xclient_networks=dice.choice([(), EVERYBODY]),
        bare_line_ends=dice.choice(list(BareLineEnds)),
        max_message_size=dice.choice([5000, 300_000, 300_000]),
        max_header_size=4096,
        max_connections=dice.choice([2, 10]),
        max_connections_per_client=dice.choice([1, 10]),
        max_errors=dice.choice([3, 100]),
        max_commands=dice.choice([50, 100_000]),
    )


def what_is_next(client: Client, choice: int) -> bytes:
    """What a client that knows the protocol says now."""
    reply = client.said.rpartition(b"\r\n")[0].rpartition(b"\r\n")[2]
    grants, intake = client.session.conversation.client_state.grants, client.session.intake
    if not client.said:
        return b"PROXY TCP4 192.0.2.7 192.0.2.1 4711 25\r\n" if client.wire.address == BALANCER else b""
    if reply.startswith(b"354") or (intake is not None and not intake.chunk_done):
        return BODIES[choice % len(BODIES)]
    if reply.startswith(b"334"):
        return PLAIN + b"\r\n"
    if reply.startswith(b"220") or not client.session.conversation.client_state.helo:
        return b"EHLO x\r\n"
    if intake is not None or reply.endswith(b"Recipient OK"):
        return b"DATA\r\n" if choice % 2 else CHUNKS[choice // 2 % len(CHUNKS)]
    if replies.STARTTLS in grants.offer and (grants.must_start_tls or choice % 2):
        return b"STARTTLS\r\n"
    if replies.AUTH in grants.offer and not grants.may_relay:
        return b"AUTH PLAIN " + PLAIN + b"\r\n"
    return TRANSACTION


async def act(client: Client, action: str, choice: int) -> None:
    session = client.session
    packet = OTHERS[choice % len(OTHERS)]
    if action == "next" and client.wants_tls:
        await client.shake()
    elif action == "next":
        await client.send(what_is_next(client, choice))
    elif action == "any":
        await client.send(packet)
    elif action == "raw":
        await client.send_raw(packet)
    elif action == "end-tls":
        await client.send_raw(client.end_tls())
    elif action in ("turn", "turns"):
        for _ in range(1 if action == "turn" else 8):
            await asyncio.sleep(0)
    elif action == "half-close":
        client.half_close()
    elif action in ("block", "unblock") and not client.lost:
        session.pause_writing() if action == "block" else session.resume_writing()
    elif action == "drain":
        session.drain()
    elif action == "abort":
        session.abort()
    elif action == "late":
        client.run_out_of_time()
    elif action == "lose":
        client.lose()


async def play(seed: int) -> Crowd:
    dice = random.Random(seed)
    crowd = Crowd(settings(dice), dice, memory=dice.choice([ROOMY, ROOMY, TIGHT]), asks=dice.random() < 0.5)
    crowd.come(dice.choice([NEAR, NEAR, BALANCER, FAR]))
    for _ in range(dice.randrange(20, 120)):
        action = dice.choice(ACTIONS)
        if action == "reload":
            crowd.reload(settings(dice), asks=dice.random() < 0.5)
        elif action == "come":
            crowd.come(dice.choice([NEAR, BALANCER, FAR]))
        else:
            await act(dice.choice(crowd.clients), action, dice.randrange(1 << 16))
        for client in crowd.clients:
            client.listen()
        crowd.check()
    await crowd.over()
    return crowd


@hypothesis_settings(max_examples=80, deadline=None)
@given(st.integers(0, 1 << 32))
def test_nothing_is_left_of_anybody(seed: int) -> None:
    asyncio.run(play(seed))


MET = {"memory", "client-left", "policy", "proxy", "relay", "size", "shutdown", "idle-timeout"}


@pytest.mark.proof
def test_such_clients_come_everywhere() -> None:
    """Dice that never lead into a message would prove nothing."""
    crowds = [asyncio.run(play(seed)) for seed in range(200)]
    reasons = {reason for crowd in crowds for reason in crowd.log.reasons()}
    assert not MET - reasons
    assert sum(bool(crowd.store.stored) for crowd in crowds) > 20
    assert any(client.session.transport.secured for crowd in crowds for client in crowd.clients)
    assert any(crowd.log.named("reply-lost") for crowd in crowds)
