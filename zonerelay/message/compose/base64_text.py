"""Base64 that came as text, decoded a piece at a time: a large file is never in memory once more. Pure."""

from __future__ import annotations

import base64
from collections.abc import Iterator

LINE = 76
_SLICE = 1024 * LINE


class Base64Error(ValueError):
    """The text says what is no base64, without its value."""


class Base64Text:
    """White space in `text` is passed over. `name` is what errors call it."""

    def __init__(self, text: bytes | memoryview, name: str = "text") -> None:
        self._text = memoryview(text)
        self._name = name

    def pieces(self) -> Iterator[bytes]:
        """The octets, every time anew; each piece but the last is of whole lines. Raises Base64Error."""
        rest = b""
        for start in range(0, len(self._text), _SLICE):
            rest += b"".join(bytes(self._text[start : start + _SLICE]).split())
            # Something is kept for the end: only there padding may be.
            whole = (len(rest) - 1) // LINE * LINE
            if whole > 0:
                yield self._decode(rest[:whole], is_last=False)
                rest = rest[whole:]
        if rest:
            yield self._decode(rest, is_last=True)

    def _decode(self, text: bytes, *, is_last: bool) -> bytes:
        try:
            if not is_last and b"=" in text:
                raise ValueError("padding in the middle")
            return base64.b64decode(text, validate=True)
        except ValueError:
            raise Base64Error(f"{self._name} is not base64") from None
