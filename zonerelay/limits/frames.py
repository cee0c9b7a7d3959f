"""What goes over the Unix socket of the limits: frames of MessagePack, each behind its length."""

from __future__ import annotations

import asyncio
import struct
from typing import TypeVar

import msgspec

from zonerelay.limits.values import Answer, AuthorityError, Request

MAX_FRAME = 16 * 1024 * 1024
"""Octets. The largest are those that say everything: a hundred for each line that has units."""

_LENGTH = struct.Struct(">I")


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """First: who asks. `version`: of these frames."""

    holder: str
    version: int = 1


class Ask(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    zone: str
    request: Request


class Told(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    """Answers come in the order of the questions."""

    answer: Answer


class News(msgspec.Struct, frozen=True, array_like=True, tag="news"):
    """A question about this zone would bring something."""

    zone: str


Said = Hello | Ask
Heard = Told | News
_Any = TypeVar("_Any")


def encode(frame: Said | Heard) -> bytes:
    data = msgspec.msgpack.encode(frame)
    return _LENGTH.pack(len(data)) + data


async def read(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[_Any]) -> _Any:
    """Raises AuthorityError when the other side has gone or says what makes no sense."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME:
            raise AuthorityError(f"a frame of {length} octets")
        return decoder.decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError as error:
        raise AuthorityError("the connection has ended") from error
    except (OSError, msgspec.MsgspecError) as error:
        raise AuthorityError(str(error) or type(error).__name__) from error
