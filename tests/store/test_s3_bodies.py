"""Bodies in a bucket: behind their heads, in objects of their own, and in parts."""

from __future__ import annotations

import pytest

from tests.store.builders import delivery_for, envelope_for, message_id
from zonerelay.store.contract import CHUNK_SIZE, Store
from zonerelay.store.s3.records import INLINE_LIMIT
from zonerelay.store.s3.uploads import PART

SIZES = [
    0,
    1,
    *(edge + more for edge in (CHUNK_SIZE, INLINE_LIMIT, PART) for more in (-1, 0, 1)),
    2 * PART + 7,
]


@pytest.mark.parametrize("store", ["s3"], indirect=True)
async def test_body_of_any_size_is_byte_exact_however_it_is_stored(store: Store) -> None:
    for number, size in enumerate(SIZES, 1):
        body = (bytes(range(251)) * (size // 251 + 1))[:size]
        piece = 977 if size <= CHUNK_SIZE + 1 else 3 * CHUNK_SIZE + 1
        envelope = envelope_for(message_id(number), "a@example.net")
        async with store.begin(envelope) as writer:
            for start in range(0, size, piece):
                await writer.write(body[start : start + piece])
            message = await writer.commit([delivery_for(envelope, "a@example.net")])
        assert message.size == size
        for _ in range(2):  # as it is remembered, and as it is in the bucket
            chunks = [chunk async for chunk in store.read_body(envelope.id)]
            assert b"".join(chunks) == body, size
            assert all(0 < len(chunk) <= CHUNK_SIZE for chunk in chunks)
            assert len(chunks) == message.chunks
            store._mine.bodies.clear()  # type: ignore[attr-defined]  # as after a while
