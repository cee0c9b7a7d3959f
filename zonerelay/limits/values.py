"""Defines the messages between a worker and the limit authority. Values only.

A *slot* is the right to one connection of a destination at a site. It counts in the zone, at the site and for
the destination. A *turn* is a moment at which one MAIL may be written. The *authority* records which owner
has which slots and which turns are assigned. A *owner* is a worker that sends it requests.

A request declares a state, not a change: "of this destination I keep 3 slots and want 5". Repeating it
changes nothing, and an authority that has lost its state believes it. So answers may get lost, and the
authority may be restarted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from zonerelay.config.units import Rate

# The interval between two turns of a rate, and the grace within which a turn may be taken. Pure.
#
# The receiver's clock differs from ours: of two commands the first may be delayed on the way and arrive
# closer to the second. So the interval is computed for a time that is longer by a `margin`. A quarter of the
# margin is the grace; three quarters are for the network and the receiver. If turns are leased
# (`worker.py`), the grace is two fifths, because the time that the answer was on its way reduces
# it.

MARGIN_LEAST = 0.05
MARGIN_PART = 0.02
GRACE_PART = 0.25
LEASED_GRACE_PART = 0.4


def margin(rate: Rate) -> float:
    """Return the seconds by which the time of a rate is extended."""
    return max(MARGIN_LEAST, MARGIN_PART * rate.seconds)


def interval(rate: Rate) -> float:
    return (rate.seconds + margin(rate)) / rate.count


def grace(rate: Rate) -> float:
    """Return the seconds after a send time within which it may be used."""
    return GRACE_PART * margin(rate)


def leased_grace(rate: Rate) -> float:
    """Return the seconds after a leased send time within which it may be used."""
    return LEASED_GRACE_PART * margin(rate)


class SlotClaim(Struct, frozen=True, array_like=True):
    """A worker's claim for connection slots to one destination. `keep` is the number of slots that the owner
    goes on using, `back` those that it gives back with this request, and `want` how many it would like to
    have in all. `limit` comes from its configuration.
    """

    site: str
    destination: str
    limit: int
    keep: int = 0
    back: int = 0
    want: int = 0


class TurnRequest(Struct, frozen=True, array_like=True):
    """A request for `count` send times for a destination, `interval` seconds apart. They are also turns of
    the zone if `zone_interval` is set. An interval of 0 means that there is no such rate. No turn is to be
    within the next `after` seconds.
    """

    site: str
    destination: str
    interval: float
    zone_interval: float
    count: int
    after: float = 0.0


class LimitRequest(Struct, frozen=True, array_like=True):
    """A worker's request to the limit authority about one zone. `everything` says that these are all claims
    of the owner, and that the answer is to contain everything it has.

    `unused` are turns that the owner will not take, each with its site. A request names them only once,
    because they may belong to another owner afterwards. `known_turns` are turns that the owner was
    assigned, for an authority that may have forgotten them.
    """

    zone_limit: int
    claims: tuple[SlotClaim, ...] = ()
    turns: tuple[TurnRequest, ...] = ()
    unused: tuple[tuple[str, float], ...] = ()
    everything: bool = False
    known_turns: tuple[tuple[TurnRequest, tuple[float, ...]], ...] = ()


class SlotGrant(Struct, frozen=True, array_like=True):
    """The slots that a worker has for one destination, and how many of them it must return even if they are
    in use. `waiters` is the number of destinations that wait because of these slots; idle ones should be
    given back.
    """

    site: str
    destination: str
    slots: int
    revoked: int = 0
    waiters: int = 0


class LimitAnswer(Struct, frozen=True, array_like=True):
    """The authority's response to a request. `now` is the authority's clock, by which `turns` are given, as
    one list for each request for turns.

    `waiters` is the number of destinations that wait because all slots of the zone are assigned. `owners` is
    the number of workers that have slots of the zone or wait for some.
    """

    now: float
    held: tuple[SlotGrant, ...] = ()
    turns: tuple[tuple[float, ...], ...] = ()
    waiters: int = 0
    owners: int = 1


class AuthorityError(Exception):
    """The limit authority did not respond. It may or may not have processed the request."""


class LimitAuthority(Protocol):
    """Interface: grants the limits that several workers share. It belongs to one event loop."""

    @property
    def name(self) -> str:
        """The name of the authority in the operator's status."""

    @property
    def lease(self) -> float | None:
        """The seconds after which a silent owner loses its slots, or None if it keeps them as long as its
        process lives.
        """

    async def start(
        self, news: Callable[[str], None], back: Callable[[], None], gone: Callable[[str], None]
    ) -> None:
        """Connect. `news` is called with a zone if a new exchange would bring something. `gone` is called
        with the reason when the authority is unreachable. `back` is called when it is reachable again and may
        have forgotten everything, so that everything must be declared again. Raise AuthorityError only if it
        can never be used.
        """

    async def exchange(self, zone: str, request: LimitRequest) -> LimitAnswer:
        """Send a request and return the answer, one at a time for each zone. Raise AuthorityError."""

    async def close(self) -> None:
        """Return all slots to the authority, if it is reachable."""
