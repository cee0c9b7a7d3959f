"""A DNS server for the crowd that costs next to nothing: its answers are octets before anybody asks.

The tests' server (`tests/support/dns.py`) reads each question with dnspython, at several times the cost of a
relay's side of it. Beside a relay that asks two questions for each of 10,000 domains it would be the larger
part of what is measured.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Mapping
from typing import cast

from tests.support.dns import DEFAULT_TTL, Records

_HEADER = struct.Struct("!HHHHHH")
_QUESTION_TAIL = struct.Struct("!HH")
_RECORD = struct.Struct("!HHHIH")
_TO_THE_QUESTION = 0xC00C
_IN = 1
_CODES = {"A": 1, "MX": 15, "AAAA": 28}
_ANSWER, _NO_SUCH_NAME = 0x8180, 0x8183


class NameServer(asyncio.DatagramProtocol):
    """Answers questions for MX, A and AAAA over UDP. A name that has nothing of a type has no data."""

    def __init__(self, names: Mapping[str, Records]) -> None:
        self._names = {_wire(name) for name in names}
        self._answers: dict[bytes, tuple[int, bytes]] = {}
        self._transport: asyncio.DatagramTransport | None = None
        for name, data in names.items():
            for kind, code in _CODES.items():
                records = data.get(kind)
                if records is not None and not isinstance(records, int):
                    question = _wire(name) + _QUESTION_TAIL.pack(code, _IN)
                    self._answers[question] = len(records), _rows(code, kind, records, _ttl(data))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        assert self._transport is not None
        self._transport.sendto(self.answer(data), addr)

    def answer(self, query: bytes) -> bytes:
        end = query.index(b"\0", _HEADER.size) + 1
        question = query[_HEADER.size : end + _QUESTION_TAIL.size]
        count, rows = self._answers.get(question, (0, b""))
        is_known = query[_HEADER.size : end] in self._names
        flags = _ANSWER if is_known else _NO_SUCH_NAME
        number = int.from_bytes(query[:2], "big")
        return _HEADER.pack(number, flags, 1, count, 0, 0) + question + rows


@contextlib.asynccontextmanager
async def name_server(names: Mapping[str, Records]) -> AsyncIterator[str]:
    """Serves the names; the value is its address."""
    server = NameServer(names)
    udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    # A crowd of new hosts asks in bursts, and a lost question is asked again seconds later.
    udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
    udp.bind(("127.0.0.1", 0))
    transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(lambda: server, sock=udp)
    try:
        yield f"127.0.0.1:{udp.getsockname()[1]}"
    finally:
        transport.close()


def _rows(code: int, kind: str, records: object, ttl: int) -> bytes:
    assert isinstance(records, list | tuple)
    return b"".join(_row(code, _data(kind, record), ttl) for record in records)


def _row(code: int, data: bytes, ttl: int) -> bytes:
    return _RECORD.pack(_TO_THE_QUESTION, code, _IN, ttl, len(data)) + data


def _data(kind: str, record: str) -> bytes:
    match kind:
        case "A":
            return socket.inet_aton(record)
        case "AAAA":
            return socket.inet_pton(socket.AF_INET6, record)
    preference, _, host = record.partition(" ")
    return int(preference).to_bytes(2, "big") + _wire(host)


def _ttl(data: Records) -> int:
    ttl = data.get("TTL", DEFAULT_TTL)
    assert isinstance(ttl, int)
    return ttl


def _wire(name: str) -> bytes:
    return b"".join(len(label).to_bytes(1, "big") + label.encode() for label in name.split(".")) + b"\0"
