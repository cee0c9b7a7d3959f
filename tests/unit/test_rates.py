"""Turns of rates: never more than allowed as the receiver counts, nothing saved up, and no turn lost."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zonerelay.config.units import Rate, parse_rate
from zonerelay.limits.values import margin
from zonerelay.model.clock import ManualClock
from zonerelay.queue.destination.rates import HORIZON, Pace, Pacer, Rates, Ticket
from zonerelay.queue.zone.zone import LONGEST_FIRST, take_turn
from zonerelay.routing.destinations.route import DestinationKey, SiteKey

SITE = SiteKey("default mx.example.com:25")
LINE = DestinationKey(SITE)
OTHER = DestinationKey(f"{SITE} mta-sts")
FAST, SLOW = parse_rate("60/1m"), parse_rate("6/1m")

rates = st.builds(Rate, st.integers(1, 50), st.sampled_from([0.1, 1.0, 7.5, 60.0, 3600.0]))


def fullest(times: Sequence[float], seconds: float) -> int:
    """The most that any `seconds` hold."""
    times, first, most = sorted(times), 0, 0
    for last, time in enumerate(times):
        while times[first] <= time - seconds:
            first += 1
        most = max(most, last + 1 - first)
    return most


def pace(rates: Rates, rate: Rate | None = FAST, line: DestinationKey = LINE, site: SiteKey = SITE) -> Pace:
    found = rates.pace(site, line, rate)
    assert found is not None
    return found


def take(ticket: Ticket, now: float) -> bool:
    if ticket.due > now:
        return False
    ticket.take(now)
    return True


# One rate


few = st.builds(Rate, st.integers(1, 6), st.sampled_from([0.1, 1.0, 7.5, 60.0, 3600.0]))
part = st.one_of(st.sampled_from([0.0, 0.249, 0.3, 0.749]), st.floats(0, 0.749))


@settings(max_examples=100)
@given(rate=few, asks=st.lists(st.tuples(part, st.integers(0, 2), part), min_size=1, max_size=60))
@example(rate=Rate(1, 60.0), asks=[(0.0, 0, 0.0), (0.26, 0, 0.749), (0.0, 0, 0.0)])
@example(rate=Rate(2, 60.0), asks=[(0.0, 0, 0.0), (0.249, 0, 0.749), (0.0, 0, 0.0), (0.0, 0, 0.0)])
def test_whoever_asks_when_no_time_holds_more_than_allowed(
    rate: Rate, asks: list[tuple[float, int, float]]
) -> None:
    """A little late, or after whole intervals; each mail under way for up to ¾ of the margin."""
    pacer, now = Pacer(rate), 1000.0
    seen = []
    for late, pause, delay in asks:
        now = max(now, pacer.next_turn) + late * margin(rate) + pause * pacer.interval
        pacer.take(now)
        seen.append(now + delay * margin(rate))
    assert fullest(seen, rate.seconds) <= rate.count


@given(rate=rates, late=st.lists(st.floats(0, 0.25), min_size=100, max_size=100))
def test_no_turn_is_lost_by_those_who_come_a_little_late(rate: Rate, late: list[float]) -> None:
    pacer, now = Pacer(rate), 1000.0
    pacer.take(now)
    began = now
    for each in late:
        now = max(now, pacer.next_turn + each * margin(rate) * 0.999)
        pacer.take(now)
    assert now <= began + len(late) * pacer.interval + margin(rate) / 4


@pytest.mark.parametrize(
    ("rate", "promised"), [("600/1m", 0.98), ("10/1s", 0.9), ("5000/1h", 0.98), ("100/1d", 0.98)]
)
def test_the_margin_costs_little(rate: str, promised: float) -> None:
    pacer = Pacer(parse_rate(rate))
    assert promised * parse_rate(rate).count <= parse_rate(rate).seconds / pacer.interval


def test_nothing_is_saved_up() -> None:
    pacer = Pacer(parse_rate("60/1m"))
    pacer.take(0.0)
    pacer.take(5000.0)
    assert pacer.next_turn == 5000.0 + pacer.interval


def test_one_goes_at_once_after_a_start_of_the_process() -> None:
    ticket = pace(Rates()).start(50.0)
    assert take(ticket, 50.0)
    assert not take(ticket, 50.5)
    assert take(ticket, 51.1)


# Starts and turns


def test_batches_start_when_a_turn_is_due_and_not_for_connections_that_come_late() -> None:
    found = pace(Rates(), parse_rate("60/1m"))
    (pacer,) = found.pacers
    tickets = []
    now = 0.0
    while not pacer.is_crowded:
        assert pacer.due <= now
        tickets.append(found.start(now))
        now = pacer.due
    assert len(tickets) == int(HORIZON / pacer.interval)
    # All connections stand at once: mail goes one by one all the same.
    assert [take(ticket, now) for ticket in tickets] == [True, False, False, False]
    assert not pacer.is_crowded
    assert pacer.due == now + pacer.interval


def test_with_a_slow_rate_one_at_a_time_starts() -> None:
    found = pace(Rates(), parse_rate("1/1h"))
    ticket = found.start(0.0)
    assert found.pacers[0].is_crowded
    ticket.take(100.0)
    assert not found.pacers[0].is_crowded
    assert found.pacers[0].due > 3700.0


def test_a_batch_that_ends_without_a_turn_gives_its_start_back() -> None:
    found = pace(Rates(), parse_rate("1/1h"))
    told: list[tuple[SiteKey, bool]] = []
    found._rates.changed = lambda site, earlier: told.append((site, earlier))
    ticket = found.start(10.0)
    ticket.end()
    ticket.end()
    assert found.pacers[0].due == 10.0
    assert not found.pacers[0].is_crowded
    taken = found.start(10.0)
    taken.take(10.0)
    taken.end()
    assert found.pacers[0].due > 3600.0
    assert told == [(SITE, True), (SITE, False)]


def test_every_transaction_of_a_batch_takes_a_turn() -> None:
    found = pace(Rates())
    ticket = found.start(0.0)
    ticket.take(0.0)
    again = ticket.due
    assert again == found.pacers[0].interval
    ticket.take(again)
    ticket.end()
    assert found.pacers[0].pending == 0
    assert found.pacers[0].due == 2 * found.pacers[0].interval


# Several lines at one site, and the zone


def test_without_rates_there_is_nothing() -> None:
    rates = Rates()
    assert rates.pace(SITE, LINE, None) is None
    assert not rates.used


def test_lines_with_one_rate_share_its_turns() -> None:
    rates = Rates()
    one, other = pace(rates).start(0.0), pace(rates, line=OTHER).start(0.0)
    one.take(0.0)
    assert other.due == FAST_INTERVAL


FAST_INTERVAL = Pacer(FAST).interval
SLOW_INTERVAL = Pacer(SLOW).interval


def test_a_line_never_exceeds_its_own_rate_and_all_together_never_the_fastest() -> None:
    rates = Rates()
    fast, slow = pace(rates, FAST), pace(rates, SLOW, OTHER)
    slow.start(0.0).take(0.0)
    assert fast.start(0.0).due == FAST_INTERVAL
    fast.start(5.0).take(5.0)
    assert slow.start(5.0).due == SLOW_INTERVAL


def test_a_line_without_a_rate_counts_only_for_the_zone() -> None:
    rates = Rates()
    rates.configure(SLOW)
    limited, free = pace(rates, FAST), pace(rates, None, OTHER)
    free.start(0.0).take(0.0)
    assert limited.at_site[0].due < 0
    assert limited.start(0.0).due == SLOW_INTERVAL
    elsewhere = pace(rates, None, DestinationKey("default mx.example.net:25"), SiteKey("x"))
    assert elsewhere.start(0.0).due == SLOW_INTERVAL


@given(
    rates=st.lists(rates, min_size=1, max_size=3),
    asks=st.lists(st.tuples(st.integers(0, 2), st.floats(0, 2)), max_size=150),
)
def test_no_rate_of_a_site_is_exceeded_whichever_line_asks(
    rates: list[Rate], asks: list[tuple[int, float]]
) -> None:
    known = Rates()
    lines = [pace(known, rate, DestinationKey(f"{n}")) for n, rate in enumerate(rates)]
    taken: list[list[float]] = [[] for _ in lines]
    now = 0.0
    for choice, gap in asks:
        line = choice % len(lines)
        now += gap * Pacer(rates[line]).interval
        ticket = lines[line].start(now)
        if take(ticket, now):
            taken[line].append(now)
        ticket.end()
    for times, rate in zip(taken, rates, strict=True):
        assert fullest(times, rate.seconds) <= rate.count
    fastest = min(rates, key=lambda rate: Pacer(rate).interval)
    assert fullest([time for times in taken for time in times], fastest.seconds) <= fastest.count


# Reloads


def test_a_rate_survives_whoever_asked_for_it() -> None:
    rates = Rates()
    pace(rates, parse_rate("1/1h")).start(0.0).take(0.0)
    gc.collect()
    assert pace(rates, parse_rate("1/1h")).start(1.0).due > 3600


def test_another_rate_counts_from_the_last_turn() -> None:
    rates = Rates()
    rates.configure(parse_rate("1/1h"))
    old = pace(rates, parse_rate("1/1h"))
    old.start(0.0).take(0.0)
    rates.configure(FAST)
    assert pace(rates, SLOW).start(0.0).due == SLOW_INTERVAL
    # Whoever still goes by the old settings waits for the new rate's turns too.
    assert old.start(0.0).due == SLOW_INTERVAL
    rates.configure(None)
    assert pace(rates, FAST).start(0.0).due == FAST_INTERVAL


def test_taking_up_the_same_rate_again_changes_nothing() -> None:
    rates = Rates()
    rates.configure(FAST)
    pace(rates, None).start(0.0).take(0.0)
    rates.configure(parse_rate("60/60s"))
    assert rates.zone is not None
    assert rates.zone.due == FAST_INTERVAL


def test_what_is_over_is_forgotten_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zonerelay.queue.destination.rates.MAX_BUSY", 10)
    rates = Rates()
    rates._max_busy = 10
    pace(rates, parse_rate("1/1h")).start(0.0).take(0.0)
    for n in range(200):
        ticket = pace(rates, FAST, DestinationKey(f"{n}"), SiteKey(f"{n}")).start(10.0 * n)
        ticket.take(10.0 * n)
        ticket.end()
    del ticket
    gc.collect()
    assert len(rates._busy) <= 25
    assert len(rates._sites) <= 25
    assert pace(rates, parse_rate("1/1h")).start(2000.0).due > 3600


# How long a batch waits for its turns, with a connection in its hands


async def test_a_first_turn_that_a_reload_has_moved_far_away_is_not_waited_for() -> None:
    """Else the connections of the batches under way, the zone's all perhaps, would wait for hours."""
    clock, rates = ManualClock(), Rates()
    quick = pace(rates, parse_rate("10/1s"))
    first, second = (quick.start(clock.monotonic()) for _ in range(2))
    pace(rates, parse_rate("1/1h"))
    assert await take_turn(first, clock)
    assert not await asyncio.wait_for(take_turn(second, clock), 1)


async def test_a_first_turn_that_is_only_late_is_waited_for() -> None:
    clock, rates = ManualClock(), Rates()
    slow = pace(rates, parse_rate(f"1/{LONGEST_FIRST - 10:.0f}s"))
    first, second = (slow.start(clock.monotonic()) for _ in range(2))
    assert await take_turn(first, clock)
    waiting = asyncio.create_task(take_turn(second, clock))
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
