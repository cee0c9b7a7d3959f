"""Draws the source of a message by weighted rendezvous hashing, without state.

Every source draws a number from its name and the key of the mail, bent by its weight; the highest number
wins. So a message keeps its source over retries and restarts, sources share mail by their weights, and a
source that is added or removed moves only its own mail. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from zonerelay.config.settings import SourceBy, SourceSettings
from zonerelay.model.address import NULL_SENDER, Mailbox
from zonerelay.model.message_id import MessageId

_SPAN = 2.0**64


def key_of(by: SourceBy, message_id: MessageId, sender: Mailbox) -> str:
    """Returns the key that binds mail to a source. A report has no sender, so its key is the message id."""
    return sender.lower() if by is SourceBy.SENDER and sender != NULL_SENDER else message_id


def in_order(sources: Iterable[SourceSettings], key: str) -> list[SourceSettings]:
    """Returns the source for this key first, then its substitutes in order. Sources of weight 0 are
    left out.
    """
    drawn = [(_draw(source, key), source.name, source) for source in sources if source.weight]
    drawn.sort(key=lambda each: each[:2], reverse=True)
    return [source for _, _, source in drawn]


def shares(sources: Sequence[SourceSettings]) -> list[float]:
    """Returns the part of the mail that each source takes while none is passed over."""
    total = sum(source.weight for source in sources)
    return [source.weight / total if total else 0.0 for source in sources]


def _draw(source: SourceSettings, key: str) -> float:
    digest = blake2b(f"{source.name} {key}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    # -log(u) / weight is exponential with the weight as its rate, so each source has the least number with
    # the probability of its share. The half keeps u between 0 and 1.
    return math.log((int.from_bytes(digest, "big") + 0.5) / _SPAN) / source.weight
