"""How long a batch waits for its turns, with a connection in its hands."""

from __future__ import annotations

import asyncio

from zonerelay.config.units import parse_rate
from zonerelay.model.clock import ManualClock
from zonerelay.queue.destination.rates import Pace, Rates
from zonerelay.queue.zone.zone import LONGEST_FIRST, take_turn
from zonerelay.routing.destinations.route import DestinationKey, SiteKey

SITE, LINE = SiteKey("default mx.example.com:25"), DestinationKey("default mx.example.com:25")


def pace(rates: Rates, text: str) -> Pace:
    found = rates.pace(SITE, LINE, parse_rate(text))
    assert found is not None
    return found


async def test_a_first_turn_that_a_reload_has_moved_far_away_is_not_waited_for() -> None:
    """Else the connections of the batches under way, the zone's all perhaps, would wait for hours."""
    clock, rates = ManualClock(), Rates()
    quick = pace(rates, "10/1s")
    first, second = (quick.start(clock.monotonic()) for _ in range(2))
    pace(rates, "1/1h")
    assert await take_turn(first, clock)
    assert not await asyncio.wait_for(take_turn(second, clock), 1)


async def test_a_first_turn_that_is_only_late_is_waited_for() -> None:
    clock, rates = ManualClock(), Rates()
    slow = pace(rates, f"1/{LONGEST_FIRST - 10:.0f}s")
    first, second = (slow.start(clock.monotonic()) for _ in range(2))
    assert await take_turn(first, clock)
    waiting = asyncio.create_task(take_turn(second, clock))
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
