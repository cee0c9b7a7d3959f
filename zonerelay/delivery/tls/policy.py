"""The TLS contexts towards peers, and the memory of hosts whose TLS is broken.

`opportunistic` and `required` encrypt without authentication of the peer (RFC 7435: unauthenticated
encryption is better than none, and most MX certificates do not match). DANE and pinned certificates are
checked after the handshake (`verify.py`). `verify` and MTA-STS need a certificate of a trusted authority;
`verify.py` checks its name. Only `opportunistic` falls back to clear text, on a fresh connection, and
remembers the host, so that not every message pays for a failed handshake.
"""

from __future__ import annotations

import ssl

from zonerelay.delivery.peer.expiring_set import ExpiringSet
from zonerelay.model.clock import Clock
from zonerelay.process.webclient import SystemTrust, default_context


class TlsPolicy:
    """Builds a context at its first use, because loading the trusted authorities takes milliseconds."""

    def __init__(self, clock: Clock, *, remember_broken: float) -> None:
        self._clock = clock
        self.broken = ExpiringSet(clock, remember_broken)
        """Hosts (`name:port`) whose TLS failed; `opportunistic` sends to them in clear text."""
        self._encrypting: ssl.SSLContext | None = None
        self._verifying = SystemTrust(_verifying)

    def now(self) -> float:
        """Returns Unix time, with which the dates in certificates are compared."""
        return self._clock.now()

    def context(self, *, verify: bool) -> ssl.SSLContext:
        if verify:
            return self._verifying.context()
        if self._encrypting is None:
            self._encrypting = _encrypting()
        return self._encrypting


def _encrypting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _verifying() -> ssl.SSLContext:
    context = default_context()
    context.check_hostname = False  # `verify.py` checks several names, and reports those of the certificate
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
