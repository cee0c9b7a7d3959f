"""Every way to cut an input that an incremental parser is fed with: whole, halves, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator


def cuts(data: bytes, *, but: int = 0) -> Iterator[list[bytes]]:
    """Whole; every pair of halves, but for cuts in the last octets; byte by byte."""
    yield [data]
    for at in range(1, len(data) - but):
        yield [data[:at], data[at:]]
    yield [data[i : i + 1] for i in range(len(data))]
