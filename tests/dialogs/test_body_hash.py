"""Bodies over real connections: their hash however they come, and smuggling."""

import base64
import hashlib
import random
import re
from pathlib import Path

import pytest
from dkim.canonicalization import Relaxed

from tests.data.smuggling import END_OF_DATA, SEQUENCES, SMUGGLED, bodies
from tests.dialogs.staging import Step, staged
from tests.support.feeding import cuts
from tests.support.inbound import House, Stored, Talk, talking
from zonerelay.config.settings import BareLineEnds
from zonerelay.inbound.state.context import SharedContext

HASHING = SharedContext(hash_bodies=True)

SHORT = [
    b"A: b\r\nBcc: c\r\n\r\n.x  y\r\n\r\n",
    b"no header\r\n\r\nmore\r\n",
    b"\r\nbody \r\n",
    b"A: b\r\n",
    b"Bcc: c\r\n\r\nbody\r\n",
]


def hash_of(stored: Stored) -> str:
    """By dkimpy's canonicalization, of what is on disk."""
    body = Relaxed.canonicalize_body(stored.body.partition(b"\r\n\r\n")[2])
    return base64.b64encode(hashlib.sha256(body).digest()).decode()


async def by_data(house: House, talk: Talk, pieces: list[bytes]) -> Stored:
    await talk.begin()
    for piece in pieces:
        talk.send(piece)
        await talk.writer.drain()
    assert (await talk.reply()).startswith(b"250")
    return house.store.stored[-1]


async def by_chunks(house: House, talk: Talk, pieces: list[bytes]) -> Stored:
    await talk.address()
    for piece in pieces:
        talk.send(b"BDAT %d\r\n" % len(piece) + piece)
    talk.send(b"BDAT 0 LAST\r\n")
    for _ in (*pieces, "LAST"):
        assert (await talk.reply()).startswith(b"250")
    return house.store.stored[-1]


def on_the_wire(message: bytes) -> bytes:
    return message.replace(b"\r\n.", b"\r\n..") + b".\r\n"


@pytest.mark.parametrize("message", SHORT)
async def test_short_messages_in_every_way(message: bytes) -> None:
    async with talking(shared=HASHING) as (house, talk):
        await talk.ask(b"EHLO client.example.org")
        for pieces in cuts(message):
            stored = await by_chunks(house, talk, pieces)
            assert stored.message.body_hash == hash_of(stored), pieces
        for pieces in cuts(on_the_wire(message)):
            stored = await by_data(house, talk, pieces)
            assert stored.message.body_hash == hash_of(stored), pieces


async def test_a_large_message_with_line_ends_of_all_kinds() -> None:
    chance = random.Random(4)
    words = [b" ", b"\t", b"x" * 50, b"\r\n", b"\n", b"\r", b"\r\n\r\n\r\n", b".", b"\xc3\xa9", b"word"]
    message = b"Subject: x\r\n\r\n" + b"".join(chance.choices(words, k=60_000)) + b"\r\n"
    at = sorted(chance.choices(range(len(message)), k=40))
    pieces = [message[a:b] for a, b in zip([0, *at], [*at, len(message)], strict=True)]
    async with talking(shared=HASHING) as (house, talk):
        await talk.ask(b"EHLO client.example.org")
        stored = await by_chunks(house, talk, pieces)
        assert stored.message.body_hash == hash_of(stored)
        assert stored.message.size > 300_000


async def test_a_policy_that_thinks_about_the_header_and_edits_it_changes_nothing(tmp_path: Path) -> None:
    steps = [Step(1, "policy", "headers = accept(add=[('X-A', 'b')], remove=['A'])")]
    async with staged(steps, tmp_path, hash_bodies=True) as house, await house.connect() as talk:
        await talk.ask(b"EHLO client.example.org")
        for message in SHORT:
            stored = await by_chunks(house, talk, [message[:-3], message[-3:]])
            assert stored.message.body_hash == hash_of(stored), message


async def test_nobody_computes_it_when_nothing_is_signed() -> None:
    async with talking() as (house, talk):
        await talk.ask(b"EHLO client.example.org")
        assert (await by_chunks(house, talk, [b"A: b\r\n\r\nc\r\n"])).message.body_hash == ""


# Every public SMTP smuggling sequence over a real connection: one message, one answer


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
