"""Answers of name servers.

Invariant: what our reader understands it understands as dnspython does, and no packet makes it raise.
"""

from typing import Any

from tests.support.dns_oracle import read_alike
from zonerelay.routing.dns.answers import AAAA, CNAME, MX, TLSA, TXT, A, RecordType

NAME = "mail.example.com"
# Any: their records are of several types.
KINDS: dict[int, RecordType[Any]] = {kind.code: kind for kind in (A, AAAA, CNAME, MX, TLSA, TXT)}
CODE_AT = 12 + len(NAME) + 2


def answers(data: bytes) -> None:
    """A packet, read as the answer to the question that is in it, so that few are dismissed for that."""
    kind: RecordType[Any] = KINDS.get(int.from_bytes(data[CODE_AT : CODE_AT + 2]), MX)
    read_alike(data, NAME, kind)
