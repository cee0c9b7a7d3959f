"""The interval between two turns of a rate, and the grace within which a turn may be taken. Pure.

The receiver's clock is not ours: of two commands the first may be held up on its way and arrive closer to the
second. The interval is therefore that of a time that is longer by a `margin`: a quarter of it is the grace,
three quarters are for the network and the receiver. Where turns are leased (`turns.py`) the grace is two
fifths: what the answer was under way is lost of it.
"""

from __future__ import annotations

from zonerelay.config.units import Rate

MARGIN_LEAST = 0.05
MARGIN_PART = 0.02
GRACE_PART = 0.25
LEASED_GRACE_PART = 0.4


def margin(rate: Rate) -> float:
    """Seconds by which the time of a rate is stretched."""
    return max(MARGIN_LEAST, MARGIN_PART * rate.seconds)


def interval(rate: Rate) -> float:
    return (rate.seconds + margin(rate)) / rate.count


def grace(rate: Rate) -> float:
    """Returns the seconds after its moment in which a turn may be taken within the rate."""
    return GRACE_PART * margin(rate)


def leased_grace(rate: Rate) -> float:
    """Returns the grace of a turn that an authority gave."""
    return LEASED_GRACE_PART * margin(rate)
