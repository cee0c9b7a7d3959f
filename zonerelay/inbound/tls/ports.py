"""The values and Protocols through which a session uses TLS, without importing the library.

`certificates` uses cryptography, and `asking` pyOpenSSL. They are imported only if a listener needs them,
because these libraries use more memory than all the rest of a listener.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class TlsFault(Exception):
    """The handshake failed or a record was invalid, so the connection must be closed. The text is for the
    operator.
    """


@dataclass(frozen=True, slots=True)
class TlsInfo:
    """An established session. `version` is such as `"TLSv1.3"`.

    `certificate` is the SHA-256 of the client's certificate in lower-case hexadecimal, `""` if it sent none.
    """

    version: str
    cipher: str
    certificate: str = ""


class Channel(Protocol):
    """One TLS connection as bytes in and bytes out."""

    @property
    def info(self) -> TlsInfo | None:
        """The details of the session, or `None` until the handshake is complete."""

    @property
    def closed(self) -> bool:
        """Whether the client has ended TLS (close_notify), so that no more input follows."""

    def receive(self, data: bytes) -> bytes:
        """Decrypt input, and return the plaintext. Raise TlsFault on failure."""

    def take_output(self) -> bytes:
        """Return the bytes to send now, also after a TlsFault."""

    def send(self, plain: bytes) -> bytes:
        """Encrypt `plain`, and return the bytes to write."""

    def close(self) -> bytes:
        """End TLS, and return the bytes to write."""


class TlsContexts(Protocol):
    """The current certificates of a listener."""

    def channel(self) -> Channel:
        """Return a channel for a new connection."""

    def refresh(self) -> None:
        """Check the files now."""

    @property
    def problems(self) -> tuple[str, ...]:
        """The problems with the files, as error messages."""

    def expiries(self) -> list[tuple[str, float]]:
        """Return the first name of each certificate, and the Unix time at which it expires."""
