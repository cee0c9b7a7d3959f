"""Every way to cut an input that an incremental parser is fed with: whole, halves, byte by byte."""

from __future__ import annotations

from collections.abc import Iterator


def cuts(data: bytes) -> Iterator[list[bytes]]:
    """Whole; every pair of halves; byte by byte."""
    yield [data]
    for at in range(1, len(data)):
        yield [data[:at], data[at:]]
    yield [data[i : i + 1] for i in range(len(data))]
