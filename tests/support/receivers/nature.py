"""What a receiver is like, as values. What it does about it is in `conversation.py`."""

import enum
from dataclasses import dataclass

from tests.support.receivers.ledger import Promise


class Tls(enum.Enum):
    """What becomes of STARTTLS."""

    NONE = enum.auto()  # not offered
    GOOD = enum.auto()
    EXPIRED = enum.auto()  # a certificate of last year
    REFUSED = enum.auto()  # 454
    GARBAGE = enum.auto()  # 220, and then clear text
    CLOSED = enum.auto()  # 220, and then nothing
    ABSENT = enum.auto()  # the connection is closed right after the handshake

    @property
    def has_certificate(self) -> bool:
        return self in (Tls.GOOD, Tls.EXPIRED, Tls.ABSENT)


class Point(enum.Enum):
    """Where a client's address is looked at."""

    GREETING = enum.auto()
    MAIL = enum.auto()
    DOT = enum.auto()


USUAL = Promise(connections=4, recipients=50)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nature:
    """All off: a good and fast receiver. Times in seconds, chances from 0 to 1.

    What it offers: the first block. `promise`: what the relay was told about its limits; it is counted, not
    enforced.
    """

    esmtp: bool = True
    pipelining: bool = True
    chunking: bool = False
    eight_bit_mime: bool = True
    dsn: bool = False
    size: int | None = None
    tls: Tls = Tls.NONE

    promise: Promise = USUAL

    greylist: float = 0.0
    """How long a triple of client, sender and recipient is unwelcome."""
    rate: tuple[int, float] | None = None
    over_rate: str = "451 4.7.1 too much mail from you, try again later"
    most_connections: int = 0
    blocks: tuple[str, ...] = ()
    blocks_at: Point = Point.GREETING
    most_recipients: int | None = None
    too_many: str = "452 4.5.3 too many recipients"

    at_first_data: str = ""
    """The reply to the first DATA of each message."""
    at_first_dot: str = ""
    mute_at_first: bool = False
    """Takes each message, and the first time never says so."""
    says_421: float = 0.0
    resets: float = 0.0
    closes_after: int = 0
    """Messages, after which it closes without a word."""

    greets_after: float = 0.0
    silent: bool = False
    """Never greets."""
    replies_after: float = 0.0
    octets_apart: float = 0.0
    """Between two octets of a reply."""
    reads_slowly: bool = False
