"""[delivery]: how long a peer may take in each phase of a session (RFC 5321 4.5.3.2)."""

from __future__ import annotations

from dataclasses import dataclass

from zonerelay.config.options.options import (
    HOUR,
    MINUTE,
    count,
    duration,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliverySettings:
    """[delivery]: how long each phase of a conversation with a peer may take (RFC 5321 4.5.3.2)."""

    connect_timeout: float = duration(
        30.0, "Until a host accepts the connection. Short, because the next MX host may answer at once."
    )
    greeting_timeout: float = duration(5 * MINUTE, "Until the greeting; busy servers delay it on purpose.")
    ehlo_timeout: float = duration(5 * MINUTE, "Until the reply to EHLO or HELO.")
    starttls_timeout: float = duration(2 * MINUTE, "Until the reply to STARTTLS, and then for the handshake.")
    mail_timeout: float = duration(5 * MINUTE, "Until the reply to MAIL.")
    rcpt_timeout: float = duration(
        5 * MINUTE, "Until the reply to each RCPT: servers look up each recipient."
    )
    data_timeout: float = duration(2 * MINUTE, "Until the reply to DATA.")
    block_timeout: float = duration(3 * MINUTE, "Until the peer takes the next block of the message.")
    final_dot_timeout: float = duration(
        10 * MINUTE,
        "Until the reply to the message. The longest, because giving up here duplicates mail (RFC 1047).",
    )
    quit_timeout: float = duration(5.0, "Until the reply to QUIT: nothing depends on it.")
    max_hosts_per_attempt: int = count(
        5,
        "MX hosts tried in one attempt, as RFC 5321 5.1 lets us limit; the next attempt starts again.",
        most=100,
    )
    remember_broken_tls: float = duration(
        1 * HOUR,
        "How long a host whose TLS handshake failed is sent mail in clear text (tls = opportunistic "
        "only), so that not every message pays for the failure.",
        optional=True,
    )
