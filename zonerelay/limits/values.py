"""The messages between a worker and the authority over shared limits. Values only.

A *unit* is the right to one connection of a line at a site: it counts in the zone, at the site and for the
line. A *turn* is a moment at which one MAIL may be written. The *authority* knows which holder has which
units and which turns are given away; a *holder* is a worker that asks it.

A request declares a state, not a change: "of this line I keep 3 units and want 5". To repeat it changes
nothing, and an authority that has forgotten everything believes it. So answers may get lost, and an authority
may be restarted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from msgspec import Struct

from zonerelay.config.units import Rate

# The interval between two turns of a rate, and the grace within which a turn may be taken. Pure.
#
# The receiver's clock is not ours: of two commands the first may be held up on its way and arrive closer to
# the second. The interval is therefore that of a time that is longer by a `margin`: a quarter of it is the
# grace, three quarters are for the network and the receiver. Where turns are leased (`turns.py`) the grace
# is two fifths: what the answer was under way is lost of it.

MARGIN_LEAST = 0.05
MARGIN_PART = 0.02
GRACE_PART = 0.25
LEASED_GRACE_PART = 0.4


def margin(rate: Rate) -> float:
    """Return the seconds by which the time of a rate is stretched."""
    return max(MARGIN_LEAST, MARGIN_PART * rate.seconds)


def interval(rate: Rate) -> float:
    return (rate.seconds + margin(rate)) / rate.count


def grace(rate: Rate) -> float:
    """Returns the seconds after its moment in which a turn may be taken within the rate."""
    return GRACE_PART * margin(rate)


def leased_grace(rate: Rate) -> float:
    """Returns the grace of a turn that an authority gave."""
    return LEASED_GRACE_PART * margin(rate)


class Claim(Struct, frozen=True, array_like=True):
    """One line of a site. `keep`: units that the holder goes on using; `back`: those it gives back with this
    request; `want`: how many it would like to hold in all. `limit` is what its configuration says.
    """

    site: str
    line: str
    limit: int
    keep: int = 0
    back: int = 0
    want: int = 0


class TurnAsk(Struct, frozen=True, array_like=True):
    """A request for `count` turns of a line, `interval` seconds apart, which are turns of the zone as well if
    that has an interval. 0: there is no such rate. None is to be in the next `after` seconds.
    """

    site: str
    line: str
    interval: float
    zone_interval: float
    count: int
    after: float = 0.0


class Request(Struct, frozen=True, array_like=True):
    """About one zone. `everything`: these are all claims of the holder, and it wants to hear of all it has.

    `unused`: turns that the holder will not take, each with its site; a request names them once, because they
    may belong to another holder afterwards. `known_turns`: turns that the holder has been given, for an
    authority that may have forgotten them.
    """

    zone_limit: int
    claims: tuple[Claim, ...] = ()
    turns: tuple[TurnAsk, ...] = ()
    unused: tuple[tuple[str, float], ...] = ()
    everything: bool = False
    known_turns: tuple[tuple[TurnAsk, tuple[float, ...]], ...] = ()


class Held(Struct, frozen=True, array_like=True):
    """What a holder has of a line. `surrender`: the units that must go to other holders, even if they are in
    use. `pressed`: the number of lines that wait because of these units; idle ones ought to go back.
    """

    site: str
    line: str
    units: int
    surrender: int = 0
    pressed: int = 0


class Answer(Struct, frozen=True, array_like=True):
    """The answer to a request. `now`: the authority's clock, in which `turns` are written, a list for each
    one asked for.

    `pressed`: the number of lines that wait because all units of the zone are given away. `holders`: the
    number of workers that hold units of the zone or wait for some.
    """

    now: float
    held: tuple[Held, ...] = ()
    turns: tuple[tuple[float, ...], ...] = ()
    pressed: int = 0
    holders: int = 1


class AuthorityError(Exception):
    """The authority did not answer; it may or may not have taken the request in."""


class LimitAuthority(Protocol):
    """The side that counts for all workers. Belongs to one event loop."""

    @property
    def name(self) -> str:
        """The name for the operator: where the limits are leased from."""

    @property
    def lease(self) -> float | None:
        """Seconds after which a holder that is silent has nothing any longer; `None`: it has its units as
        long as its process lives.
        """

    async def start(
        self, news: Callable[[str], None], back: Callable[[], None], gone: Callable[[str], None]
    ) -> None:
        """Connect. `news` names a zone in which a new exchange would bring something. `gone`: it is out of
        reach, and why. `back`: it is in reach now and may have forgotten everything, so all is to be said
        again. Raises AuthorityError only when it cannot ever be used.
        """

    async def exchange(self, zone: str, request: Request) -> Answer:
        """Exchange a request for an answer, one at a time for each zone. Raises AuthorityError."""

    async def close(self) -> None:
        """Gives everything back, as far as the authority is in reach."""
