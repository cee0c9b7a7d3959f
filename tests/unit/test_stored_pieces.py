"""The header of a stored body, its hash and its octets: the same however it is cut into pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import pytest

from tests.support.feeding import cuts
from zonerelay.delivery.rewrite.rendering import StoredPieces
from zonerelay.message.dkim.signature import RelaxedBody
from zonerelay.store.contract import StoreError

LIMIT = 10_000


@dataclass
class Store:
    pieces: Sequence[bytes]
    fails: bool = False
    open_now: int = 0

    async def read(self) -> AsyncIterator[bytes]:
        self.open_now += 1
        try:
            for piece in self.pieces:
                yield piece
            if self.fails:
                raise StoreError("the disk is gone")
        finally:
            self.open_now -= 1


ROWS = [
    (b"A: b\r\nC: d\r\n\r\nbody\r\n", b"A: b\r\nC: d\r\n", b"body\r\n", "usual"),
    (b"A: b\r\n\r\n", b"A: b\r\n", b"", "no body"),
    (b"A: b\r\n", b"A: b\r\n", b"", "no empty line"),
    (b"A: b", b"A: b", b"", "no line end"),
    (b"A: b\r\n\r\n\r\n x \r\n\r\n", b"A: b\r\n", b"\r\n x \r\n\r\n", "empty lines around the body"),
    (b"\r\nbody\r\n", b"", b"body\r\n", "no header"),
    (b"", b"", b"", "nothing"),
    (b"A: b\r\n\r\nx", b"A: b\r\n", b"x", "a body of one octet"),
]


@pytest.mark.parametrize(("stored", "header", "body", "reason"), ROWS, ids=[row[3] for row in ROWS])
async def test_the_header_ends_at_the_empty_line(
    stored: bytes, header: bytes, body: bytes, reason: str
) -> None:
    relaxed = RelaxedBody()
    relaxed.feed(body)
    for cut in cuts(stored) if stored else [[]]:
        store = Store(cut)
        pieces = StoredPieces(store.read())
        assert await pieces.header(LIMIT) == header, reason
        assert await pieces.body_hash() == relaxed.digest(), reason
        await pieces.close()
        assert store.open_now == 0


@pytest.mark.parametrize("new", [b"", b"New: header\r\n", b"N"])
@pytest.mark.parametrize(("stored", "header", "body", "reason"), ROWS, ids=[row[3] for row in ROWS])
async def test_the_new_header_takes_the_place_of_the_old_one(
    stored: bytes, header: bytes, body: bytes, reason: str, new: bytes
) -> None:
    for cut in cuts(stored) if stored else [[]]:
        for looked in (True, False):
            store = Store(cut)
            pieces = StoredPieces(store.read())
            if looked:
                await pieces.header(LIMIT)
            sent = [piece async for piece in pieces.spliced(new, len(header))]
            assert b"".join(sent) == new + stored[len(header) :], reason
            assert all(sent), "an empty piece would be the end"
            assert store.open_now == 0


async def test_a_body_in_one_piece_stays_in_one_piece() -> None:
    pieces = StoredPieces(Store([b"A: b\r\n\r\nbody\r\n"]).read())
    assert await pieces.header(LIMIT) == b"A: b\r\n"
    await pieces.body_hash()
    assert pieces.intact
    assert [piece async for piece in pieces.spliced(b"X: y\r\n", 6)] == [b"X: y\r\n\r\nbody\r\n"]


async def test_hashing_a_long_body_uses_it_up() -> None:
    pieces = StoredPieces(Store([b"A: b\r\n\r\nbo", b"dy\r\n"]).read())
    await pieces.header(LIMIT)
    assert pieces.intact
    await pieces.body_hash()
    assert not pieces.intact


async def test_a_header_that_does_not_end_is_given_up_within_the_limit() -> None:
    endless = [b"A: b\r\n" * 100] * 1000
    store = Store(endless)
    pieces = StoredPieces(store.read())
    assert await pieces.header(LIMIT) is None
    sent = [piece async for piece in pieces.spliced(b"", 0)]
    assert sent == endless
    assert store.open_now == 0


async def test_what_the_store_raises_is_raised_and_nothing_stays_open() -> None:
    store = Store([b"A: b\r\n"], fails=True)
    pieces = StoredPieces(store.read())
    with pytest.raises(StoreError):
        await pieces.header(LIMIT)
    store = Store([b"A: b\r\n\r\n"], fails=True)
    pieces = StoredPieces(store.read())
    await pieces.header(LIMIT)
    with pytest.raises(StoreError):
        assert [piece async for piece in pieces.spliced(b"", 0)] == [b"never"]
    assert store.open_now == 0


async def test_whoever_stops_in_the_middle_leaves_nothing_open() -> None:
    store = Store([b"A: b\r\n\r\n", b"one", b"two"])
    pieces = StoredPieces(store.read())
    await pieces.header(LIMIT)
    sending = pieces.spliced(b"", 0)
    await anext(sending)
    assert store.open_now == 1
    await sending.aclose()
    assert store.open_now == 0
