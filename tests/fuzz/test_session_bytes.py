"""Any bytes, in any packets: well-formed replies in order, no trouble, no 5xx by mistake, bounded memory.

Whoever has to be asked is asked one turn of the loop later: that changes when a reply comes, never which.
"""

import asyncio
import base64

from hypothesis import HealthCheck, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.fuzz.conversation import Conversation, converse
from tests.fuzz.targets.sessions import PACKET_END, session, settings
from zonerelay.inbound.policy import ACCEPT, EVENTS, Decision, Event

RIGHT = base64.b64encode(b"\0a\0secret")
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


class Slowly:
    """A policy that wants to know everything and has nothing against anything."""

    asked = frozenset(EVENTS)

    async def ask(self, event: Event) -> Decision:
        await asyncio.sleep(0)
        return ACCEPT


def conversation(packets: list[bytes], policy: Slowly | None = None) -> Conversation:
    return asyncio.run(converse(packets, settings=settings(frozenset({"may-auth"})), policy=policy, turns=2))


@hypothesis_settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(opening=OPENING, packets=PACKETS)
def test_any_bytes_get_the_replies_that_they_are_owed(opening: list[bytes], packets: list[bytes]) -> None:
    session(b"may-auth hasty\n" + PACKET_END.join([*opening, *packets]))


@hypothesis_settings(max_examples=40, deadline=None)
@given(opening=OPENING, packets=ORDERLY_PACKETS)
@example(opening=[], packets=[b"\r\n\r\n\x00\r\nQUIT\n"])
def test_packet_borders_mean_nothing_to_most_commands(opening: list[bytes], packets: list[bytes]) -> None:
    """The same bytes one by one are the same conversation, unless they ran ahead of a reply."""
    together = conversation([*opening, *packets])
    # Other protocols, PROXY headers among them, are known by the first packet.
    if {"pipelining", "other-protocol", "proxy"} & set(together.log.reasons()):
        return
    single = [bytes([octet]) for packet in [*opening, *packets] for octet in packet]
    apart = conversation(single)
    assert apart.out == together.out
    assert [each.body for each in apart.store.stored] == [each.body for each in together.store.stored]


@hypothesis_settings(max_examples=40, deadline=None)
@given(opening=OPENING, packets=PACKETS)
def test_who_is_asked_changes_when_a_reply_comes_only(opening: list[bytes], packets: list[bytes]) -> None:
    unasked = conversation([*opening, *packets])
    asked = conversation([*opening, *packets], Slowly())
    assert asked.log.named("trouble") == []
    assert asked.store.begun == asked.store.aborted + len(asked.store.stored)
    if "pipelining" not in asked.log.reasons():
        assert asked.out == unasked.out
