"""Any bytes, in any packets: well-formed replies in order, no trouble, no 5xx by mistake, bounded memory."""

from __future__ import annotations

import asyncio
import re

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.inbound import EventLog, RememberingStore, is_well_formed, one_zone
from zonerelay.config.models import ListenerSettings
from zonerelay.inbound.access import Client
from zonerelay.inbound.answers import Answer
from zonerelay.inbound.reception import Reception
from zonerelay.inbound.session import Session
from zonerelay.model.clock import ManualClock
from zonerelay.model.message_id import MessageIdSource
from zonerelay.telemetry.events import Events
from zonerelay.telemetry.metrics import Metrics
from zonerelay.telemetry.redact import Redactor

METRICS = Metrics()

SYNCHRONISING = [b"EHLO x\r\n", b"HELO x\r\n", b"DATA\r\n"]
OTHERS = [
    b"MAIL FROM:<a@example.org>\r\n", b"MAIL FROM:<> SIZE=10\r\n", b"MAIL FROM:<\xc3\xa9@x> SMTPUTF8\r\n",
    b"RCPT TO:<b@example.com>\r\n", b"RCPT TO:<postmaster>\r\n", b"RSET\r\n", b"NOOP\r\n", b"QUIT\r\n",
    b"VRFY x\r\n", b"STARTTLS\r\n", b"AUTH PLAIN\r\n", b"BDAT 3 LAST\r\n", b"GET / HTTP/1.1\r\n",
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


class Wire:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.out = bytearray()
        self.closed = False

    def get_extra_info(self, name: str) -> object:
        return ("192.0.2.1", 4711)

    def write(self, data: bytes) -> None:
        assert not self.closed, "nothing is said after closing"
        self.out += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        return

    resume_reading = pause_reading


class Doorman:
    """The listener's part: lets everybody in."""

    def __init__(self) -> None:
        self.forgotten = False

    def welcome(self, session: Session, peer: object) -> tuple[Client, Answer | None]:
        return Client("192.0.2.1", 4711, may_relay=True), None

    def farewell(self, client: Client) -> None:
        return

    def forget(self, session: Session) -> None:
        self.forgotten = True


async def converse(
    packets: list[bytes], *, settings: ListenerSettings
) -> tuple[Wire, EventLog, RememberingStore]:
    clock, log, store = ManualClock(), EventLog(), RememberingStore()
    reception = Reception(
        settings=settings,
        hostname="relay.example.org",
        store=store.as_store(),
        ids=MessageIdSource(clock),
        choose_zone=one_zone,
        notify=lambda zone: None,
        events=Events(log, METRICS, Redactor(b"k" * 32, enabled=True), clock),
        clock=clock,
    )
    wire, doorman = Wire(), Doorman()
    session = Session(reception, doorman, asyncio.get_running_loop())
    session.connection_made(wire)  # type: ignore[arg-type]  # the methods that the session uses
    for packet in packets:
        if wire.closed:
            break
        if packet:
            session.data_received(packet)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    for _ in range(5):
        await asyncio.sleep(0)
    assert session._lines.waiting <= 600
    session.connection_lost(None)
    for _ in range(5):
        await asyncio.sleep(0)
    assert doorman.forgotten, "nothing of a session is left when it is over"
    return wire, log, store


SMALL = ListenerSettings(
    max_message_size=2000, max_header_size=1000, max_received=3, max_errors=10, max_recipients=2
)


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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


@settings(max_examples=100, deadline=None)
@given(opening=OPENING, packets=ORDERLY_PACKETS)
def test_packet_borders_mean_nothing_but_to_synchronising_commands(
    opening: list[bytes], packets: list[bytes]
) -> None:
    """The same bytes one by one are the same conversation, unless they ran ahead of a reply."""
    together, log, _ = asyncio.run(converse([*opening, *packets], settings=SMALL))
    if "pipelining" in log.reasons() or "other-protocol" in log.reasons():
        return
    single = [bytes([octet]) for packet in [*opening, *packets] for octet in packet]
    alone, _, _ = asyncio.run(converse(single, settings=SMALL))
    assert alone.out == together.out
