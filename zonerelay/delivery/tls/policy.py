"""The TLS contexts towards peers, and the memory of hosts whose TLS is broken.

`opportunistic` and `required` encrypt without authentication of the peer (RFC 7435: unauthenticated
encryption is better than none, and most MX certificates do not match). DANE and pinned certificates are
checked after the handshake (`verify.py`). `verify` and MTA-STS need a certificate of a trusted authority;
`verify.py` checks its name. Only `opportunistic` falls back to clear text, on a fresh connection, and
remembers the host, so that not every message pays for a failed handshake.

From version 3.5 on OpenSSL's first message of a handshake, with keys against quantum computers, fills more
than one packet, and some hosts and firewalls never answer it. A host that does not answer a handshake is
asked once more with one group (P-256, which every server knows), and for a day if that was the cause.
"""

from __future__ import annotations

import functools
import ssl

from zonerelay.delivery.peer.expiring_set import ExpiringSet
from zonerelay.model.clock import Clock
from zonerelay.process.webclient import SystemTrust, default_context

SMALL_FOR = 24 * 3600.0
_SMALL_GROUP = "prime256v1"


class TlsPolicy:
    """Builds a context at its first use, because loading the trusted authorities takes milliseconds."""

    def __init__(self, clock: Clock, *, remember_broken: float) -> None:
        self._clock = clock
        self.broken = ExpiringSet(clock, remember_broken)
        """Hosts (`name:port`) whose TLS failed; `opportunistic` sends to them in clear text."""
        self.small = ExpiringSet(clock, SMALL_FOR)
        """Hosts (`name:port`) that answer a handshake with one group alone."""
        self._encrypting: dict[bool, ssl.SSLContext] = {}
        self._verifying = {
            small: SystemTrust(functools.partial(_verifying, small)) for small in (False, True)
        }

    def now(self) -> float:
        """Returns Unix time, with which the dates in certificates are compared."""
        return self._clock.now()

    def context(self, *, verify: bool, small: bool) -> ssl.SSLContext:
        if verify:
            return self._verifying[small].context()
        if small not in self._encrypting:
            self._encrypting[small] = _encrypting(small)
        return self._encrypting[small]


def _encrypting(small: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if small:
        context.set_ecdh_curve(_SMALL_GROUP)
    return context


def _verifying(small: bool) -> ssl.SSLContext:
    context = default_context()
    context.check_hostname = False  # `verify.py` checks several names, and reports those of the certificate
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if small:
        context.set_ecdh_curve(_SMALL_GROUP)
    return context
