"""The greeting of a listener and its replies to EHLO and HELO, each built once and remembered.

An extension is offered only when it is complete here and of use to this client: STARTTLS and AUTH depend on
the connection, DSN, FUTURERELEASE and XCLIENT on the client.
"""

from __future__ import annotations

from zonerelay.config.settings import ListenerSettings
from zonerelay.inbound.state.replies import ServerReply, said
from zonerelay.smtp.client.extensions import future_release_line, limits_line
from zonerelay.smtp.server.proxy_protocol import KEYWORDS
from zonerelay.smtp.server.sasl import MECHANISMS

FRESH = 60.0  # seconds that an EHLO reply with a date in it (RFC 4865) is used


# The parts of the EHLO reply that differ between clients, as flags (plain numbers: used at every connection).
STARTTLS = 1
AUTH = 2
FUTURE_RELEASE = 4
XCLIENT = 8
DSN = 16


class Greeting:
    def __init__(self, hostname: str, settings: ListenerSettings) -> None:
        self.banner = said(220, "", f"{hostname} ESMTP")
        self.helo = said(250, "", hostname)
        self._max_hold = int(settings.max_hold)
        self._lines = (
            hostname,
            "PIPELINING",
            f"SIZE {settings.max_message_size}",
            "8BITMIME",
            "SMTPUTF8",
            "ENHANCEDSTATUSCODES",
            "CHUNKING",
            limits_line(settings.max_recipients),
        )
        self._answers: dict[int, tuple[float, ServerReply]] = {}

    def ehlo(self, offer: int, now: float) -> ServerReply:
        """`now` is Unix time."""
        known = self._answers.get(offer)
        if known is None or not known[0] <= now < known[0] + FRESH:
            known = self._answers[offer] = (now, said(250, "", "\n".join(self._all_lines(offer, now))))
        return known[1]

    def _all_lines(self, offer: int, now: float) -> list[str]:
        lines = list(self._lines)
        if offer & DSN:
            lines.insert(-1, "DSN")
        if offer & STARTTLS:
            lines.append("STARTTLS")
        if offer & AUTH:
            lines.append(f"AUTH {' '.join(MECHANISMS)}")
        if offer & FUTURE_RELEASE:
            lines.append(future_release_line(self._max_hold, now))
        if offer & XCLIENT:
            lines.append(f"XCLIENT {KEYWORDS}")
        return lines
