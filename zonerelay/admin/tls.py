"""TLS for the admin address: its certificate is read at the start, and again when its files change.

If a changed pair of files is unusable, `on_error` is called with the error, and the old pair stays in use.
Files are checked when a client connects, at most once a second.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable
from pathlib import Path

from zonerelay.inbound.tls.certificate_files import CertificateError, read_pair
from zonerelay.process.files import FileState, file_state

LOOK_EVERY = 1.0


class TlsError(Exception):
    """The certificate cannot be used. The text is for the operator."""


def server_context(
    certificate: Path, key: Path | None, on_error: Callable[[str, BaseException], None]
) -> ssl.SSLContext:
    """Return a context that uses the current certificate. Raise TlsError if it is not usable."""
    files = _CertificateFiles(certificate, key or certificate)
    try:
        context = files.read()
    except CertificateError as error:
        raise TlsError(str(error)) from error
    current = context

    def choose(connection: ssl.SSLObject | ssl.SSLSocket, name: str | None, of: ssl.SSLContext) -> None:
        nonlocal current
        if files.are_due():
            try:
                current = files.read()
            except CertificateError as error:
                on_error("admin-tls", error)
        connection.context = current

    context.sni_callback = choose  # called whether or not the client names a server
    return context


class _CertificateFiles:
    """The certificate and key files and their modification times."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate = certificate
        self._key = key
        self._seen: tuple[FileState, FileState] = ((), ())
        self._next_look = 0.0

    def are_due(self) -> bool:
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look = now + LOOK_EVERY
        return self._states() != self._seen

    def read(self) -> ssl.SSLContext:
        """Read both files, and return a context. Raise CertificateError on failure."""
        self._seen = self._states()
        read_pair(self._certificate, self._key)  # its error messages contain the remedy
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._certificate, self._key)
        except (OSError, ssl.SSLError) as error:
            raise CertificateError(f"OpenSSL cannot use {self._certificate}: {error}") from error
        return context

    def _states(self) -> tuple[FileState, FileState]:
        return file_state(self._certificate), file_state(self._key)
