"""A transport in memory, for sessions without a socket."""

from __future__ import annotations

from dataclasses import dataclass, field

CLIENT = "192.0.2.1"


@dataclass(eq=False)
class Wire:
    """Keeps what is written, and whether it would be read from; after closing nothing may be said.

    `gone`: the client has left, and the session has not heard of it yet.
    """

    address: str = CLIENT
    out: bytearray = field(default_factory=bytearray)
    closed: bool = False
    gone: bool = False
    reading: bool = True

    def get_extra_info(self, name: str) -> object:
        return (self.address, 4711)

    def write(self, data: bytes) -> None:
        assert not self.closed, "nothing is said after closing"
        if not self.gone:
            self.out += data

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed or self.gone

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True
