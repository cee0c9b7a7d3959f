"""TLS towards peers: one context per policy, and the memory of hosts whose TLS is broken.

`opportunistic` and `required` encrypt without asking who the peer is (RFC 7435: unauthenticated
encryption beats none, and most MX certificates do not match); `verify` wants a certificate of a
trusted authority for the host's name. Only `opportunistic` ever falls back to clear text, on a fresh
connection, and remembers that for the host so that not every message pays for a failed handshake.
"""

from __future__ import annotations

import ssl
from collections import OrderedDict

from zonerelay.config.models import TlsMode
from zonerelay.model.clock import Clock

MAX_REMEMBERED = 10_000


class TlsPolicy:
    """Contexts are built when first needed, because loading the trusted authorities takes milliseconds."""

    def __init__(self, clock: Clock, *, remember_broken: float) -> None:
        self._clock = clock
        self._remember = remember_broken
        self._broken_until: OrderedDict[str, float] = OrderedDict()
        self._contexts: dict[bool, ssl.SSLContext] = {}

    def context(self, mode: TlsMode) -> ssl.SSLContext:
        verify = mode is TlsMode.VERIFY
        if verify not in self._contexts:
            self._contexts[verify] = _verifying() if verify else _encrypting()
        return self._contexts[verify]

    def is_broken(self, host: str) -> bool:
        until = self._broken_until.get(host)
        if until is None:
            return False
        if until > self._clock.monotonic():
            return True
        del self._broken_until[host]
        return False

    def remember_broken(self, host: str) -> None:
        self._broken_until[host] = self._clock.monotonic() + self._remember
        self._broken_until.move_to_end(host)
        if len(self._broken_until) > MAX_REMEMBERED:
            self._broken_until.popitem(last=False)


def _encrypting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def _verifying() -> ssl.SSLContext:
    return ssl.create_default_context()
