"""Any bytes, in any packets: well-formed replies in order, no trouble, no 5xx by mistake, bounded memory.

Whoever has to be asked is asked one turn of the loop later: that changes when a reply comes, never which.
"""

from __future__ import annotations

import asyncio
import base64
import re
import sys

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.fuzz.wire import Wire
from tests.support.inbound import EventLog, RememberingStore, is_well_formed, one_zone
from zonerelay.config.credentials.file import User
from zonerelay.config.settings import ListenerAuth, ListenerSettings, UnsafeListener
from zonerelay.inbound.access.auth import LoginKind, LoginResult
from zonerelay.inbound.access.networks import AccessRules, Client
from zonerelay.inbound.limits.memory import SessionMemory
from zonerelay.inbound.policy import ACCEPT, EVENTS, Decision, Event
from zonerelay.inbound.session.admission import Admission
from zonerelay.inbound.session.session import Session
from zonerelay.inbound.state.context import ListenerContext
from zonerelay.inbound.state.questions import Consultants
from zonerelay.inbound.state.replies import ServerReply
from zonerelay.model.clock import ManualClock
from zonerelay.model.message_id import MessageIdSource
from zonerelay.smtp.server.commands import MAX_LINE
from zonerelay.smtp.server.sasl import Credentials
from zonerelay.telemetry.events.events import Events
from zonerelay.telemetry.logs.redact import Redactor
from zonerelay.telemetry.metrics.metrics import Metrics

METRICS = Metrics()

RIGHT = base64.b64encode(b"\0a\0right")
SYNCHRONISING = [
    b"EHLO x\r\n",
    b"HELO x\r\n",
    b"DATA\r\n",
    b"AUTH PLAIN\r\n",
    b"AUTH PLAIN " + RIGHT + b"\r\n",
    b"AUTH LOGIN\r\n",
]
OTHERS = [
    b"MAIL FROM:<a@example.org>\r\n", b"MAIL FROM:<> SIZE=10\r\n", b"MAIL FROM:<\xc3\xa9@x> SMTPUTF8\r\n",
    b"RCPT TO:<b@example.com>\r\n", b"RCPT TO:<postmaster>\r\n", b"RSET\r\n", b"NOOP\r\n", b"QUIT\r\n",
    b"VRFY x\r\n", b"STARTTLS\r\n", b"XCLIENT NAME=x\r\n", b"GET / HTTP/1.1\r\n", b"BDAT x\r\n",
    b"BDAT 0\r\n", b"BDAT 3\r\n", b"BDAT 12 LAST\r\n", b"BDAT 0 LAST\r\n", b"BDAT 1500\r\n",
    b"BDAT 99999\r\n", b"*\r\n", b"YQ==\r\n", RIGHT + b"\r\n",
    b"Subject: x\r\n", b"Received: x\r\n" * 4, b" continued\r\n", b"\r\n", b".\r\n", b"..\r\n", b".", b"\r",
    b"\n", b"\n.\n", b"\r\n.\r\n", b"\x00", b"\xff", b"x" * 3000, b"\x16\x03\x01",
]  # fmt: skip


def in_packets(pieces: list[bytes]) -> st.SearchStrategy[bytes]:
    return st.one_of(
        st.sampled_from(pieces),
        st.lists(st.sampled_from(pieces), max_size=4).map(b"".join),
        st.binary(max_size=40),
    )


PACKETS = st.lists(in_packets(SYNCHRONISING + OTHERS), max_size=30)
# Synchronising commands alone in their packets, as clients should send them.
ORDERLY_PACKETS = st.lists(st.one_of(in_packets(OTHERS), st.sampled_from(SYNCHRONISING)), max_size=30)
OPENING = st.sampled_from([
    [],
    [b"EHLO x\r\n"],
    [b"EHLO x\r\n", b"MAIL FROM:<a@example.org>\r\nRCPT TO:<b@example.com>\r\nDATA\r\n"],
])  # fmt: skip


class Doorman(Admission[Session]):
    """Admits every connection, and trusts it."""

    def welcome(self, session: Session, peer: object) -> tuple[Client, ServerReply | None]:
        self.sessions.add(session)
        return Client("192.0.2.1", 4711, may_relay=True), None

    def readmit(self, client: Client, address: str, port: int) -> tuple[Client, ServerReply | None]:
        return client, None

    def farewell(self, session: Session, client: Client) -> None:
        return


class Everybody:
    """Users who need a moment: the password is `right`."""

    async def check(self, credentials: Credentials, client_address: str, *_: object) -> LoginResult:
        await asyncio.sleep(0)
        if credentials.password != "right":
            return LoginResult(LoginKind.WRONG)
        return LoginResult(LoginKind.OK, User(credentials.user, "", ()))


class Slowly:
    """A policy that wants to know everything and has nothing against anything."""

    asked = frozenset(EVENTS)

    async def ask(self, event: Event) -> Decision:
        await asyncio.sleep(0)
        return ACCEPT


async def converse(
    packets: list[bytes], *, settings: ListenerSettings, policy: Slowly | None = None
) -> tuple[Wire, EventLog, RememberingStore]:
    clock, log, store = ManualClock(), EventLog(), RememberingStore()
    events = Events(log, METRICS, Redactor(b"k" * 32, enabled=True), clock)
    memory = SessionMemory(sys.maxsize)
    context = ListenerContext(
        settings=settings,
        hostname="relay.example.org",
        store=store.as_store(),
        ids=MessageIdSource(clock),
        choose_zone=one_zone,
        events=events,
        clock=clock,
        consultants=Consultants(events=events, users=Everybody(), policy=policy),
        memory=memory,
        access=AccessRules(()),
    )
    wire, doorman = Wire(), Doorman(settings, memory=memory, metrics=METRICS)
    session = Session(context, doorman, asyncio.get_running_loop())
    session.connection_made(wire)  # type: ignore[arg-type]  # the methods that the session uses
    await settled(session)
    for packet in packets:
        if wire.closed:
            break
        if packet:
            session.data_received(packet)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    await settled(session)
    assert session.lines.waiting <= MAX_LINE
    session.connection_lost(None)
    await settled(session)
    assert not doorman.sessions, "nothing of a session is left when it is over"
    assert memory.used == 0, "nor in the account of memory"
    return wire, log, store


async def settled(session: Session) -> None:
    """Everything has been answered that can be."""
    for _ in range(5):
        await asyncio.sleep(0)
    while session._asking or session.waits_for_store:
        await asyncio.sleep(0)


SMALL = ListenerSettings(
    max_message_size=2000,
    max_header_size=1000,
    max_received=3,
    max_errors=10,
    max_recipients=2,
    auth=ListenerAuth.OPTIONAL,
    unsafe=(UnsafeListener.CLEARTEXT_AUTH,),
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(opening=OPENING, packets=PACKETS)
def test_any_bytes_get_well_formed_replies(opening: list[bytes], packets: list[bytes]) -> None:
    wire, log, store = asyncio.run(converse([*opening, *packets], settings=SMALL))
    assert log.named("trouble") == []
    assert wire.out.endswith(b"\r\n")
    lines = bytes(wire.out).split(b"\r\n")[:-1]
    assert all(is_well_formed(line) for line in lines), lines
    assert len(store.stored) == len(re.findall(rb"queued as", wire.out))
    for stored in store.stored:
        plain = stored.body.replace(b"\r\n", b"")
        assert b"\r" not in plain
        assert b"\n" not in plain
        assert len(stored.body) < SMALL.max_message_size + 1000
        assert stored.deliveries
    assert store.begun == store.aborted + len(store.stored)


@settings(max_examples=40, deadline=None)
@given(opening=OPENING, packets=ORDERLY_PACKETS)
@example(opening=[], packets=[b"\r\n\r\n\x00\r\nQUIT\n"])
def test_packet_borders_mean_nothing_but_to_synchronising_commands(
    opening: list[bytes], packets: list[bytes]
) -> None:
    """The same bytes one by one are the same conversation, unless they ran ahead of a reply."""
    together, log, _ = asyncio.run(converse([*opening, *packets], settings=SMALL))
    # Other protocols, PROXY headers among them, are known by the first packet.
    if {"pipelining", "other-protocol", "proxy"} & set(log.reasons()):
        return
    single = [bytes([octet]) for packet in [*opening, *packets] for octet in packet]
    alone, _, _ = asyncio.run(converse(single, settings=SMALL))
    assert alone.out == together.out


@settings(max_examples=40, deadline=None)
@given(opening=OPENING, packets=PACKETS)
def test_who_has_to_be_asked_changes_when_a_reply_comes_and_nothing_else(
    opening: list[bytes], packets: list[bytes]
) -> None:
    unasked, _, _ = asyncio.run(converse([*opening, *packets], settings=SMALL))
    asked, log, store = asyncio.run(converse([*opening, *packets], settings=SMALL, policy=Slowly()))
    assert log.named("trouble") == []
    assert store.begun == store.aborted + len(store.stored)
    if "pipelining" not in log.reasons():
        assert asked.out == unasked.out
