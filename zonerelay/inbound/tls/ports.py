"""The values and Protocols by which a session knows TLS, without the library.

`channel` and `certificates` use OpenSSL; they are imported only when a listener offers TLS, because the
library costs more memory than everything else of a listener that does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class TlsFault(Exception):
    """The handshake failed or a record was wrong: the connection is over. The text is for the operator."""


@dataclass(frozen=True, slots=True)
class TlsInfo:
    """An established session: `version` such as `"TLSv1.3"`, the name the client asked for (SNI).

    `certificate` is the SHA-256 of the client's, in lower-case hexadecimal, `""` when it has shown none.
    """

    version: str
    cipher: str
    certificate: str = ""
    server_name: str = ""


class Channel(Protocol):
    """One TLS connection as bytes in and bytes out."""

    @property
    def info(self) -> TlsInfo | None:
        """`None` until the handshake is done."""

    @property
    def closed(self) -> bool:
        """The client has ended TLS (close_notify): nothing more will come."""

    def receive(self, data: bytes) -> bytes:
        """Decrypt input; return the clear text. Raises TlsFault."""

    def take_output(self) -> bytes:
        """Return the bytes to write now, also after a TlsFault."""

    def send(self, plain: bytes) -> bytes:
        """Encrypt; return the bytes to write."""

    def close(self) -> bytes:
        """End TLS; return the bytes to write."""


class TlsContexts(Protocol):
    """The certificates of a listener as they are now."""

    def channel(self) -> Channel:
        """Return a channel for a new connection."""

    def refresh(self) -> None:
        """Look at the files now."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Return problems with the files, as error messages."""

    def expiries(self) -> list[tuple[str, float]]:
        """Return the first name of each certificate, and the Unix time at which it expires."""
