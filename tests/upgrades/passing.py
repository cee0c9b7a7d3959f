"""Records that a queue at rest has none of: what a crash leaves half done, and what relays have agreed on."""

from tests.upgrades import mail
from zonerelay.limits.authority import LimitRequest, SlotClaim, TurnRequest, ZoneLimits

FILE = "passing.json"
BOOK = "limit book"


def written() -> dict[str, str]:
    """In hexadecimal digits."""
    return {BOOK: _limits().encode().hex()}


def read_again(passing: dict[str, str]) -> dict[str, str]:
    """As this release writes what it has read."""
    return {BOOK: ZoneLimits.decode(bytes.fromhex(passing[BOOK])).encode().hex()}


def _limits() -> ZoneLimits:
    limits = ZoneLimits()
    turns = (TurnRequest("example.net", "example.net", 1.0, 0.5, 2),)
    claims = (SlotClaim("example.net", "example.com", 2, 3), SlotClaim("example.org", "example.org", 1, 1))
    limits.exchange("one", LimitRequest(4, claims, turns, everything=True), mail.NOW, until=mail.NOW + 60)
    limits.exchange("two", LimitRequest(4, claims, everything=True), mail.NOW + 1, until=mail.NOW + 61)
    return limits
