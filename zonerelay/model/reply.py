"""Defines an SMTP reply, of the relay or of a peer, and the outcome of one recipient in one attempt.

The enhanced status class digit is derived from the reply code, never stored separately, so that they cannot
differ (RFC 3463 2: the class must agree with the code).

`Outcome` is the one type for every result, local or remote: a courier returns one per recipient, the
retry policy may turn a deferral into an expiry, and `queue/settle/` stores the consequence.
"""

import enum
import re

import msgspec

NO_NAMES = "4.3"
"""Subject and detail of a deferral because a name cannot be looked up now (RFC 3463 3.5)."""
TLS_REQUIRED = "7.30"
"""The detail of our own reply about a host whose TLS is less than the message demands (RFC 8689)."""


class Reply(msgspec.Struct, frozen=True):
    """An SMTP reply. `code` is 200–599; `detail` is the RFC 3463 subject and detail (`"1.1"`), `""` when none
    applies.

    `text` may hold several lines separated by `\\n`; it is for display only and never parsed again.
    """

    code: int
    detail: str
    text: str

    def __post_init__(self) -> None:
        if not 200 <= self.code <= 599:
            raise ValueError(f"not an SMTP reply code: {self.code}")

    @property
    def status(self) -> str:
        """Return the RFC 3463 status such as `5.1.1`, or `X.0.0` if the peer sent no enhanced code."""
        kind = {2: 2, 3: 2, 4: 4, 5: 5}[self.code // 100]
        return f"{kind}.{self.detail or '0.0'}"

    @property
    def is_positive(self) -> bool:
        return self.code < 400

    @property
    def is_transient(self) -> bool:
        return 400 <= self.code < 500

    @property
    def is_permanent(self) -> bool:
        return self.code >= 500

    def encode(self) -> bytes:
        """Return the reply in wire format, with a line for each line of its text (RFC 5321 4.2.1, RFC 2034
        4).
        """
        prefix = f"{self.status} " if self.detail and self.code // 100 != 3 else ""
        lines = self.text.split("\n")
        head = "".join(f"{self.code}-{prefix}{line}\r\n" for line in lines[:-1])
        return f"{head}{self.code} {prefix}{lines[-1]}\r\n".encode("utf-8", "replace")

    def __str__(self) -> str:
        status = f"{self.status} " if self.detail else ""
        return f"{self.code} {status}{self.text}".replace("\n", " ")


_DIFFERS = re.compile(r"<[^>]*>|\[[^]]*\]|\b[^\s@]+@[^\s@]+\b|\b[ud]-[a-z2-7]{13}\b|\b(?=\w*\d)[\w.:-]{8,}\b")
"""Addresses, their pseudonyms, and ids with a digit: what differs in replies that say the same."""
MAX_SAME = 100


def same_reply(reply: str) -> str:
    """Return a reply without the parts that differ between equivalent replies, for grouping."""
    return _DIFFERS.sub("…", reply)[:MAX_SAME]


class Verdict(enum.StrEnum):
    """The result of an attempt for one recipient."""

    DELIVERED = "delivered"
    DEFERRED = "deferred"
    BOUNCED = "bounced"
    EXPIRED = "expired"


class Scope(enum.StrEnum):
    """The scope of a failure: the recipient, the message, the host or the destination (after Postfix's
    smtp_trouble).

    RECIPIENT and MESSAGE concern only themselves. HOST means that the destination's hosts could not be
    reached or refused to talk: every delivery for the destination would fail the same way, so the destination
    is suspended. DOMAIN is a routing failure (DNS) of one recipient domain. LOCAL is an error of the relay
    itself (store, configuration, a bug), which implies nothing about any peer.
    """

    RECIPIENT = "recipient"
    MESSAGE = "message"
    HOST = "host"
    DOMAIN = "domain"
    LOCAL = "local"


class Attempt(msgspec.Struct, frozen=True):
    """The stored summary of an attempt, for `queue show` and DSNs.

    `host` is the MX host's name, `peer` its address and port, both `""` if none was reached; `local` is true
    when the reply is ours (DNS, connection, policy) and not a peer's.
    """

    at: float
    reply: Reply
    host: str = ""
    peer: str = ""
    local: bool = False
    in_doubt: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """The result of one attempt for one recipient. With `in_doubt`, the connection was lost after the final
    dot and before the reply (RFC 1047), so the peer may or may not have accepted the message. `tls` is the
    protocol version used, `""` for clear text. If `counts` is false, no peer was contacted, so the attempt is
    not counted. With `dsn_passed`, the peer supports DSN and got the DSN parameters, so if it accepted the
    message, it is responsible for reporting the success (RFC 3461 5.2). `source` is the [[source]] that the
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
