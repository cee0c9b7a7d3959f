"""Resumes TLS sessions with servers (RFC 8446 2.2), which saves two thirds of a handshake's CPU.

A session is offered only to the name and by the context with which it was made, so a certificate that was not
verified never counts as verified, and none does after the trusted authorities have changed. Names are checked
again, in the certificate of the session. Connections with DANE or pinned certificates resume none: `prove`
refuses it, because they need the chain that the server shows now.
"""

from __future__ import annotations

import ssl
from typing import NamedTuple

from zonerelay.model.bounded import BoundedDict
from zonerelay.model.clock import Clock

MOST = 500
"""Servers whose sessions are kept, of a few kilobytes each."""
LIFETIME = 3600.0
"""Seconds after which the server must show its certificate again."""


class _StoredSession(NamedTuple):
    session: ssl.SSLSession
    shown: float


class ResumingContext(ssl.SSLContext):
    """A TLS context that offers each server the newest session with it."""

    def __init__(self, protocol: int, clock: Clock) -> None:
        self._clock = clock
        self._kept: BoundedDict[str, _StoredSession] = BoundedDict(MOST)

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        kept = self._kept.get(str(server_hostname))
        if kept is not None and self._clock.monotonic() < kept.shown + LIFETIME:
            session = kept.session
        return super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)

    def keep(self, name: str, tls: ssl.SSLObject) -> None:
        """Keep the session of a proven connection, once the server has answered inside TLS: its ticket comes
        after the handshake.
        """
        before = self._kept.pop(name, None)
        session, shown = tls.session, self._clock.monotonic()
        if session is None or not session.has_ticket:
            return
        if tls.session_reused:
            if before is None:
                return
            shown = before.shown
        self._kept[name] = _StoredSession(session, shown)

    def forget(self, name: str) -> None:
        """Forget a session, because a handshake has failed or no session may be resumed now."""
        self._kept.pop(name, None)
