"""Ways to cut an input that an incremental parser is fed with, and cuts as a network might make them."""

import random
import zlib
from collections.abc import Iterator

SHORT = 512  # longer inputs are not fed octet by octet: a fuzzer wants thousands of runs a second


def cuts(data: bytes, *, but: int = 0) -> Iterator[list[bytes]]:
    """Whole; every pair of halves, but for cuts in the last octets; byte by byte."""
    yield [data]
    for at in range(1, len(data) - but):
        yield [data[:at], data[at:]]
    yield [data[i : i + 1] for i in range(len(data))]


def cuttings(data: bytes) -> Iterator[list[bytes]]:
    """Whole, in pieces that the input itself decides, and octet by octet if it is short."""
    yield [data]
    yield in_pieces(data)
    if len(data) <= SHORT:
        yield [data[at : at + 1] for at in range(len(data))]


def in_pieces(data: bytes) -> list[bytes]:
    chance = random.Random(zlib.crc32(data))
    pieces, at = [], 0
    while at < len(data):
        size = chance.choice((1, 2, 3, 5, 17, 300))
        pieces.append(data[at : at + size])
        at += size
    return pieces
