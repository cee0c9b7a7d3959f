"""Defines the outcome of one recipient in one attempt, and the scope of a failure.

One type for every result, local or remote: a courier returns one `Outcome` per recipient, the
retry policy may turn a deferral into an expiry, and `queue/settle/` stores the consequence.
"""

from __future__ import annotations

import enum

import msgspec

from zonerelay.model.reply import Reply


class Verdict(enum.StrEnum):
    """The final or temporary result for a recipient."""

    DELIVERED = "delivered"
    DEFERRED = "deferred"
    BOUNCED = "bounced"
    EXPIRED = "expired"


class Scope(enum.StrEnum):
    """The scope of a failure: the recipient, the message, the host or the destination (after Postfix's
    smtp_trouble).

    RECIPIENT and MESSAGE concern only themselves. HOST means that the destination's hosts could not be
    reached or would not talk: every delivery for the destination would fail the same way, so
    the destination is suspended. DOMAIN is a routing failure (DNS) of one recipient domain.
    LOCAL is our own trouble (store, configuration, a bug) and says nothing about any peer.
    """

    RECIPIENT = "recipient"
    MESSAGE = "message"
    HOST = "host"
    DOMAIN = "domain"
    LOCAL = "local"


class Attempt(msgspec.Struct, frozen=True):
    """The stored summary of an attempt, for `queue show` and DSNs.

    `host` is the MX host's name, `peer` its address and port, both `""` when none was reached;
    `local` is true when the reply is ours (DNS, connection, policy) and not a peer's.
    """

    at: float
    reply: Reply
    host: str = ""
    peer: str = ""
    local: bool = False
    in_doubt: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """The result of one attempt for one recipient. `in_doubt`: the connection was lost after the final dot,
    before the reply (RFC 1047), so the peer may or may not have taken the message. `tls` is the protocol
    version used, `""` for clear text. `counts` false: no peer was asked, so no attempt was used up.
    `dsn_passed`: the peer offers DSN and was told the wishes for reports, so if it took the message,
    reporting the success is its duty and no longer ours (RFC 3461 5.2). `source` is the [[source]] that the
    peer was reached from, `""` without any.
    """

    verdict: Verdict
    reply: Reply
    scope: Scope = Scope.RECIPIENT
    host: str = ""
    peer: str = ""
    tls: str = ""
    local: bool = False
    in_doubt: bool = False
    counts: bool = True
    dsn_passed: bool = False
    source: str = ""

    def attempt(self, at: float) -> Attempt:
        return Attempt(at, self.reply, self.host, self.peer, self.local, self.in_doubt)
