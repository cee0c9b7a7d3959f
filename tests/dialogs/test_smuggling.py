"""Every public SMTP smuggling sequence over a real connection: one message, one answer."""

from __future__ import annotations

import re

from tests.data.smuggling import END_OF_DATA, SEQUENCES, SMUGGLED, bodies
from tests.support.inbound import House, Talk, talking
from zonerelay.config.settings import BareLineEnds

BARE = re.compile(rb"\r(?!\n)|(?<!\r)\n")


async def send(talk: Talk, body: bytes) -> bytes:
    """The answer to it; another answer in between would be the one to NOOP."""
    await talk.begin()
    talk.send(body + b".\r\n")
    answer = await talk.reply()
    assert await talk.ask(b"NOOP") == b"250 2.0.0 OK"
    return answer


def check_last(house: House, sequence: bytes) -> None:
    stored = house.store.stored[-1]
    assert stored.message.envelope.sender == "a@example.org", sequence
    assert [delivery.recipient for delivery in stored.deliveries] == ["b@example.com"], sequence
    assert b"evil@example.org" in stored.body, sequence
    assert not BARE.search(stored.body), sequence


async def test_no_sequence_makes_a_second_message() -> None:
    async with talking() as (house, talk):
        await talk.ask(b"EHLO client.example.org")
        sent = 0
        for sequence in SEQUENCES:
            for body in bodies(sequence):
                sent += 1
                assert (await send(talk, body)).startswith(b"250 2.0.0 OK queued"), sequence
                assert len(house.store.stored) == sent, sequence
                check_last(house, sequence)


async def test_whoever_rejects_bare_line_ends_takes_none_of_these_messages() -> None:
    async with talking(bare_line_ends=BareLineEnds.REJECT, max_errors=100_000) as (house, talk):
        await talk.ask(b"EHLO client.example.org")
        accepted = 0
        for sequence in SEQUENCES:
            answer = await send(talk, b"Subject: x\r\n\r\nfirst" + sequence + SMUGGLED)
            bare = bool(BARE.search(sequence + SMUGGLED))
            assert answer.startswith(b"550 5.6.0 " if bare else b"250 2.0.0 "), sequence
            accepted += not bare
            assert len(house.store.stored) == accepted, sequence


async def test_no_sequence_ends_a_chunk() -> None:
    async with talking() as (house, talk):
        await talk.ask(b"EHLO client.example.org")
        for number, sequence in enumerate([*SEQUENCES, END_OF_DATA], 1):
            body = b"Subject: x\r\n\r\nfirst" + sequence + SMUGGLED
            half = body.index(b"first") + len(b"first") + len(sequence) // 2
            await talk.address()
            first, last = body[:half], body[half:]
            talk.send(b"BDAT %d\r\n%b" % (len(first), first))
            assert (await talk.reply()).startswith(b"250 2.0.0 "), sequence
            talk.send(b"BDAT %d LAST\r\n%b" % (len(last), last))
            assert (await talk.reply()).startswith(b"250 2.0.0 OK queued"), sequence
            assert await talk.ask(b"NOOP") == b"250 2.0.0 OK", sequence
            assert len(house.store.stored) == number, sequence
            check_last(house, sequence)
